"""The deployments that are compared, all on the same two cores: starts them, and says where clients send requests."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import processors
from kvferry_launch.node.vllm import KVFERRY_CONNECTOR, KvConnector
from kvferry_launch.paths import BUILD, LOGS, REPO
from kvferry_launch.process import ManagedProcess, ProcessError, free_port, stop_all
from kvferry_launch.testbed.pair import own_cores
from kvferry_launch.testbed.servers import Controller, VllmServer, wait_healthy

NIXL = ("nixl==1.5.1", "nixl-cu13==1.5.1")
# Number of NIXL's threads. vLLM's default is 4. Here 1 is best, because the threads poll on the only core of the model.
NIXL_THREADS = {"nixl": 1, "nixl-default": 4, "nixl-third-core": 1}
NIXL_FOLDER = BUILD / "bench-venv" / "nixl"
PLOT_FOLDER = BUILD / "bench-venv" / "plot"
TRANSFERS = {"pushed": "push", "pulled": "pull"}  # both are measured with the same kvferry pair behind launch/proxy
NAMES = ("plain", *TRANSFERS, *NIXL_THREADS)
LOG_FOLDER = LOGS / "bench-serve"
CONTEXT = 9216
FLAGS = ("--max-model-len", str(CONTEXT), "--max-num-batched-tokens", "4096",
         "--hf-overrides", json.dumps({"max_position_embeddings": CONTEXT}))
MEMORY_GIB = 3  # memory of vLLM's KV cache, and also of kvferry's pool; enough for 12288 tokens of the wide model


@dataclass
class Deployment:
    """The processes of one deployment. Without a prefill server, `decode` is the only server."""

    decode: VllmServer
    prefill: VllmServer | None = None
    controller: Controller | None = None  # kvferry's
    http: str = ""  # the controller's HTTP address, for launch/proxy


def install(folder: Path, *packages: str) -> None:
    """Installs packages for .venv's Python into a separate folder, so that .venv stays unchanged. Errors: ProcessError.
    """
    mark = folder / ".complete"
    if mark.exists():
        return
    done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), *packages],
                          capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ProcessError(f"pip can't install {packages[-1]}: {(done.stderr.strip() or 'no reason').splitlines()[-1]}")
    mark.touch()


@contextlib.contextmanager
def running(name: str, model: Path) -> Iterator[Deployment]:
    """Starts the servers of one of NAMES and stops them at the end. Errors: ProcessError if a server does not become
    ready.
    """
    cores = own_cores()
    with contextlib.ExitStack() as parts:
        made = Deployment(_server("plain", model, "-".join(dict.fromkeys(cores)), None))
        if name in TRANSFERS:
            made = _kvferry_pair(model, cores, parts)
        elif name in NIXL_THREADS:
            made = _nixl_pair(name, model, cores)
        servers = [server for server in (made.prefill, made.decode) if server]
        parts.callback(stop_all, [server.process for server in servers])
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready()
        if name == "nixl-third-core":
            for server in servers:
                processors.part_from_helpers(server.process.pid, int(cores[0]), int(cores[1]))
        elif made.prefill is not None:
            # vLLM binds the model's threads only. Its other processes would be stalled for up to a second on the core
            # of the other server's model, although their own server's core is idle then.
            for server, core in zip((made.prefill, made.decode), cores, strict=True):
                processors.bind(server.process.pid, int(core))
        yield made


def _server(name: str, model: Path, cores: str, kv_config: dict[str, Any] | None, env: dict[str, str] | None = None,
            port: int = 0) -> VllmServer:
    return VllmServer(name, model, cores, kv_config, FLAGS, {"VLLM_CPU_KVCACHE_SPACE": str(MEMORY_GIB)} | (env or {}),
                      port=port, log_folder=LOG_FOLDER)


def _controller(parts: contextlib.ExitStack, http: str) -> Controller:
    controller = Controller("controller", flags=("--state", "none", "--http", http), log_folder=LOG_FOLDER)
    parts.callback(controller.stop)
    controller.start()
    controller.wait_ready()
    return controller


@contextlib.contextmanager
def running_alone(name: str, model: Path, core: str) -> Iterator[VllmServer]:
    """Starts one server on one core, and stops it at the end. "saving": kvferry saves all KV that the server computes;
    "plain": it has no connector. Errors: ProcessError if the server does not become ready.
    """
    with contextlib.ExitStack() as parts:
        config = None
        if name == "saving":
            controller = _controller(parts, f"127.0.0.1:{free_port()}")
            config = KVFERRY_CONNECTOR.config("kv_both", controller.address, name, {"pool_bytes": f"{MEMORY_GIB}GiB"})
        server = _server(f"{name}-one-core", model, core, config)
        parts.callback(stop_all, [server.process])
        server.start()
        server.wait_ready()
        yield server


def _kvferry_pair(model: Path, cores: tuple[str, str], parts: contextlib.ExitStack) -> Deployment:
    http = f"127.0.0.1:{free_port()}"
    controller = _controller(parts, http)

    def server(side: str, role: str, core: str) -> VllmServer:
        port = free_port()
        extra = {"pool_bytes": f"{MEMORY_GIB}GiB", "serves": f"http://127.0.0.1:{port}"}
        return _server(f"kvferry-{side}", model, core, KVFERRY_CONNECTOR.config(role, controller.address, side, extra),
                       port=port)

    prefill, decode = server("prefill", "kv_producer", cores[0]), server("decode", "kv_consumer", cores[1])
    return Deployment(decode, prefill, controller, http)


def _nixl_pair(name: str, model: Path, cores: tuple[str, str]) -> Deployment:
    paths = [str(NIXL_FOLDER), os.environ.get("PYTHONPATH", "")]

    def server(side: str, core: str) -> VllmServer:
        env = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        extra = {"num_threads": NIXL_THREADS[name]}
        config = KvConnector("NixlConnector").config("kv_both", engine_id=side, extra=extra)
        return _server(f"{name}-{side}", model, core, config, env)

    return Deployment(server("decode", cores[1]), server("prefill", cores[0]))


@dataclass
class Door:
    """The address to which clients send requests."""

    url: str
    process: ManagedProcess | None = None


@contextlib.contextmanager
def door(deployment: Deployment, name: str, first_token: str, prepare_from: int = 0) -> Iterator[Door]:
    """Starts launch/proxy for kvferry, or vllm-router for NIXL. Clients send requests to a plain server directly.
    `prepare_from`: as --prepare-from of launch/proxy. Errors: ProcessError.
    """
    if deployment.prefill is None:
        yield Door(deployment.decode.url)
        return
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    ready = "/health"
    if name in TRANSFERS:
        command = [str(REPO / "launch" / "proxy"), "--port", str(port), "--controller", f"http://{deployment.http}",
                   "--transfer", TRANSFERS[name], "--first-token", first_token, "--without-prefill", "refuse",
                   "--prepare-from", str(prepare_from)]
    else:
        ready = "/readiness"
        command = [sys.executable, "-m", "vllm_router.launch_router", "--policy", "consistent_hash",
                   "--vllm-pd-disaggregation", "--prefill", deployment.prefill.url, "--decode", deployment.decode.url,
                   "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    process = ManagedProcess(f"{name}-door", command, {}, LOG_FOLDER / f"{name}-door.log")
    with contextlib.ExitStack() as parts:
        parts.callback(process.stop)
        process.start()
        wait_healthy(process, url + ready, timeout_s=60.0)
        yield Door(url, process)
