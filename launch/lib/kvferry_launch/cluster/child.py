"""A child process of the launcher, such as a node's command: its start and end, the lines for its stdin, its log."""

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
    """A command that runs under guard.py, on this or another host. close() ends the command and all its descendants.
    If the command runs on another MPI rank, guard.py runs there too, and `launch/cluster mpi-relay` reads the stdin.

    The command's output is appended to the log. lines() returns the lines that were added to the log since the last
    call or, at the first call, since start().
    """

    def __init__(self, name: str, command: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        super().__init__(name, command, env or {}, log)
        self._offset = 0
        self._pending = b""
        self._unsent = b""
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
        """Sends a line to the guard's stdin. If the pipe is full, later calls of tell() and lines() send the rest. A
        guard with --stdin passes lines on to the command, except for keys, lists of members and ".", which only shows
        that this process runs.
        """
        if line != "." or not self._unsent:
            self._unsent += f"{line}\n".encode()
        self._send()

    def _send(self) -> None:
        if self._process is None or self._process.stdin is None or self._process.stdin.closed:
            return
        with contextlib.suppress(OSError):
            while self._unsent:
                self._unsent = self._unsent[os.write(self._process.stdin.fileno(), self._unsent):]

    def close(self) -> None:
        """Asks the guard to end the command, and returns at once. exit_status is None until the guard has ended."""
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.closed:
            self._closed_at = time.monotonic()
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    @property
    def overdue(self) -> bool:
        """True if close() was called, and more time has passed since then than the guard needs to end the command."""
        return self._closed_at is not None and time.monotonic() - self._closed_at > GRACE_S + 5

    def end_now(self) -> None:
        """Closes the guard's stdin and sends SIGINT. If the guard runs on this host and is ending the command already,
        it then skips the rest of its grace period. If the guard runs on another host, the SIGINT ends only the ssh on
        this host; the guard notices the end of its stdin, and ends the command within its whole grace period.
        """
        self.close()
        self.signal(signal.SIGINT)

    def lines(self) -> list[str]:
        self._send()
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
