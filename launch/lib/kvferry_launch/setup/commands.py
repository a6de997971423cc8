"""Runs the commands of a set-up step with their output in a log, and records which steps are done."""

import hashlib
import os
import re
import select
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvferry_launch.paths import REPO

NO_NETWORK = re.compile(
    r"Temporary failure resolving|Could not resolve|Network is unreachable|Connection (refused|timed out)"
    r"|Failed to establish a new connection|Name or service not known|Max retries exceeded"
)
TAIL_LINES = 25
_stop = threading.Event()  # while it is set, running commands are ended


class SetupError(Exception):
    """A step failed. The message is one sentence for the user; `tail` is the end of the failed command's output, if
    any.
    """

    def __init__(self, message: str, tail: str = "") -> None:
        super().__init__(message)
        self.tail = tail


def run_logged(what: str, command: list[str], log: Path, on_line: Callable[[str], None] = lambda line: None,
               tick: Callable[[], None] = lambda: None) -> None:
    """Runs a command and appends its output to `log`. Calls `on_line` for each line, and `tick` at least twice a
    second.

    Errors: SetupError. If the command failed, the error says whether the network was the cause, and has the end of the
    output.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8", errors="replace") as out:
        out.write(f"\n$ {' '.join(command)}\n")
        out.flush()
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                       stderr=subprocess.STDOUT, cwd=REPO)
        except FileNotFoundError as error:
            raise SetupError(f"the program '{command[0]}' is not installed on this host or not on PATH; install it "
                             "and start again") from error
        tail: list[str] = []
        assert process.stdout is not None
        try:
            for line in _lines(process.stdout.fileno(), tick):
                out.write(line + "\n")
                tail = [*tail[-TAIL_LINES:], line]
                on_line(line)
            code = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        finally:
            process.stdout.close()
    if code != 0:
        text = "\n".join(tail[-TAIL_LINES:])
        reason = "a server on the network was not reached" if NO_NETWORK.search(text) else f"exit status {code}"
        raise SetupError(f"{what} failed ({reason}); the full output is in {log.relative_to(REPO)}", text)


@contextmanager
def beside(step: Callable[[], None]) -> Iterator[None]:
    """Runs `step` in another thread during the `with` block. If `step` or the block fails, the running command of the
    other is ended. Raises the first error, or KeyboardInterrupt if it is among the errors.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            step()
        except BaseException as error:
            errors.append(error)
            _stop.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    except BaseException as error:
        errors.insert(0 if isinstance(error, KeyboardInterrupt) else len(errors), error)
        _stop.set()
    thread.join()
    _stop.clear()
    if errors:
        raise errors[0]


def _lines(fd: int, tick: Callable[[], None]) -> Iterator[str]:
    pending = b""
    while True:
        ready, _, _ = select.select([fd], [], [], 0.5)
        if _stop.is_set():
            raise SetupError("this step was stopped, because another step of the set-up failed")
        tick()
        if not ready:
            continue
        piece = os.read(fd, 65536)
        if not piece:
            break
        *whole, pending = (pending + piece).replace(b"\r", b"\n").split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
    if pending:
        yield pending.decode(errors="replace")


@contextmanager
def stamped(stamp: Path, *inputs: Path) -> Iterator[bool]:
    """Yields False if the file `stamp` has the hash of the files in `inputs`, so that the caller can skip its step.
    Otherwise yields True, and writes the hash to `stamp` unless the `with` block raises an error.
    """
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in inputs)).hexdigest()
    stale = not stamp.exists() or stamp.read_text() != digest
    yield stale
    if stale:
        stamp.write_text(digest)
