"""One request of a client with its state in the proxy, and the answers that the proxy makes or passes on."""

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from kvferry_launch.proxy.http_connection import Exchange
from kvferry_launch.proxy.json_bodies import Body
from kvferry_launch.proxy.request_log import RequestLog
from kvferry_launch.proxy.streams import Stream
from kvferry_launch.proxy.trace_context import NAMES as TRACE_HEADERS

# Headers that the proxy does not forward: they apply to one connection, or the proxy sets them itself.
_OWN_HEADERS = frozenset(("host", "content-length", "content-type", "connection", "keep-alive", "transfer-encoding",
                          "te", "trailer", "upgrade", "expect", "accept-encoding", "x-request-id", *TRACE_HEADERS))

# Headers of a server's answer that the client gets.
_COPIED = {"content-type": "Content-Type", "x-request-id": "X-Request-Id", "retry-after": "Retry-After"}


class ClientGoneError(Exception):
    """The client closed its connection before it had the whole answer."""


@dataclass
class ClientRequest:
    """One request of a client. The state is kept while the proxy tries one pair of servers after the other."""

    request: web.Request
    body: Body
    log: RequestLog

    def __post_init__(self) -> None:
        self.path = self.request.path
        self.request_id = self.request.headers.get("X-Request-Id") or uuid.uuid4().hex
        self.log.request_id = self.request_id
        self._forwarded = forwarded(self.request.headers) | {"Content-Type": "application/json"}
        self.stream = Stream(self.path, self.body)
        self.response: web.StreamResponse | None = None  # set once the client's answer has begun

    def headers(self, attempt: int) -> dict[str, str]:
        """Returns the headers for a server. Each attempt has a request id of its own, because the same server may still
        run an earlier attempt.
        """
        made = self._forwarded | self.log.trace.headers()
        made["X-Request-Id"] = f"{self.request_id}-{attempt}" if attempt else self.request_id
        return made


@contextmanager
def to_client() -> Iterator[None]:
    """Turns connection errors in the `with` block into ClientGoneError, so that they are not taken for a server's
    errors.
    """
    try:
        yield
    except (ConnectionError, aiohttp.ClientError) as error:
        raise ClientGoneError from error


def forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _OWN_HEADERS}


async def copied(answer: Exchange, on_piece: Callable[[], None]) -> web.Response:
    """Returns a server's whole answer for the client. Calls `on_piece` for each piece that arrives."""
    headers = {name: answer.headers[key] for key, name in _COPIED.items() if key in answer.headers}
    pieces = []
    while piece := await answer.read_any():
        on_piece()
        pieces.append(piece)
    return web.Response(status=answer.status, body=b"".join(pieces), headers=headers)


def error_fields(status: int, sentence: str) -> Body:
    return {"message": sentence, "type": "kvferry_proxy_error", "param": None, "code": status}


def error_response(status: int, sentence: str) -> web.Response:
    return web.json_response({"error": error_fields(status, sentence)}, status=status)
