"""Runs child processes that end when this process ends. Each child has a process group of its own."""

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Protocol

PR_SET_PDEATHSIG = 1
STOP_GRACE_S = 10.0
DEATH_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_libc = ctypes.CDLL(None, use_errno=True)


class ProcessError(Exception):
    """A process failed: for example, it died or was not ready in time. The message says how."""


class Child(Protocol):
    """The part of subprocess.Popen that ManagedProcess and its subclasses use."""

    pid: int
    stdin: IO[bytes] | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class ManagedProcess:
    """A child process whose output goes to a log file. Call start() in the main thread, because the kernel sends
    SIGTERM to the child when the thread that started the child ends. So the child also ends if this process is killed.

    stop() sends SIGINT to the child, waits up to `grace_s` for the child's end, and then kills the child's process
    group, so that the child's own children end too.
    """

    def __init__(self, name: str, command: list[str], env: dict[str, str], log: Path,
                 pass_fds: tuple[int, ...] = ()) -> None:
        self.name = name
        self.command = command
        self.env = env  # variables that the child gets in addition to this process's environment
        self.log = log
        self._pass_fds = pass_fds
        self._process: Child | None = None

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_bytes(b"")
        self._process = self._spawn()

    def _spawn(self) -> Child:
        with self.log.open("ab") as out:
            return subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                    env=os.environ | self.env, start_new_session=True, preexec_fn=_die_with_parent,
                                    pass_fds=self._pass_fds)

    @property
    def pid(self) -> int:
        assert self._process is not None, f"the process {self.name} was not started before this call"
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """The exit status. None: the process was not started or still runs; -N: signal N ended the process."""
        return self._process.poll() if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self.exit_status is None

    def wait(self, timeout_s: float) -> int | None:
        """Returns the exit status, or None if the process still runs after `timeout_s`."""
        assert self._process is not None, f"the process {self.name} was not started before this call"
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def signal(self, number: signal.Signals) -> None:
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def interrupt(self) -> None:
        self.signal(signal.SIGINT)

    def kill(self) -> None:
        """Kills the whole process group without a grace period, and waits for the end of the child."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        if self._process is not None:
            self.interrupt()
            self.wait(grace_s)
            self.kill()

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def tail(self, lines: int = 25) -> str:
        return "\n".join(self.log_text().splitlines()[-lines:])

    def fail_if_dead(self) -> None:
        if not self.running:
            status = self.exit_status
            how = "was not started" if status is None else (f"was ended by signal {-status}" if status < 0 else
                                                            f"ended with exit status {status}")
            raise ProcessError(f"the process {self.name} {how}; its log {self.log} ends with:\n{self.tail()}")


def stop_all(processes: Iterable[ManagedProcess], grace_s: float = STOP_GRACE_S) -> None:
    """Stops several processes at the same time. `grace_s`: the grace period, which is the same for all of them."""
    processes = list(processes)
    for process in processes:
        process.interrupt()
    deadline = time.monotonic() + grace_s
    for process in processes:
        process.stop(max(deadline - time.monotonic(), 0.0))


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a TCP port that is free now. The port is below the range from which Linux by default takes the ports of
    outgoing connections, so that no connection gets the port before the caller's server listens. Errors: OSError.
    """
    for _ in range(1000):
        port = random.randint(10_000, 32_767)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise OSError(f"none of 1000 random ports from 10000 to 32767 can be bound at {host}; either it is no address of "
                  "this host, or all these ports are in use")


def shell_status(status: int) -> int:
    """Returns Popen's exit status as a shell gives it: 128 + N if signal N ended the process."""
    return status if status >= 0 else 128 - status


def noted_signals(*numbers: signal.Signals) -> list[int]:
    """Installs handlers for these signals, which do nothing but append the signal's number to the returned list."""
    noted: list[int] = []
    for number in numbers:
        signal.signal(number, lambda got, _: noted.append(got))
    return noted


def write_whole(file: Path, text: str) -> None:
    """Writes the text to a temporary file, which is then renamed to `file`, so that no reader sees an incomplete text.
    """
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    scratch.write_text(text)
    scratch.rename(file)


def copy_from(file: Path, offset: int) -> int:
    """Copies to stdout what the file has after its first `offset` bytes. Returns the offset of the end of what was
    copied. Copies nothing, and returns `offset`, if the file can't be read.
    """
    with contextlib.suppress(OSError), file.open("rb") as text:
        text.seek(offset)
        piece = text.read()
        offset += len(piece)
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
    return offset


def _die_with_parent() -> None:
    """Runs in a child, before its program starts. Lets the child end with this process, and lets SIGINT interrupt the
    child even if this process is a background job of a shell. Such a job ignores SIGINT, and its children inherit that.
    """
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
