"""How the commands `status`, `scale` and `down` reach a running `up`: over a Unix socket, with one JSON line each way.
"""

import contextlib
import json
import os
import select
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvferry_launch.cluster.schema import SpecError

SOCKET = "control.sock"
ANSWER_WITHIN_S = 10.0
LINE_MAX = 65536


@contextlib.contextmanager
def short_path(folder: Path) -> Iterator[str]:
    """Yields a short path of the socket, through a descriptor of the folder. A longer path might not fit, because the
    path of a Unix socket has at most 107 bytes.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


class ControlServer:
    """Answers the requests of `status`, `scale` and `down`, one client after the other, in the supervisor's loop."""

    def __init__(self, folder: Path, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._answer = answer
        self._file = folder / SOCKET
        self._file.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX)
        with short_path(folder) as path:
            self._socket.bind(path)
        self._file.chmod(0o600)
        self._socket.listen(16)

    def serve(self, wait_s: float) -> None:
        """Waits up to `wait_s` for a client, and answers the client's request."""
        if not select.select([self._socket], [], [], wait_s)[0]:
            return
        client, _ = self._socket.accept()
        with client, contextlib.suppress(OSError):
            client.settimeout(1.0)
            text = b""
            while not text.endswith(b"\n") and len(text) < LINE_MAX and (piece := client.recv(4096)):
                text += piece
            client.sendall((json.dumps(self._safe_answer(text)) + "\n").encode())

    def close(self) -> None:
        self._socket.close()
        self._file.unlink(missing_ok=True)

    def _safe_answer(self, text: bytes) -> dict[str, Any]:
        try:
            return self._answer(json.loads(text))
        except SpecError as error:
            return {"error": str(error)}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return {"error": "the request is not valid, because it is not a JSON object with 'do' and the fields that "
                    f"this needs ({type(error).__name__}: {error})"}


def ask(folder: Path, request: dict[str, Any]) -> dict[str, Any] | None:
    """Sends a request to the running `up`. Returns the answer, or None if no `up` answers. Errors: SpecError if `up`
    refuses the request.
    """
    try:
        with socket.socket(socket.AF_UNIX) as client, short_path(folder) as path:
            client.settimeout(ANSWER_WITHIN_S)
            client.connect(path)
            client.sendall((json.dumps(request) + "\n").encode())
            text = b""
            while piece := client.recv(65536):
                text += piece
    except OSError:
        return None
    try:
        answer: dict[str, Any] = json.loads(text)
    except ValueError:
        return None
    if "error" in answer:
        raise SpecError(answer["error"])
    return answer
