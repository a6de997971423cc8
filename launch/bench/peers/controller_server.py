"""Starts and observes the servers of other projects' directories, for `kvferry bench controller --peers`."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

PATIENCE_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(words: Sequence[str], log: str = "/dev/null", **environment: str) -> subprocess.Popen[bytes]:
    """Starts a program that the kernel kills when this program ends."""
    libc = ctypes.CDLL(None)
    with Path(log).open("wb") as out:
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                env={**os.environ, **environment}, preexec_fn=lambda: libc.prctl(1, signal.SIGKILL))


def wait_until(is_there: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_there():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {PATIENCE_S:.0f} s without success for {what}")
        time.sleep(0.002)


def answers_at(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def resident_bytes(pid: int) -> int:
    if pid == os.getpid():
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
