"""Sends a client's request to one server, and passes the server's answer on to the client."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from aiohttp import web

from kvferry_launch.proxy.client_request import ClientRequest, copied, error_fields, to_client
from kvferry_launch.proxy.first_token import FirstToken
from kvferry_launch.proxy.http_client import HttpClient
from kvferry_launch.proxy.http_connection import Exchange
from kvferry_launch.proxy.json_bodies import Body, encode
from kvferry_launch.proxy.metrics import Metrics
from kvferry_launch.proxy.nodes import Choice, Node, ServerError
from kvferry_launch.proxy.streams import BrokenStreamError, Stream
from kvferry_launch.proxy.waits import LostError


class ServerCalls:
    """Sends requests to servers. `attempt`: number of pairs of servers that were tried before for the same request."""

    def __init__(self, client: HttpClient, metrics: Metrics) -> None:
        self._client = client
        self._metrics = metrics

    async def whole(self, node: Node, kind: str, one: ClientRequest, body: Body, attempt: int) -> web.Response:
        """Sends a request, and returns the whole answer. Errors: ServerError, also if the status is 500 or higher."""
        async with self._asked(node, kind, one, body, attempt) as answer:
            return await copied(answer, node.waits.heard)

    @contextmanager
    def preparing(self, node: Node, one: ClientRequest, body: Body | None, attempt: int) -> Iterator[None]:
        """Prepares a prompt: lets the decode server load the prompt's KV during the `with` block, while the prefill
        server computes and pushes this KV. `body`: the body of the request for this; None: nothing is prepared. The
        answer to the request is ignored, and the request is aborted at the end of the block.
        """
        if body is None:
            yield
            return
        task = asyncio.create_task(self._prepare(node, one, body, attempt))
        try:
            yield
        finally:
            task.cancel()

    async def _prepare(self, node: Node, one: ClientRequest, body: Body, attempt: int) -> None:
        headers = one.headers(attempt)
        headers["X-Request-Id"] += "-prepare"
        with suppress(OSError, LostError), node.waits.wait(), await self._client.ask(
                "POST", node.serves, one.path, headers, encode(body)) as answer:
            await answer.read()

    async def streamed(self, node: Node, one: ClientRequest, body: Body, attempt: int, first: FirstToken | None
                        ) -> web.StreamResponse:
        """Sends a request, and passes the events of the answer on to the client as they arrive. Leaves out text that
        the client has already. If the answer is no event stream, returns it whole. Errors: ServerError,
        ClientGoneError.
        """
        async with self._asked(node, "decode", one, body, attempt) as answer:
            if answer.content_type != "text/event-stream":
                if one.response is not None:
                    raise ServerError(node, "decode", f"status {answer.status} without an event stream")
                return await copied(answer, node.waits.heard)
            piece = None
            if first is None:
                one.log.enter("first_byte")
            if first is None and not (piece := await answer.read_any()):
                raise ServerError(node, "decode", "the server's stream ended before the first event")
            one.log.enter("rest")
            if one.response is None:
                one.response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8",
                                                           "Cache-Control": "no-cache",
                                                           "X-Request-Id": one.request_id})
                with to_client():
                    await one.response.prepare(one.request)
            else:
                self._metrics.continued_streams.inc()
            if opening := one.stream.begin(first):
                with to_client():
                    await one.response.write(opening)
            await self._pass_on(node, answer, piece, one.stream, one.response)
            with to_client():
                await one.response.write_eof()
            return one.response

    async def _pass_on(self, node: Node, answer: Exchange, piece: bytes | None, stream: Stream,
                       response: web.StreamResponse) -> None:
        """Passes a server's stream on to the client. `piece`: the first bytes of the stream; None if no bytes were read
        yet. Errors: ServerError, ClientGoneError.
        """
        reason = "no event [DONE]"
        try:
            while piece != b"":
                node.waits.heard()
                if piece is not None and (ready := stream.feed(piece)):
                    with to_client():
                        await response.write(ready)
                piece = await answer.read_any()
        except BrokenStreamError as error:
            reason = str(error)
        except OSError as error:
            reason = f"{type(error).__name__}: {error}"
        if not stream.done:
            raise ServerError(node, "decode", f"the server's stream stopped before the end of the answer ({reason})")

    async def broken_off(self, one: ClientRequest, response: web.StreamResponse, failure: ServerError
                          ) -> web.StreamResponse:
        """Ends an answer that has begun and that no server can continue: sends an error event to the client."""
        self._metrics.broken_streams.inc()
        separator = b"" if one.stream.ends_an_event else b"\n\n"
        event = json.dumps({"error": error_fields(502, f"the answer breaks off: {failure}")})
        with to_client():
            await response.write(separator + f"data: {event}\n\ndata: [DONE]\n\n".encode())
            await response.write_eof()
        return response

    @asynccontextmanager
    async def _asked(self, node: Node, kind: str, one: ClientRequest, body: Body,
                     attempt: int) -> AsyncIterator[Exchange]:
        try:
            with node.waits.wait(), await self._client.ask("POST", node.serves, one.path, one.headers(attempt),
                                                           encode(body)) as answer:
                if answer.status >= 500:
                    raise ServerError(node, kind, f"status {answer.status}", await copied(answer, node.waits.heard))
                yield answer
        except (OSError, LostError) as error:
            raise ServerError(node, kind, f"{type(error).__name__}: {error}") from error


@contextmanager
def counted(choice: Choice) -> Iterator[None]:
    """Counts a request under way at the servers of the pair during the `with` block."""
    nodes = [node for node in (choice.prefill, choice.decode) if node is not None]
    for node in nodes:
        node.in_flight += 1
    try:
        yield
    finally:
        for node in nodes:
            node.in_flight -= 1
