"""Shows the progress of a long step: a bar with percent and elapsed time on a terminal, plain lines elsewhere."""

import sys
import threading
import time
from typing import TextIO

BAR_WIDTH = 24
REDRAW_INTERVAL_S = 0.1
PLAIN_INTERVAL_S = 15.0


_lock = threading.Lock()
_running: "list[Step]" = []  # the running steps; on a terminal only the first of them draws its bar


class Step:
    """A step with a known or unknown amount of work, used as a context manager.

    `update()` may be called as often as the caller likes, because it draws at most every 0.1 s. If the stream is not a
    terminal, the step prints a line at its start, at its end and, when `update()` is called, at most every
    PLAIN_INTERVAL_S seconds, so that a log shows progress without thousands of lines. Several threads may run steps at
    the same time, but each step must be used by one thread only.
    """

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        self._label = label
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._start = time.monotonic()
        self._drawn_at = self._start
        self._fraction: float | None = None
        self._note = ""
        self._closed = False

    def __enter__(self) -> "Step":
        self._start = self._drawn_at = time.monotonic()
        with _lock:
            _running.append(self)
            if self._live:
                self._draw()
            else:
                self._print(f"{self._label} ...")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._closed:
            self.done("stopped" if kind and issubclass(kind, KeyboardInterrupt) else "failed" if kind else "done")

    def update(self, fraction: float | None = None, note: str | None = None) -> None:
        """Sets the share of the work that is done (0 to 1) and a short note on it. None leaves the former value."""
        if fraction is not None:
            self._fraction = min(max(fraction, 0.0), 1.0)
        if note is not None:
            self._note = note
        now = time.monotonic()
        if now - self._drawn_at >= (REDRAW_INTERVAL_S if self._live else PLAIN_INTERVAL_S):
            self._drawn_at = now
            with _lock:
                if self._live:
                    self._draw()
                else:
                    share = "" if self._fraction is None else f" {self._fraction:4.0%}"
                    self._print(f"{self._label}{share} {self.elapsed_s:.0f} s {self._note}".rstrip())

    def done(self, outcome: str = "done") -> None:
        """Prints the step's last line: the outcome and the duration. __exit__() calls done() if the caller did not."""
        self._closed = True
        line = f"{self._label}: {outcome} ({self.elapsed_s:.1f} s)"
        with _lock:
            if self in _running:
                _running.remove(self)
            self._print(f"\r\x1b[K{line}" if self._live else line)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def _draw(self) -> None:
        if _running and _running[0] is not self:
            return
        if self._fraction is None:
            bar = ""
        else:
            filled = round(self._fraction * BAR_WIDTH)
            bar = f" [{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {self._fraction:4.0%}"
        line = f"{self._label}{bar} {self.elapsed_s:.0f} s {self._note}".rstrip()
        self._stream.write(f"\r\x1b[K{line[:118]}")
        self._stream.flush()

    def _print(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()
