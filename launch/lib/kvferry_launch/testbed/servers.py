"""Starts and stops vLLM servers and the kvferry controller, and waits until they are ready."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry_launch.node import serving
from kvferry_launch.node.cluster_key import KEY_ENV
from kvferry_launch.node.vllm import CPU_ENV, vllm_command
from kvferry_launch.paths import KVFERRY, LOGS
from kvferry_launch.process import ManagedProcess, ProcessError, free_port
from kvferry_launch.testbed.preloaded import server_process

READY_TIMEOUT_S = 300.0  # on an idle host a start takes 15 to 40 s
POLL_INTERVAL_S = 0.2


@dataclass
class VllmServer:
    """A vLLM server of the CPU build on this host, bound to `cores` ("0", "0-3", ...).

    The server takes and returns token ids (--enable-scale-out). It returns processed logprobs, which show whether
    another token than the expected one may come from rounding. start() does not wait until the server is ready;
    wait_ready() waits until /health answers.
    """

    name: str
    model: Path
    cores: str
    kv_config: dict[str, Any] | None = None
    flags: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 0
    log_folder: Path = LOGS
    python: str = sys.executable

    def __post_init__(self) -> None:
        self.port = self.port or free_port(self.host)
        flags = ("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--disable-uvicorn-access-log",
                 *self.flags)
        env = CPU_ENV | {"VLLM_CPU_OMP_THREADS_BIND": self.cores, "VLLM_NO_USAGE_STATS": "1"} | self.env
        command = vllm_command(self.python, str(self.model), self.host, self.port, self.kv_config, flags)
        self.process = server_process(self.name, command, env, self.log_folder / f"{self.name}.log")

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start(self) -> None:
        self.process.start()

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S, tick: Callable[[], None] = lambda: None) -> None:
        """Waits until /health answers, and calls `tick` meanwhile. Errors: ProcessError if the server died or is not
        healthy in time.
        """
        wait_healthy(self.process, f"{self.url}/health", timeout_s, tick)

    def healthy(self) -> bool:
        return serving.answers(f"{self.url}/health")

    def stop(self) -> None:
        self.process.stop()


def wait_healthy(process: ManagedProcess, url: str, timeout_s: float,
                 tick: Callable[[], None] = lambda: None) -> None:
    """Waits until `url` answers with status 200. Errors: ProcessError if the process died or isn't healthy in time."""
    _wait(process, lambda: serving.answers(url), "healthy", timeout_s, tick)


def _wait(process: ManagedProcess, is_ready: Callable[[], bool], what: str, timeout_s: float,
          tick: Callable[[], None] = lambda: None) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_ready():
        process.fail_if_dead()
        if time.monotonic() > deadline:
            raise ProcessError(f"{process.name} is not {what} after {timeout_s:.0f} s; its log is {process.log}:\n"
                               f"{process.tail()}")
        tick()
        time.sleep(POLL_INTERVAL_S)


CONTROLLER_FLAGS = ("--state", "none")


@dataclass
class Controller:
    """One `kvferry controller` on this host. `address` is the value for the connector's key `controller`."""

    name: str = "controller"
    port: int = 0
    flags: tuple[str, ...] = CONTROLLER_FLAGS
    binary: Path = KVFERRY
    log_folder: Path = LOGS
    key_file: Path | None = None

    def __post_init__(self) -> None:
        self.port = self.port or free_port()
        command = [str(self.binary), "controller", "--bind", self.address, *self.flags]
        self.process = ManagedProcess(self.name, command, self.member_env, self.log_folder / f"{self.name}.log")

    @property
    def member_env(self) -> dict[str, str]:
        """The environment variables with the path of this controller's cluster key, for commands and nodes."""
        return {KEY_ENV: str(self.key_file)} if self.key_file else {}

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def start(self) -> None:
        if not self.binary.exists():
            raise ProcessError(f"there is no {self.binary}; build it with launch/setup")
        self.process.start()

    def wait_ready(self, timeout_s: float = 20.0) -> None:
        """Waits until the controller listens. Errors: ProcessError if it died or does not listen in time."""
        listening = re.compile(r"^kvferry controller listening on ", re.MULTILINE)
        _wait(self.process, lambda: listening.search(self.process.log_text()) is not None, "listening", timeout_s)

    def nodes(self) -> list[dict[str, Any]]:
        """Returns the registered nodes, as `kvferry status --json` prints them."""
        found: list[dict[str, Any]] = json.loads(self.run("status", "--json"))["nodes"]
        return found

    def endpoints(self) -> dict[str, str]:
        """Maps the engine id of each node to the endpoint at which other nodes reach this node."""
        return {node["engine_id"]: node["endpoint"] for node in self.nodes()}

    def explain(self, request: str) -> dict[str, Any]:
        """Returns what `kvferry explain --json` prints about a request."""
        told: dict[str, Any] = json.loads(self.run("explain", request, "--json"))
        return told

    def run(self, *arguments: str) -> str:
        """Returns the output of a command of kvferry for this controller. Errors: CalledProcessError."""
        return subprocess.run([str(self.binary), *arguments, "--controller", self.address], stdout=subprocess.PIPE,
                              text=True, check=True, env=os.environ | self.member_env).stdout

    def stop(self) -> None:
        self.process.stop()


@contextmanager
def running_controller(name: str, log_folder: Path,
                       flags: tuple[str, ...] = CONTROLLER_FLAGS, key_file: Path | None = None) -> Iterator[Controller]:
    """Yields a controller that listens, and stops it after the `with` block."""
    controller = Controller(name, flags=flags, log_folder=log_folder, key_file=key_file)
    controller.start()
    try:
        controller.wait_ready()
        yield controller
    finally:
        controller.stop()
