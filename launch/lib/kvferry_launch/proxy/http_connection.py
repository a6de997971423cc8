"""One connection to a server, and the exchange of a request and its answer over it."""

import asyncio
from types import TracebackType
from typing import Protocol

from kvferry_launch.proxy.http_answer import Answer

BUFFERED_MAX = 256 << 10  # if the caller has left more bytes of an answer than this, reading pauses


class UnansweredError(ConnectionError):
    """The connection ended before the server had sent a byte of its answer."""


class Owner(Protocol):
    """Keeps the idle connections to a server."""

    def keep(self, connection: "Connection") -> None:
        """Takes back a connection that can carry another request, because its answer has arrived."""

    def remove(self, connection: "Connection") -> None:
        """Removes a connection that has ended."""


class Exchange(Answer):
    """A request and its answer, for use in a `with` block. If the answer is not complete at the end of the block, the
    connection is closed, so that the server ends its work. Errors of the methods: OSError.
    """

    def __init__(self, method: str, connection: "Connection", limit_s: float, is_total: bool) -> None:
        super().__init__(method)
        self._connection = connection
        self._loop = connection.loop
        self._limit_s, self._is_total = limit_s, is_total
        self._is_heard = False
        self._since = self._loop.time()  # time from which `limit_s` counts
        self._timer = self._loop.call_later(limit_s, self._check_time)
        self._waiter: asyncio.Future[None] | None = None
        self._error: OSError | None = None
        self._buffered = 0  # number of bytes in `pieces`, or more: the head and lines between chunks count too

    def __enter__(self) -> "Exchange":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._timer.cancel()
        if not self.done:
            self._connection.abort()

    async def begun(self) -> None:
        """Waits for the head of the answer."""
        while not self.status:
            await self._wait()

    async def read_any(self) -> bytes:
        """Returns the next bytes of the body; no bytes at its end."""
        while not self.pieces and not self.done:
            await self._wait()
        pieces = self.pieces
        self.pieces, self._buffered = [], 0
        self._connection.resume()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def read(self) -> bytes:
        """Returns the rest of the body."""
        pieces = []
        while piece := await self.read_any():
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _wait(self) -> None:
        if self._error is None:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None:
            raise self._error

    def _check_time(self) -> None:
        now = self._loop.time()
        if self._connection.is_paused and not self._is_total:
            self._since = now  # the server can't send, because the caller has not taken the bytes so far
        left_s = self._since + self._limit_s - now
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._check_time)
            return
        self.fail(TimeoutError(f"the server's answer was not complete after {self._limit_s:g} s" if self._is_total
                               else f"the server sent nothing for {self._limit_s:g} s"))
        self._connection.abort()

    # ---- called by the connection ----
    def take(self, data: bytes) -> None:
        """Takes bytes from the server. Errors: AnswerError."""
        self._is_heard = True
        if not self._is_total:
            self._since = self._loop.time()
        self.feed(data)
        self._buffered += len(data)
        if self._buffered > BUFFERED_MAX and not self.done:
            self._connection.pause()
        if self.done:
            self._timer.cancel()
        if self.status:
            self._wake()

    def end(self, error: Exception | None) -> None:
        """Takes the end of the connection. `error`: why the connection broke; None if the server closed it."""
        if error is not None or not self._is_heard:
            reason = f"the connection broke: {error}" if error is not None else "the server closed the connection"
            self.fail((ConnectionError if self._is_heard else UnansweredError)(reason))
            return
        try:
            self.feed_end()
        except OSError as broken:
            self.fail(broken)
        self._wake()

    def fail(self, error: OSError) -> None:
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Connection(asyncio.Protocol):
    """A connection that carries one request at a time. When the answer is complete, the connection goes to its owner
    or, if it can't carry another request, is closed.
    """

    def __init__(self, owner: Owner, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.idle_since = 0.0
        self.is_paused = False
        self._owner = owner
        self._exchange: Exchange | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def send(self, method: str, request: bytes, limit_s: float, is_total: bool) -> Exchange:
        """Sends a request. `limit_s`: longest time of the whole exchange if `is_total`, else between two bytes."""
        self._exchange = exchange = Exchange(method, self, limit_s, is_total)
        self._transport.write(request)
        return exchange

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:  # the bytes answer no request
            self.abort()
            return
        try:
            exchange.take(data)
        except OSError as error:
            exchange.fail(error)
            self.abort()
            return
        if exchange.done:
            self._exchange = None
            self.resume()
            if exchange.can_reuse and not self._transport.get_write_buffer_size():
                self._owner.keep(self)
            else:
                self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._owner.remove(self)
        if self._exchange is not None:
            self._exchange.end(error)
            self._exchange = None

    def pause(self) -> None:
        if not self.is_paused:
            self.is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self.is_paused:
            self.is_paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        self._transport.abort()
