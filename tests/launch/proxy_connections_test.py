"""Tests launch/proxy's connections with stand-ins: those to servers that are used again, and those of clients."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from kvferry_launch.proxy import app, bodies, http_client
from proxy_stand_ins import Cluster, FakeVllm, eventually, run

TEXT_OF_D0 = {"choices": [{"text": "text of d0"}]}


def used_by(server: FakeVllm) -> list[Any]:
    """Returns a list that gets the connection of each further request for an answer of the server."""
    found: list[Any] = []

    async def note(request: web.Request) -> None:
        found.append(request.transport)

    server.on_request = note
    return found


def connections(server: FakeVllm) -> set[Any]:
    assert server._runner.server is not None
    return set(server._runner.server.connections)


# ---- connections to servers ----
@pytest.mark.parametrize("stream", [False, True])
def test_requests_one_after_the_other_share_the_connections_to_their_servers(stream: bool) -> None:
    async def test(c: Cluster) -> None:
        used = [used_by(server) for server in (c.prefills[0], c.decodes[0])]
        answers = [await c.post({"prompt": [1], "stream": stream}) for _ in range(3)]
        assert answers[0] == (200, 'data: {"n": 0}\n\ndata: {"n": 1}\n\ndata: [DONE]\n\n' if stream else TEXT_OF_D0)
        assert answers[1:] == answers[:1] * 2
        assert [(len(of_one), len(set(of_one))) for of_one in used] == [(3, 1), (3, 1)]

    run(test)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_connection_that_its_server_closed_while_it_was_idle_fails_no_request(kind: str, stream: bool) -> None:
    async def test(c: Cluster) -> None:
        server = (c.prefills if kind == "prefill" else c.decodes)[0]
        used: list[Any] = []

        async def close_used(request: web.Request) -> None:
            assert request.transport is not None
            if request.transport in used:
                request.transport.abort()
            used.append(request.transport)

        server.on_request = close_used
        answers = [await c.post({"prompt": [1], "stream": stream}, **{"X-Request-Id": "x"}) for _ in range(2)]
        assert answers[0] == answers[1]
        assert answers[0][0] == 200
        assert [got["X-Request-Id"] for got in server.headers] == ["x", "x", "x-again"]
        assert await c.metric("kvferry_proxy_resent_total") == 1
        assert await c.metric(rf'kvferry_proxy_retries_total\{{role="{kind}"\}}') == 0
        assert c.num_got()["p1"] == c.num_got()["d1"] == 0

    run(test)


def test_a_used_connection_that_breaks_in_a_stream_breaks_the_stream_off() -> None:
    async def test(c: Cluster) -> None:
        used = used_by(c.decodes[0])
        assert (await c.post({"prompt": [1], "stream": True}))[0] == 200
        c.decodes[0].hold.clear()
        async with c.session.post(c.url + bodies.COMPLETIONS, json={"prompt": [1], "stream": True}) as answer:
            assert await answer.content.readany() == b'data: {"n": 0}\n\n'
            used[-1].abort()
            rest = (await answer.content.read()).decode()
        assert "the server's stream stopped before the end of the answer" in rest
        assert (len(used), len(set(used))) == (2, 1)
        assert await c.metric("kvferry_proxy_resent_total") == 0
        assert await c.metric("kvferry_proxy_broken_streams_total") == 1

    run(test)


@pytest.mark.parametrize("how", ["unlisted", "failed"])
def test_a_lost_server_keeps_no_idle_connection(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "IDLE_S", 1000.0)

    async def test(c: Cluster) -> None:
        server = c.decodes[0]
        assert (await c.post({"prompt": [1]}))[0] == 200
        idle = connections(server)
        assert len(idle) == 1
        server.healthy = False
        if how == "unlisted":
            c.controller.servers.remove(server)
        else:
            c.door.nodes.failed(c.door.nodes.known["d0"])
        await eventually(lambda: not idle & connections(server))
        assert (await c.post({"prompt": [1]}))[0] == 200
        assert c.num_got()["d1"] == 1
        if how == "unlisted":
            c.controller.servers.append(server)

    run(test)


def test_the_connection_of_a_request_whose_client_left_is_not_used_again() -> None:
    async def test(c: Cluster) -> None:
        used = used_by(c.decodes[0])
        assert (await c.post({"prompt": [1]}))[0] == 200
        c.decodes[0].hold.clear()
        asking = asyncio.create_task(c.post({"prompt": [1]}))
        await eventually(lambda: len(used) == 2)
        asking.cancel()
        await eventually(lambda: c.decodes[0].cancelled == 1)
        c.decodes[0].hold.set()
        assert await c.post({"prompt": [1]}) == (200, TEXT_OF_D0)
        assert used[0] is used[1] is not used[2]
        assert await c.metric("kvferry_proxy_resent_total") == 0

    run(test)


# ---- connections of clients ----
class Client:
    """One connection to the proxy."""

    def __init__(self, c: Cluster) -> None:
        self._c = c

    async def __aenter__(self) -> "Client":
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", int(self._c.url.rpartition(":")[2]))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    def send(self, prompt: list[int], **more: Any) -> None:
        body = json.dumps({"prompt": prompt, **more})
        self.writer.write(f"POST {bodies.COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}"
                          .encode())

    async def answer(self) -> tuple[str, bytes]:
        """Returns the status line and the body."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        if "Transfer-Encoding: chunked" in head:
            raw = await self.reader.readuntil(b"\r\n0\r\n\r\n")
            return head.partition("\r\n")[0], b"".join(raw.split(b"\r\n")[1:-3:2])
        length = int(head.partition("Content-Length: ")[2].split("\r\n")[0])
        return head.partition("\r\n")[0], await self.reader.readexactly(length)


def test_a_client_sends_several_requests_over_one_connection() -> None:
    async def test(c: Cluster) -> None:
        async with Client(c) as client:
            for number in range(3):
                client.send([number], stream=number == 1)
                status, body = await client.answer()
                assert status == "HTTP/1.1 200 OK"
                assert body.endswith(b"data: [DONE]\n\n") if number == 1 else json.loads(body) == TEXT_OF_D0
        assert [got["prompt"] for got in c.decodes[0].got] == [[0], [1], [2]]

    run(test)


def test_requests_that_a_client_sends_at_once_are_answered_in_their_order() -> None:
    async def test(c: Cluster) -> None:
        c.decodes[0].hold.clear()
        async with Client(c) as client:
            for number in range(5):
                client.send([number], stream=number % 2 == 0)
            await eventually(lambda: len(c.decodes[0].got) == 1)
            await asyncio.sleep(0.1)
            assert len(c.decodes[0].got) == 1, "one request of a connection at a time"
            c.decodes[0].hold.set()
            for number in range(5):
                status, body = await client.answer()
                assert status == "HTTP/1.1 200 OK"
                assert body.startswith(b"data: ") == (number % 2 == 0)
        assert [got["prompt"] for got in c.decodes[0].got] == [[number] for number in range(5)]

    run(test)


def test_requests_that_wait_behind_another_one_end_with_their_client() -> None:
    async def test(c: Cluster) -> None:
        c.decodes[0].hold.clear()
        async with Client(c) as client:
            for number in range(3):
                client.send([number])
            await eventually(lambda: len(c.decodes[0].got) == 1)
        await eventually(lambda: c.decodes[0].cancelled == 1)
        c.decodes[0].hold.set()
        await asyncio.sleep(0.2)
        assert c.num_got() == {"p0": 1, "p1": 0, "d0": 1, "d1": 0}

    run(test)


def test_a_client_that_sends_no_whole_head_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "CLIENT_IDLE_S", 0.5)

    async def test(c: Cluster) -> None:
        async with Client(c) as silent, Client(c) as slow, Client(c) as idle, Client(c) as busy:
            idle.send([1])
            await idle.answer()
            c.decodes[0].hold.clear()
            busy.send([1])
            for byte in b"POST / H":
                slow.writer.write(bytes([byte]))
                idle.writer.write(bytes([byte]))
                await asyncio.sleep(0.02)
            for client in (silent, slow, idle):
                assert await asyncio.wait_for(client.reader.read(), 5.0) == b""
            c.decodes[0].hold.set()
            assert json.loads((await busy.answer())[1]) == TEXT_OF_D0, "a request may run for longer"

    run(test)
