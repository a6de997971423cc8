"""Tracks the requests that wait for a server's answers. These waits end early if the controller no longer lists the
server and the server sends nothing.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class LostError(Exception):
    """The controller no longer lists the server for whose answer a request waited, and the server sent nothing."""


class Waits:
    """The tasks that wait for one server; a task waits for one server at a time."""

    def __init__(self) -> None:
        # Maps each waiting task to the time of the last bytes that were recorded or, before that, to the wait's start.
        self._heard_at: dict[asyncio.Task[Any], float] = {}
        self._ended: set[asyncio.Task[Any]] = set()

    def __bool__(self) -> bool:
        return bool(self._heard_at)

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Counts the current task as waiting for the server during the `with` block. Errors: LostError if end_silent()
        ended the wait.
        """
        task = asyncio.current_task()
        assert task is not None
        self._heard_at[task] = time.monotonic()
        try:
            yield
        except asyncio.CancelledError:
            # If the client has closed its connection too, the task was cancelled twice. Then uncancel() returns more
            # than 0, and the cancellation must be raised again. Before 3.11, Python has no uncancel().
            if task not in self._ended or getattr(task, "uncancel", int)() > 0:
                raise
            raise LostError("the controller no longer lists the server, and the server does not answer") from None
        finally:
            del self._heard_at[task]
            self._ended.discard(task)

    def heard(self) -> None:
        """Records that the server has sent bytes to the current task."""
        task = asyncio.current_task()
        if task in self._heard_at:
            self._heard_at[task] = time.monotonic()

    def end_silent(self, silence_s: float, since: float = 0.0) -> None:
        """Ends each wait in which the server has sent nothing for `silence_s`. Time before `since` does not count as
        silence.
        """
        now = time.monotonic()
        for task, heard_at in self._heard_at.items():
            if now - max(heard_at, since) >= silence_s and task not in self._ended:
                self._ended.add(task)
                task.cancel()
