"""Sends HTTP/1.1 requests to the controller and the servers, over connections that are kept for later requests."""

import asyncio
import re
from collections.abc import Collection
from urllib.parse import urlsplit

from prometheus_client import Counter

from kvferry_launch.proxy.certificate import Authorities
from kvferry_launch.proxy.http_connection import Connection, Exchange, UnansweredError

CONNECT_TIMEOUT_S = 5.0
IDLE_S = 4.0  # longest idle time of a connection; vLLM's server and the controller close connections after 5 s
IDLE_MAX = 100  # largest number of idle connections to one server
# A request is sent again only if its connection ends within this time after the request was sent. A server that was
# closing the idle connection ends it within one round trip; if the end comes later, the server has failed.
RESEND_WITHIN_S = 1.0
_URL = re.compile(r"https?://[!-~]+")


class _Server:
    """The idle connections to one server. Errors: ConnectionError if `url` can't be used."""

    def __init__(self, url: str, authorities: Authorities) -> None:
        try:
            parts = urlsplit(url)
            self._host, port = parts.hostname or "", parts.port
        except ValueError:
            self._host = ""
        if not self._host or parts.username is not None or not _URL.fullmatch(url):
            raise ConnectionError(f"the server's URL is {url[:200]!a}, not http[s]://HOST:PORT")
        self._authorities = authorities if parts.scheme == "https" else None
        self._port = port or (443 if self._authorities else 80)
        self.netloc, self.path = parts.netloc, parts.path.rstrip("/")
        self.is_used = True  # if False, connections are not kept after their requests
        self._idle: list[Connection] = []  # in the order of idle_since

    def take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.loop.time() - connection.idle_since < IDLE_S:
                return connection
            connection.abort()
        return None

    async def connect(self, limit_s: float) -> Connection:
        loop = asyncio.get_running_loop()
        tls = self._authorities.context() if self._authorities else None
        connecting = loop.create_task(loop.create_connection(lambda: Connection(self, loop), self._host, self._port,
                                                             ssl=tls, happy_eyeballs_delay=0.25))
        try:
            await asyncio.wait((connecting,), timeout=limit_s)
        except asyncio.CancelledError:
            if not connecting.cancel() and connecting.exception() is None:
                connecting.result()[1].abort()
            raise
        if connecting.cancel():
            raise TimeoutError(f"no connection to the server within {limit_s:g} s"
                               + ("; the server may not speak HTTPS" if tls else ""))
        try:
            return connecting.result()[1]
        except UnicodeError as error:  # a part of the host name is empty or too long
            raise ConnectionError(f"the server's URL names no host: {error}") from None

    def keep(self, connection: Connection) -> None:
        if not self.is_used or len(self._idle) >= IDLE_MAX:
            connection.abort()
            return
        connection.idle_since = connection.loop.time()
        self._idle.append(connection)

    def remove(self, connection: Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def close_idle(self, until: float = float("inf")) -> None:
        """Closes the connections that have been idle since the time `until` or longer."""
        while self._idle and self._idle[0].idle_since <= until:
            self._idle.pop(0).abort()


class HttpClient:
    """Sends requests to any number of servers. `silence_s`: longest wait for the next byte of an answer. `resent`:
    counts requests that were sent again.
    """

    def __init__(self, silence_s: float, resent: Counter) -> None:
        self._silence_s = silence_s
        self._resent = resent
        self._authorities = Authorities()
        self._servers: dict[str, _Server] = {}  # maps a URL to its server

    async def ask(self, method: str, url: str, path: str, headers: dict[str, str], body: bytes = b"",
                  total_s: float | None = None) -> Exchange:
        """Sends a request, and returns when the head of the answer has arrived. Errors: OSError; ValueError if a header
        contains a line break or a zero byte.

        `total_s`: limit on the time of the whole exchange; if it is None, only the time between two bytes is limited.

        If the request was sent over an idle connection that ends within RESEND_WITHIN_S and before a byte of the
        answer, the request is sent once more over a new connection, because the server had most likely closed the idle
        one before the request arrived. A server that did get the first request drops it, because the connection has
        ended, and the second request does no harm: requests for tokens, models, health, nodes and pairs change nothing.
        A second prefill makes a new hand-off, and the first hand-off expires. A second request to a decode server may
        name a hand-off that the first one has used up; then the prompt's KV is loaded from another copy, or computed
        again. The second request gets another request id, because vLLM must not see an id twice.
        """
        server = self._servers.get(url) or _Server(url, self._authorities)
        self._servers[url] = server
        loop = asyncio.get_running_loop()
        begin = loop.time()
        if (connection := server.take_idle()) is not None:
            try:
                return await self._sent(server, connection, method, path, headers, body, total_s)
            except UnansweredError:
                if loop.time() - begin > RESEND_WITHIN_S:
                    raise
            self._resent.inc()
            if "X-Request-Id" in headers:
                headers = {**headers, "X-Request-Id": f"{headers['X-Request-Id']}-again"}
        connection = await server.connect(min(CONNECT_TIMEOUT_S, total_s or CONNECT_TIMEOUT_S))
        return await self._sent(server, connection, method, path, headers, body, total_s)

    async def _sent(self, server: _Server, connection: Connection, method: str, path: str, headers: dict[str, str],
                    body: bytes, total_s: float | None) -> Exchange:
        request = _request(server, method, path, headers, body)
        limit_s, is_total = (self._silence_s, False) if total_s is None else (total_s, True)
        exchange = connection.send(method, request, limit_s, is_total)
        try:
            await exchange.begun()
        except BaseException:
            exchange.close()
            raise
        return exchange

    def keep_only(self, urls: Collection[str]) -> None:
        """Drops the servers that are not in `urls`, and closes connections that have been idle for IDLE_S."""
        for url in self._servers.keys() - set(urls):
            self.drop(url)
        for server in self._servers.values():
            server.close_idle(asyncio.get_running_loop().time() - IDLE_S)

    def drop(self, url: str) -> None:
        """Closes the idle connections to a server now, and each other connection when its request has ended."""
        if (server := self._servers.pop(url, None)) is not None:
            server.is_used = False
            server.close_idle()

    def close(self) -> None:
        self.keep_only(())


def _request(server: _Server, method: str, path: str, headers: dict[str, str], body: bytes) -> bytes:
    lines = [f"{method} {server.path}{path} HTTP/1.1", f"Host: {server.netloc}", "Accept-Encoding: identity"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if method == "POST":
        lines.append(f"Content-Length: {len(body)}")
    head = "\r\n".join(lines)
    num_ends = len(lines) - 1
    if head.count("\r") != num_ends or head.count("\n") != num_ends or "\0" in head:
        raise ValueError(f"{method} {path[:100]!r} was not sent to {server.netloc}: a header contains a line break or "
                         "a zero byte, which HTTP does not allow")
    return f"{head}\r\n\r\n".encode("utf-8", "surrogateescape") + body
