"""Lines of JSON on stdin and stdout between `kvferry bench` and a program of this folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

Message = dict[str, Any]
INTERNAL = 10  # the number of kInternal in transport/base/result.h


def reason(error: Exception) -> str:
    """Returns the first line of an error's text, at most 300 characters. The name of the error's type comes first,
    unless the type is RuntimeError or TimeoutError.
    """
    text = str(error) if type(error) in (RuntimeError, TimeoutError) else f"{type(error).__name__}: {error}"
    return (text.splitlines() or [type(error).__name__])[0][:300]


class JsonLines:
    """Exchanges lines of JSON over stdin and stdout. What libraries print to stdout afterwards goes to stderr."""

    def __init__(self) -> None:
        self._lines = os.fdopen(os.dup(0), "r")
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def say(self, message: Message) -> None:
        print(json.dumps(message), file=self._out, flush=True)

    def first(self) -> Message:
        line = self._lines.readline()
        if not line:
            raise SystemExit("stdin is empty; this program is started by `kvferry bench`, which sends it JSON on stdin")
        message: Message = json.loads(line)
        return message

    def rest(self) -> Iterator[Message]:
        yield from map(json.loads, self._lines)

    def run(self, work: Callable[[], None]) -> None:
        """Runs `work`, reports its exception, if any, as a line of JSON, and ends the process."""
        try:
            work()
        except Exception as error:
            self.say({"error": reason(error), "code": INTERNAL})
        self._out.flush()
        os._exit(0)  # skips the cleanup at exit, in which some libraries hang or crash
