"""launch/proxy in front of stand-ins for the controller and vLLM: what goes where, and what happens when they fail."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kvferry_launch.paths import REPO
from kvferry_launch.proxy import bodies, nodes
from kvferry_launch.proxy.app import FrontDoor, Options
from kvferry_launch.proxy.nodes import HEALTH_INTERVAL_S
from kvferry_launch.proxy.streams import Stream, gives_the_same_again

DEADLINE_S = 15.0
TOKENS = [5, 6, 7]


class StandIn:
    """One HTTP server of ours. kill() ends it as a crash would: connections break, later ones are refused."""

    def __init__(self) -> None:
        self.app = web.Application()
        self.port = 0

    async def start(self) -> None:
        self._runner = web.AppRunner(self.app, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def kill(self) -> None:
        server = self._runner.server
        for connection in list(server.connections) if server else []:
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()


class FakeVllm(StandIn):
    """Answers as vLLM does; `on_request` may do something else first."""

    def __init__(self, name: str, role: str) -> None:
        super().__init__()
        self.name, self.role = name, role
        self.got: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.cancelled = 0
        self.healthy = True
        self.hold = asyncio.Event()  # streams stop after the first event until it is set
        self.hold.set()
        self.texts: list[str] = []  # of a stream's events, where they look as vLLM's
        self.on_request: Callable[[web.Request], Awaitable[web.StreamResponse | None]] | None = None
        self.app.add_routes([web.post(path, self._generate) for path in bodies.PATHS])
        self.app.add_routes([web.post("/tokenize", self._tokenize), web.get("/health", self._health),
                             web.get("/v1/models", self._models)])

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "from": self.name})

    async def _tokenize(self, _: web.Request) -> web.Response:
        return web.json_response({"tokens": TOKENS, "count": len(TOKENS)})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
        except ValueError:
            return web.json_response({"error": "no JSON"}, status=400)
        self.got.append(body)
        self.headers.append(request.headers.copy())
        try:
            if self.on_request is not None and (answer := await self.on_request(request)) is not None:
                return answer
            if body.get("kv_transfer_params", {}).get("do_remote_decode"):
                handed = {"do_remote_prefill": True, "remote_host": self.name}
                return web.json_response({"id": "x", "kv_transfer_params": handed})
            if not body.get("stream"):
                await self.hold.wait()
                return web.json_response({"choices": [{"text": f"text of {self.name}"}]})
            return await self._stream(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, text in enumerate(self.texts):
            last = number == len(self.texts) - 1
            where = {"delta": {"content": text}} if request.path == bodies.CHAT else {"text": text}
            choice = {"index": 0, "finish_reason": "length" if last else None, **where}
            event = {"id": f"of-{self.name}", "created": 1, "choices": [choice]}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
            await self.hold.wait()
        if self.texts:
            await response.write(b'data: {"choices": [], "usage": {"completion_tokens": 6}}\n\ndata: [DONE]\n\n')
            return response
        await response.write(b'data: {"n": 0}\n\n')
        await self.hold.wait()
        await response.write(b'data: {"n": 1}\n\n')
        await response.write(b"data: [DONE]\n\n")
        return response


class FakeController(StandIn):
    """Tells of servers, and pairs the first of each kind that is not excluded."""

    def __init__(self) -> None:
        super().__init__()
        self.servers: list[FakeVllm] = []
        self.draining: set[str] = set()
        self.skip_prefill = False
        self.asked: list[dict[str, Any]] = []
        self.app.add_routes([web.get("/nodes", self._nodes), web.post("/pair", self._pair)])

    async def _nodes(self, _: web.Request) -> web.Response:
        return web.json_response({"nodes": [
            {"namespace": "default", "engine_id": server.name, "role": server.role, "serves": server.url,
             "endpoint": f"tcp://{server.name}", "draining": server.name in self.draining, "load": 0, "chunks": 0}
            for server in self.servers]})

    async def _pair(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.asked.append(asked)
        out = set(asked["exclude"]) | self.draining
        found = {role: next((s for s in self.servers if s.role == role and s.name not in out), None)
                 for role in ("kv_producer", "kv_consumer")}
        if None in found.values():
            return web.json_response({"error": "nobody"}, status=503)
        prefill, decode = ({"engine_id": found[role].name} for role in ("kv_producer", "kv_consumer"))  # type: ignore[union-attr]
        return web.json_response({"prefill": prefill, "decode": decode, "skip_prefill": self.skip_prefill})


class Cluster:
    """Two prefill and two decode servers, a controller and the front door before them."""

    def __init__(self) -> None:
        self.controller = FakeController()
        self.prefills = [FakeVllm(f"p{i}", "kv_producer") for i in range(2)]
        self.decodes = [FakeVllm(f"d{i}", "kv_consumer") for i in range(2)]
        self.controller.servers = [*self.prefills, *self.decodes]

    async def post(self, body: Any, path: str = bodies.COMPLETIONS, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body)
        async with self.session.post(self.url + path, data=data,
                                     headers={"Content-Type": "application/json", **headers}) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if answer.content_type == "application/json" else text

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(self.url + path) as answer:
            return answer.status, await answer.text()

    async def metric(self, pattern: str) -> float:
        found = re.search(rf"^{pattern} (\S+)$", (await self.get("/metrics"))[1], re.MULTILINE)
        return float(found[1]) if found else 0.0

    def num_got(self) -> dict[str, int]:
        return {server.name: len(server.got) for server in self.controller.servers}


@contextlib.asynccontextmanager
async def cluster(num_prefill: int = 2, num_decode: int = 2, **options: Any) -> AsyncIterator[Cluster]:
    made = Cluster()
    made.controller.servers = made.prefills[:num_prefill] + made.decodes[:num_decode]
    await made.controller.start()
    for server in made.controller.servers:
        await server.start()
    made.door = FrontDoor(Options(made.controller.url, **options))  # type: ignore[attr-defined]
    runner = web.AppRunner(made.door.app, handler_cancellation=True, shutdown_timeout=1.0)  # type: ignore[attr-defined]
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"  # type: ignore[attr-defined]
    async with aiohttp.ClientSession() as made.session:  # type: ignore[attr-defined]
        await eventually(lambda: all(node.ready for node in made.door.nodes.known.values()))  # type: ignore[attr-defined]
        try:
            yield made
        finally:
            for server in [*made.controller.servers, made.controller]:
                server.hold.set() if isinstance(server, FakeVllm) else None
                with contextlib.suppress(Exception):
                    await server.kill()
            await runner.cleanup()


async def eventually(condition: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "not within the deadline"
        await asyncio.sleep(0.01)


def run(test: Callable[[Cluster], Awaitable[None]], **options: Any) -> None:
    async def inside() -> None:
        async with cluster(**options) as made:
            await asyncio.wait_for(test(made), 4 * DEADLINE_S)

    asyncio.run(inside())


# ---- what goes where ----
def test_prefill_knows_where_to_push_and_decode_where_the_prompt_lies() -> None:
    async def test(c: Cluster) -> None:
        body = {"model": "m", "prompt": "hello", "max_tokens": 9, "logprobs": 2, "temperature": 0.0}
        status, answer = await c.post(body, Authorization="Bearer x")
        assert (status, answer) == (200, {"choices": [{"text": "text of d0"}]})
        assert c.num_got() == {"p0": 1, "p1": 0, "d0": 1, "d1": 0}
        prefill, decode = c.prefills[0].got[0], c.decodes[0].got[0]
        assert prefill["kv_transfer_params"]["kvferry_push_to"] == {"engine_id": "d0", "endpoint": "tcp://d0"}
        assert prefill["kv_transfer_params"]["do_remote_decode"] is True
        assert (prefill["max_tokens"], prefill["stream"], prefill["prompt"]) == (1, False, TOKENS)
        assert "logprobs" not in prefill
        assert decode == body | {"prompt": TOKENS, "kv_transfer_params": {"do_remote_prefill": True,
                                                                         "remote_host": "p0"}}
        assert c.controller.asked[0]["token_ids"] == TOKENS
        for server in (c.prefills[0], c.decodes[0]):
            assert server.headers[0]["Authorization"] == "Bearer x"
        assert c.prefills[0].headers[0]["X-Request-Id"] == c.decodes[0].headers[0]["X-Request-Id"]

    run(test)


def test_chats_and_token_ids_go_the_same_way() -> None:
    async def test(c: Cluster) -> None:
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 9, "cache_salt": "s"}
        assert (await c.post(chat, bodies.CHAT))[0] == 200
        assert c.prefills[0].got[0]["max_completion_tokens"] == 1
        assert c.decodes[0].got[0]["messages"] == chat["messages"]
        assert c.controller.asked[0]["cache_salt"] == "s"
        ids = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 9, "min_tokens": 3}}
        assert (await c.post(ids, bodies.GENERATE))[0] == 200
        assert c.prefills[0].got[1]["sampling_params"] == {"max_tokens": 1, "n": 1}
        assert c.decodes[0].got[1]["sampling_params"] == ids["sampling_params"]
        assert c.controller.asked[1]["token_ids"] == [1, 2]

    run(test)


def test_what_decode_holds_is_not_prefilled_again_and_batches_neither() -> None:
    async def test(c: Cluster) -> None:
        c.controller.skip_prefill = True
        assert (await c.post({"prompt": "hello"}))[0] == 200
        assert c.num_got() == {"p0": 0, "p1": 0, "d0": 1, "d1": 0}
        assert "kv_transfer_params" not in c.decodes[0].got[0]
        c.controller.skip_prefill = False
        assert (await c.post({"prompt": ["hello", "world"]}))[0] == 200
        assert c.num_got() == {"p0": 0, "p1": 0, "d0": 2, "d1": 0}
        assert await c.metric(r'kvferry_proxy_skipped_prefills_total\{reason="cached"\}') == 1
        assert await c.metric(r'kvferry_proxy_skipped_prefills_total\{reason="batch"\}') == 1

    run(test)


def test_a_stream_is_passed_on_as_it_comes() -> None:
    async def test(c: Cluster) -> None:
        c.decodes[0].hold.clear()
        async with c.session.post(c.url + bodies.COMPLETIONS, json={"prompt": "a", "stream": True}) as answer:
            assert answer.content_type == "text/event-stream"
            first = await answer.content.readany()
            assert first == b'data: {"n": 0}\n\n', "before the server has the rest"
            c.decodes[0].hold.set()
            assert await answer.content.read() == b'data: {"n": 1}\n\ndata: [DONE]\n\n'
        assert c.prefills[0].got[0]["stream"] is False
        assert await c.metric(r'kvferry_proxy_stage_seconds_count\{stage="first_byte"\}') == 1

    run(test)


def test_models_health_and_metrics() -> None:
    async def test(c: Cluster) -> None:
        assert json.loads((await c.get("/v1/models"))[1])["from"].startswith("d")
        assert (await c.get("/health"))[0] == 200
        await c.post({"prompt": "a"})
        text = (await c.get("/metrics"))[1]
        assert f'kvferry_proxy_requests_total{{path="{bodies.COMPLETIONS}",status="200"}} 1.0' in text
        for stage in ("tokenize", "pair", "prefill", "rest", "total"):
            assert f'kvferry_proxy_stage_seconds_count{{stage="{stage}"}} 1.0' in text, stage
        assert 'kvferry_proxy_nodes{role="kv_producer",state="ready"} 2.0' in text

    run(test)


# ---- what fails ----
def test_a_bad_request_is_passed_on_unchanged() -> None:
    async def test(c: Cluster) -> None:
        async def refuse(_: web.Request) -> web.Response:
            return web.json_response({"error": {"message": "max_tokens is -1"}}, status=400)

        c.prefills[0].on_request = refuse
        assert await c.post({"prompt": "a"}) == (400, {"error": {"message": "max_tokens is -1"}})
        assert c.num_got() == {"p0": 1, "p1": 0, "d0": 0, "d1": 0}
        assert await c.post(b"{nonsense") == (400, {"error": "no JSON"})

    run(test)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["dead", "broken", "status"])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_who_fails_before_the_first_byte_is_replaced(kind: str, how: str, stream: bool) -> None:
    async def test(c: Cluster) -> None:
        victim = c.prefills[0] if kind == "prefill" else c.decodes[0]

        async def fail(request: web.Request) -> web.Response | None:
            if how == "status":
                return web.json_response({"error": "engine dead"}, status=500)
            assert request.transport is not None
            request.transport.abort()
            return None

        victim.on_request = fail
        if how == "dead":
            await victim.kill()
        status, answer = await c.post({"prompt": "a", "stream": stream})
        assert status == 200, answer
        other = "p1" if kind == "prefill" else "d1"
        assert c.num_got()[other] == 1
        if kind == "decode":
            assert ("[DONE]" in answer) if stream else answer == {"choices": [{"text": "text of d1"}]}
            assert len(c.prefills[0].got) == 2, "the other pair begins anew"
            assert c.prefills[0].got[1]["kv_transfer_params"]["kvferry_push_to"]["engine_id"] == "d1"
            assert c.prefills[0].headers[0]["X-Request-Id"] != c.prefills[0].headers[1]["X-Request-Id"]
        asked_first = kind == "prefill" and how == "dead"  # for the tokens
        assert await c.metric(rf'kvferry_proxy_retries_total\{{role="{kind}"\}}') == (0 if asked_first else 1)

    run(test)


def test_who_fails_gets_nothing_new_before_it_is_healthy() -> None:
    async def test(c: Cluster) -> None:
        async def fail(_: web.Request) -> web.Response:
            return web.Response(status=503)

        c.decodes[0].on_request, c.decodes[0].healthy = fail, False
        for _ in range(3):
            assert (await c.post({"prompt": "a"}))[0] == 200
        assert c.num_got()["d0"] == 1
        assert "d0" in c.controller.asked[-1]["exclude"]
        c.decodes[0].on_request, c.decodes[0].healthy = None, True
        await eventually(lambda: c.door.nodes.known["d0"].ready)
        await c.post({"prompt": "a"})
        assert c.num_got()["d0"] == 2

    run(test)


def test_nobody_is_tried_twice_though_its_health_page_answers() -> None:
    async def test(c: Cluster) -> None:
        async def fail(_: web.Request) -> web.Response:
            await asyncio.sleep(2 * HEALTH_INTERVAL_S)  # the one that failed before is healthy again
            return web.Response(status=500)

        for server in c.prefills:
            server.on_request = fail
        assert (await c.post({"prompt": "a"}))[0] == 200, "decode does it alone at last"
        assert c.num_got() == {"p0": 1, "p1": 1, "d0": 1, "d1": 0}

    run(test)


def test_tries_are_bounded_and_the_last_answer_is_told() -> None:
    async def test(c: Cluster) -> None:
        async def fail(_: web.Request) -> web.Response:
            return web.json_response({"error": "engine dead"}, status=500)

        for server in c.prefills:
            server.on_request = fail
        for server in c.decodes:
            await server.kill()
        status, answer = await c.post({"prompt": "a"})
        assert status in (500, 502)
        assert "error" in answer
        assert sum(c.num_got().values()) <= 3

    run(test)


def test_a_server_that_dies_in_the_middle_of_a_stream_ends_it_with_an_error_event() -> None:
    async def test(c: Cluster) -> None:
        c.decodes[0].hold.clear()
        async with c.session.post(c.url + bodies.COMPLETIONS, json={"prompt": "a", "stream": True}) as answer:
            assert await answer.content.readany() == b'data: {"n": 0}\n\n'
            await c.decodes[0].kill()
            rest = (await answer.content.read()).decode()
        events = [line.removeprefix("data: ") for line in rest.splitlines() if line]
        message = json.loads(events[0])["error"]["message"]
        assert "decode server d0" in message
        assert "ended in the middle" in message
        assert events[1:] == ["[DONE]"]
        assert c.num_got()["d1"] == 0, "it may answer otherwise, and the client has a part"
        assert await c.metric("kvferry_proxy_broken_streams_total") == 1

    run(test)


async def interrupted(c: Cluster, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream whose server dies after the first one."""
    c.decodes[0].hold.clear()
    async with c.session.post(c.url + path, json={"stream": True, **body}) as answer:
        first = await answer.content.readany()
        await c.decodes[0].kill()
        text = (first + await answer.content.read()).decode()
    return [event if (event := line.removeprefix("data: ")) == "[DONE]" else json.loads(event)
            for line in text.splitlines() if line]


@pytest.mark.parametrize("fixed", [{"temperature": 0}, {"temperature": 0.8, "seed": 3}])
@pytest.mark.parametrize("path", [bodies.COMPLETIONS, bodies.CHAT])
def test_another_server_goes_on_with_a_stream_that_can_be_repeated(path: str, fixed: dict[str, Any]) -> None:
    async def test(c: Cluster) -> None:
        c.decodes[0].texts = ["one two", " three", " four"]
        c.decodes[1].texts = ["one", " two th", "ree", " four"]
        body = {"messages": []} if path == bodies.CHAT else {"prompt": "a"}
        *events, usage, end = await interrupted(c, path, body | fixed)
        choices = [event["choices"][0] for event in events]
        texts = [choice["delta"]["content"] if path == bodies.CHAT else choice["text"] for choice in choices]
        assert texts == ["one two", " th", "ree", " four"]
        assert {event["id"] for event in events} == {"of-d0"}, "one answer has one name"
        assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]
        assert (usage["usage"], end) == ({"completion_tokens": 6}, "[DONE]")
        assert c.num_got()["d1"] == 1
        assert c.num_got()["p0"] == 2, "the other server needs its prompt too"
        assert await c.metric("kvferry_proxy_continued_streams_total") == 1
        assert await c.metric("kvferry_proxy_broken_streams_total") == 0

    run(test)


@pytest.mark.parametrize("other", ["one too", "one"])
def test_a_stream_does_not_go_on_with_other_text(other: str) -> None:
    async def test(c: Cluster) -> None:
        c.decodes[0].texts = ["one two", " three"]
        c.decodes[1].texts = [other, " or not"]
        *events, end = await interrupted(c, bodies.COMPLETIONS, {"prompt": "a", "temperature": 0})
        assert [event["choices"][0]["text"] for event in events[:-1]] == ["one two"]
        assert "with other text" in events[-1]["error"]["message"]
        assert end == "[DONE]"
        assert await c.metric("kvferry_proxy_broken_streams_total") == 1

    run(test)


def test_a_stream_that_no_server_goes_on_with_ends_in_an_error_event() -> None:
    async def test(c: Cluster) -> None:
        c.decodes[0].texts = ["one", " two"]
        *events, end = await interrupted(c, bodies.COMPLETIONS, {"prompt": "a", "temperature": 0})
        assert "decode server d0" in events[-1]["error"]["message"]
        assert end == "[DONE]"

    run(test, num_decode=1)


def test_a_stream_outlives_two_servers_and_events_that_were_cut() -> None:
    def event(content: str, **more: Any) -> bytes:
        return f"data: {json.dumps({'choices': [{'delta': {'content': content}, **more}]})}\n\n".encode()

    stream = Stream(bodies.CHAT, {"temperature": 0})
    got = b""
    for server in ([event(""), event("a b"), event(" c")[:20]],
                   [event(""), event("a")[:9], event("a")[9:] + event(" b") + event(" c"), event(" d")[:-1]],
                   [event("a b c d"), event(" e", finish_reason="stop") + b"data: [DONE]\n\n"]):
        stream.begin()
        got += b"".join(stream.feed(piece) for piece in server)
    texts = [json.loads(line[6:])["choices"][0]["delta"]["content"] for line in got.splitlines()
             if line and not line.endswith(b"[DONE]")]
    assert texts == ["", "a b", " c", " d", " e"]
    assert stream.done


@pytest.mark.parametrize("more", [{"n": 2}, {"logprobs": 1}, {"temperature": 1.0}, {"echo": True}, {"tools": [{}]}])
def test_what_can_not_be_repeated_or_cut_is_not_sent_again(more: dict[str, Any]) -> None:
    assert gives_the_same_again(bodies.COMPLETIONS, {"temperature": 0})
    assert not gives_the_same_again(bodies.COMPLETIONS, {"temperature": 0} | more)
    assert not gives_the_same_again(bodies.GENERATE, {"temperature": 0})


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_the_request_at_the_server(stream: bool) -> None:
    async def test(c: Cluster) -> None:
        c.decodes[0].hold.clear()
        asking = asyncio.create_task(c.post({"prompt": "a", "stream": stream}))
        await eventually(lambda: len(c.decodes[0].got) == 1)
        await asyncio.sleep(0.1)  # a stream's first event is out
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: c.decodes[0].cancelled == 1)
        await eventually(lambda: all(node.in_flight == 0 for node in c.door.nodes.known.values()))
        assert await c.metric("kvferry_proxy_cancelled_total") == 1
        assert await c.metric("kvferry_proxy_in_flight") == 0
        assert c.num_got()["d1"] == 0

    run(test)


def test_a_client_that_goes_away_ends_a_prefill_too() -> None:
    async def test(c: Cluster) -> None:
        async def wait(_: web.Request) -> None:
            await asyncio.sleep(DEADLINE_S)

        c.prefills[0].on_request = wait
        asking = asyncio.create_task(c.post({"prompt": "a"}))
        await eventually(lambda: len(c.prefills[0].got) == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: c.prefills[0].cancelled == 1)
        assert c.num_got()["d0"] == 0

    run(test)


# ---- who is there ----
def test_without_a_pair_there_is_a_sentence() -> None:
    async def test(c: Cluster) -> None:
        status, answer = await c.post({"prompt": "a"})
        assert status == 503
        assert answer["error"]["message"].startswith("no decode server takes requests in namespace 'default'")
        assert (await c.get("/health"))[0] == 503

    run(test, num_decode=0)


def test_without_a_prefill_server_decode_does_it_alone_or_nobody() -> None:
    async def alone(c: Cluster) -> None:
        assert (await c.post({"prompt": "a"}))[0] == 200
        assert await c.metric(r'kvferry_proxy_skipped_prefills_total\{reason="no prefill server"\}') == 1

    async def refused(c: Cluster) -> None:
        status, answer = await c.post({"prompt": "a"})
        assert status == 503
        assert "no prefill server takes requests" in answer["error"]["message"]
        assert (await c.get("/health"))[0] == 503

    run(alone, num_prefill=0)
    run(refused, num_prefill=0, needs_prefill=True)


def test_the_only_prefill_server_dies_and_the_request_is_answered() -> None:
    async def test(c: Cluster) -> None:
        await c.prefills[0].kill()
        assert (await c.post({"prompt": "a"}))[0] == 200

    run(test, num_prefill=1)


def test_without_the_controller_known_servers_take_turns() -> None:
    async def test(c: Cluster) -> None:
        await c.controller.kill()
        for _ in range(4):
            assert (await c.post({"prompt": "a"}))[0] == 200
        assert c.num_got() == {"p0": 2, "p1": 2, "d0": 2, "d1": 2}
        assert await c.metric("kvferry_proxy_controller_up") == 0
        await c.controller.start()
        await eventually(lambda: c.door.nodes.controller_up)

    run(test)


def test_a_controller_that_begins_anew_and_knows_nobody_yet_loses_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(c: Cluster) -> None:
        servers = c.controller.servers
        c.controller.servers = []
        await c.door.nodes.refresh()
        assert (await c.post({"prompt": "a"}))[0] == 200
        c.controller.servers = servers[1:]
        c.controller.draining = {"d1"}
        await c.door.nodes.refresh()
        assert set(c.door.nodes.known) == {"p0", "p1", "d0", "d1"}
        c.controller.servers = servers[:3]
        await c.door.nodes.refresh()
        assert "d1" not in c.door.nodes.known, "it was drained, so it has left"
        c.controller.servers = []
        c.door.nodes.failed(c.door.nodes.known["p0"])
        await c.door.nodes.refresh()
        assert set(c.door.nodes.known) == {"p1", "d0"}, "who failed and is not named is gone"
        monkeypatch.setattr(nodes, "FORGET_S", 0.0)
        await c.door.nodes.refresh()
        assert c.door.nodes.known == {}
        c.controller.servers = servers

    run(test)


def test_draining_servers_get_nothing_new_and_new_ones_take_traffic() -> None:
    async def test(c: Cluster) -> None:
        c.controller.draining = {"d0", "p0"}
        await eventually(lambda: c.door.nodes.known["d0"].draining)
        await c.controller.kill()  # it would leave them out itself
        for _ in range(2):
            assert (await c.post({"prompt": "a"}))[0] == 200
        assert c.num_got() == {"p0": 0, "p1": 2, "d0": 0, "d1": 2}
        await c.controller.start()
        late = FakeVllm("d2", "kv_consumer")
        late.healthy = False
        await late.start()
        c.controller.servers = [*c.prefills, late]
        await eventually(lambda: "d2" in c.door.nodes.known and "d1" not in c.door.nodes.known)
        await asyncio.sleep(3 * HEALTH_INTERVAL_S)
        assert (await c.post({"prompt": "a"}))[0] == 503, "it is there, but its server does not answer yet"
        late.healthy = True
        await eventually(lambda: c.door.nodes.known["d2"].ready)
        assert (await c.post({"prompt": "a"}))[0] == 200
        assert len(late.got) == 1

    run(test)


# ---- the program ----
def test_the_program_says_where_it_listens_and_ends_when_its_requests_have() -> None:
    async def test(c: Cluster) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(REPO / "launch" / "proxy"), "--port", "0", "--controller", c.controller.url,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, env=dict(os.environ))
        assert process.stdout is not None
        try:
            line = (await process.stdout.readline()).decode()
            found = re.fullmatch(r"kvferry proxy listening on (http://127\.0\.0\.1:\d+)\n", line)
            assert found, line
            c.url = found[1]

            async def is_up() -> bool:
                return (await c.get("/health"))[0] == 200

            while not await is_up():
                await asyncio.sleep(0.05)
            c.decodes[0].hold.clear()
            asking = asyncio.create_task(c.post({"prompt": "a"}))
            await eventually(lambda: len(c.decodes[0].got) == 1)
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.5)
            assert process.returncode is None
            with pytest.raises(aiohttp.ClientConnectorError):
                async with aiohttp.ClientSession() as fresh, fresh.get(c.url + "/health"):
                    pass
            c.decodes[0].hold.set()
            assert (await asking)[0] == 200
            assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    run(test)


@pytest.mark.parametrize(("flags", "word"), [
    (["--controller", "tcp://h:1"], "--controller is 'tcp://h:1'"),
    (["--port", "70000"], "--port is 70000"),
    (["--tries", "0"], "--tries is 0"),
])
def test_bad_options_are_named(flags: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    from kvferry_launch.proxy.main import parse

    with pytest.raises(SystemExit):
        parse(flags)
    assert word in capsys.readouterr().err
