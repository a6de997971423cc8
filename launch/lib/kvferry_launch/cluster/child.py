"""One process of the deployment as the supervisor uses it: its stdin, its log, its new output."""

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

from kvferry_launch.cluster.start import GRACE_S
from kvferry_launch.process import ManagedProcess, _die_with_parent

LINE_MAX = 400
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Child(ManagedProcess):
    """A command run by guard.py: closing the guard's stdin ends the command and all its descendants, on any host.

    The output is appended to the log; lines() returns the lines since start() that it has not returned yet.
    """

    def __init__(self, name: str, command: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        super().__init__(name, command, env or {}, log)
        self._offset = 0
        self._pending = b""
        self.last_line = ""
        self._closed_at: float | None = None

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self._offset = out.tell()
            self._process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT,
                                             env=os.environ | self.env, start_new_session=True,
                                             preexec_fn=_die_with_parent)
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)

    @property
    def started(self) -> bool:
        return self._process is not None

    def tell(self, line: str) -> None:
        """Writes a line to the guard, which passes it on if it runs with --stdin and the line is not ".".

        The line is lost if the pipe is full.
        """
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(OSError):
                os.write(self._process.stdin.fileno(), f"{line}\n".encode())

    def close(self) -> None:
        """Asks the process to end; exit_status shows when it has ended."""
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.closed:
            self._closed_at = time.monotonic()
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    @property
    def overdue(self) -> bool:
        """True if close() was called longer ago than the guard takes to end the process."""
        return self._closed_at is not None and time.monotonic() - self._closed_at > GRACE_S + 5

    def end_now(self) -> None:
        """Ends the process without a grace period; its guard still ends all descendants."""
        self.close()
        self.signal(signal.SIGTERM)

    def lines(self) -> list[str]:
        try:
            with self.log.open("rb") as text:
                text.seek(self._offset)
                piece = text.read()
        except OSError:
            return []
        self._offset += len(piece)
        *lines, self._pending = (self._pending + piece).split(b"\n")
        found = [COLOURS.sub("", line.decode(errors="replace")).strip()[:LINE_MAX] for line in lines]
        for line in found:
            if line:
                self.last_line = line
        return found
