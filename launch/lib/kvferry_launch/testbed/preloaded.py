"""Starts vLLM servers as forks of one process that has imported vLLM, because the import is the longest part of a
server's start.

On GPUs, vLLM itself forks its engine and workers. On CPUs it starts each of them in a new interpreter, because OpenMP
reads its number of threads when it is loaded. Here they can be forks on CPUs too, because all use one thread.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import IO, Any

from kvferry_launch.node.vllm import API_SERVER
from kvferry_launch.paths import LOGS
from kvferry_launch.process import PR_SET_PDEATHSIG, STOP_GRACE_S, Child, ManagedProcess

MODULE = API_SERVER[1]
_REQUEST_MAX = 1 << 20  # bytes
_SPIN_S = 0.002
_preloaded: "_Preloaded | None" = None


@contextlib.contextmanager
def vllm_is_preloaded() -> Iterator[None]:
    """Within this context, the servers that server_process() starts are forks of one process that has imported vLLM.
    These servers end at the end of the context.
    """
    global _preloaded
    with _Preloaded() as _preloaded:
        try:
            yield
        finally:
            _preloaded = None


def server_process(name: str, command: list[str], env: dict[str, str], log: Path) -> ManagedProcess:
    """Returns a process that runs `command`: `PYTHON -m MODULE ...`, where MODULE is vLLM's API server."""
    return _ServerProcess(name, command, env, log)


class _ServerProcess(ManagedProcess):
    def _spawn(self) -> Child:
        return super()._spawn() if _preloaded is None else _preloaded.fork(self.command, self.env, self.log)


class _Preloaded:
    """The process that has imported vLLM. It starts when the first fork is requested."""

    def __init__(self) -> None:
        self._process: ManagedProcess | None = None
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def __enter__(self) -> "_Preloaded":
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.close()
        self._theirs.close()
        if self._process is not None:
            self._process.wait(STOP_GRACE_S)
            self._process.kill()

    def fork(self, command: list[str], env: dict[str, str], log: Path) -> "_Fork":
        if self._process is None:
            own = [sys.executable, "-m", __name__, str(self._theirs.fileno())]
            self._process = ManagedProcess("vllm-preloaded", own, {"OMP_NUM_THREADS": "1"}, LOGS / "vllm-preloaded.log",
                                           (self._theirs.fileno(),))
            self._process.start()
        arguments = command[command.index(MODULE) + 1:]
        return _Fork(self, self.ask({"arguments": arguments, "env": dict(os.environ | env), "log": str(log)}))

    def ask(self, request: dict[str, Any]) -> int:
        self._ours.send(json.dumps(request).encode())
        while not select.select([self._ours], [], [], 1.0)[0]:
            assert self._process is not None
            self._process.fail_if_dead()
        return int(self._ours.recv(_REQUEST_MAX))


class _Fork:
    """A server that the preloaded process has forked."""

    stdin: IO[bytes] | None = None

    def __init__(self, parent: _Preloaded, pid: int) -> None:
        self.pid = pid
        self._parent = parent
        self._pidfd = os.pidfd_open(pid)
        self._status: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        if self._status is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(MODULE, timeout or 0.0)
            self._status = self._parent.ask({"ended": self.pid})
            os.close(self._pidfd)
        return self._status


def _serve(requests: socket.socket) -> None:
    """Answers requests until the other end of `requests` is closed: forks a server and sends its process id, or sends
    the exit status of a server that has ended.
    """
    __import__(MODULE)
    _fork_engines()
    _spin_briefly()
    # The servers share this process's resource tracker, which removes shared memory that killed servers have left.
    tracker = resource_tracker._resource_tracker
    tracker.ensure_running()
    while text := requests.recv(_REQUEST_MAX):
        request = json.loads(text)
        if "ended" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["ended"], 0)[1])
        elif not (answer := os.fork()):
            requests.close()
            _run(request["arguments"], request["env"], request["log"])
        requests.send(str(answer).encode())
    tracker._stop()  # type: ignore[attr-defined]  # waits for the tracker to remove the rest


def _fork_engines() -> None:
    """Makes vLLM start its engines and workers as forks, in this process and in its forks."""
    for module in list(sys.modules.values()):
        if module.__name__.startswith("vllm.") and hasattr(module, "get_mp_context"):
            vars(module)["get_mp_context"] = lambda: multiprocessing.get_context("fork")


def _spin_briefly() -> None:
    """Makes vLLM's workers, in this process and in its forks, poll for only `_SPIN_S` after a message before they
    sleep. vLLM's own time, a second, suits hosts with a core for each worker. With the shorter time, the tests of
    preempted requests need 40 % less processor time.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    SpinCondition.__init__.__defaults__ = (_SPIN_S,)


def _run(arguments: list[str], env: dict[str, str], log: str) -> None:
    """Runs vLLM's API server in this process, which was forked for it, and then exits."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [MODULE, *arguments]
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
