"""The deployments that are compared, each on the same two cores: how they start, and where requests go."""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry_launch.node.vllm import KVFERRY_CONNECTOR, KvConnector
from kvferry_launch.paths import BUILD, LOGS, REPO
from kvferry_launch.process import ManagedProcess, ProcessError, free_port, stop_all
from kvferry_launch.testbed.pair import own_cores
from kvferry_launch.testbed.servers import Controller, VllmServer, wait_healthy

NIXL = ("nixl==1.5.1", "nixl-cu13==1.5.1")
# vLLM gives NIXL four threads that poll, which take the core from the model where there is one: this is its best here.
NIXL_EXTRA = {"num_threads": 1}
NIXL_FOLDER = BUILD / "bench-venv" / "nixl"
PLOT_FOLDER = BUILD / "bench-venv" / "plot"
NAMES = ("plain", "kvferry", "kvferry-pull", "nixl")
LOG_FOLDER = LOGS / "bench-serve"
FLAGS = ("--max-model-len", "4096", "--max-num-batched-tokens", "4096", "--no-enable-prefix-caching")
POOL_BYTES = "3GiB"


@dataclass
class Deployment:
    """What runs. `front`: where clients go; without a pair `decode` is the one server there is."""

    name: str
    front: str
    prefill: VllmServer | None
    decode: VllmServer
    push_to: str | None = None  # the decode node's endpoint, where KV is pushed to it


def install(folder: Path, *packages: str) -> None:
    """Packages for .venv's Python in a folder of their own, so that .venv stays as it is. Errors: ProcessError."""
    mark = folder / ".complete"
    if mark.exists():
        return
    done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), *packages],
                          capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ProcessError(f"pip can't install {packages[-1]}: {done.stderr.strip().splitlines()[-1:]}")
    mark.touch()


@contextlib.contextmanager
def running(name: str, model: Path) -> Iterator[Deployment]:
    """Starts one of NAMES and stops it at the end. Errors: ProcessError when a part does not come up."""
    with contextlib.ExitStack() as parts:
        if name == "plain":
            cores = own_cores()
            # One server on both cores.
            server = _server("plain", model, f"{cores[0]}-{cores[1]}" if cores[0] != cores[1] else cores[0], None)
            parts.callback(server.stop)
            server.start()
            server.wait_ready()
            yield Deployment(name, server.url, None, server)
        else:
            yield _pair(name, model, parts)


def _server(name: str, model: Path, cores: str, kv_config: dict[str, Any] | None,
            env: dict[str, str] | None = None, port: int = 0) -> VllmServer:
    return VllmServer(name, model, cores, kv_config, FLAGS, {"VLLM_CPU_KVCACHE_SPACE": "2"} | (env or {}), port=port,
                      log_folder=LOG_FOLDER)


def _pair(name: str, model: Path, parts: contextlib.ExitStack) -> Deployment:
    is_nixl = name == "nixl"
    connector = KvConnector("NixlConnector") if is_nixl else KVFERRY_CONNECTOR
    controller, http, address = None, free_port(), None
    if not is_nixl:
        controller = Controller(f"{name}-controller", flags=("--state", "none", "--http", f"127.0.0.1:{http}"),
                                log_folder=LOG_FOLDER)
        parts.callback(controller.stop)
        controller.start()
        controller.wait_ready()
        address = controller.address
    servers = []
    for side, role, core in zip(("prefill", "decode"), ("kv_producer", "kv_consumer"), own_cores(), strict=True):
        port, env, extra = free_port(), {}, NIXL_EXTRA
        if is_nixl:
            role = "kv_both"
            paths = [str(NIXL_FOLDER), os.environ.get("PYTHONPATH", "")]
            env = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        else:
            extra = {"pool_bytes": POOL_BYTES, "serves": f"http://127.0.0.1:{port}"}
        config = connector.config(role, address, f"{name}-{side}", extra)
        servers.append(_server(f"{name}-{side}", model, core, config, env, port))
    parts.callback(stop_all, [server.process for server in servers])
    for server in servers:
        server.start()
    for server in servers:
        server.wait_ready()
    prefill, decode = servers
    front = _proxy(name, http, parts) if name == "kvferry" else _router(name, prefill, decode, parts)
    endpoint = controller.endpoints()[f"{name}-decode"] if name == "kvferry" and controller else None
    return Deployment(name, front, prefill, decode, endpoint)


def _proxy(name: str, http: int, parts: contextlib.ExitStack) -> str:
    process = ManagedProcess(f"{name}-proxy", [str(REPO / "launch" / "proxy"), "--port", "0", "--controller",
                                               f"http://127.0.0.1:{http}"], {}, LOG_FOLDER / f"{name}-proxy.log")
    parts.callback(process.stop)
    process.start()
    deadline = time.monotonic() + 30
    while not (said := re.search(r"listening on (http://\S+)", process.log_text())):
        process.fail_if_dead()
        if time.monotonic() > deadline:
            raise ProcessError(f"{process.name} does not listen:\n{process.tail()}")
        time.sleep(0.1)
    return said[1]


def _router(name: str, prefill: VllmServer, decode: VllmServer, parts: contextlib.ExitStack) -> str:
    port = free_port()
    command = [sys.executable, "-m", "vllm_router.launch_router", "--policy", "consistent_hash",
               "--vllm-pd-disaggregation", "--prefill", prefill.url, "--decode", decode.url, "--host", "127.0.0.1",
               "--port", str(port), "--prometheus-port", str(free_port())]
    process = ManagedProcess(f"{name}-router", command, {}, LOG_FOLDER / f"{name}-router.log")
    parts.callback(process.stop)
    process.start()
    wait_healthy(process, f"http://127.0.0.1:{port}/readiness", timeout_s=60.0)
    return f"http://127.0.0.1:{port}"
