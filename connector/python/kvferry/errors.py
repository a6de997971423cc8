"""Reports a failed start: prints one line on stderr, and raises the exception that ends the start."""

import sys
from typing import NoReturn

from kvferry._core import KvFerryError


def refuse_to_start(message: str) -> NoReturn:
    """Prints `message` as one line that can be found in vLLM's log, and raises a KvFerryError with this line."""
    line = message if message.startswith("kvferry: ") else f"kvferry: {message}"
    print(line, file=sys.stderr, flush=True)
    raise KvFerryError(line)
