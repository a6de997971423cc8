"""Stand-ins for the controller and vLLM, for tests of launch/proxy. Tests can make them fail."""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import web
from kvferry_launch.proxy import bodies
from kvferry_launch.proxy.app import FrontDoor, Options

DEADLINE_S = 15.0
TOKENS = [5, 6, 7]


class StandIn:
    """An HTTP server in this process. kill() ends the server as a crash would: its connections break, and later ones
    are refused.
    """

    def __init__(self) -> None:
        self.app = web.Application(client_max_size=64 << 20)
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
    """Answers requests as vLLM does. A test can set `on_request` to answer a request differently."""

    def __init__(self, name: str, role: str) -> None:
        super().__init__()
        self.name, self.role = name, role
        self.got: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.prepared: list[dict[str, Any]] = []  # preparations, which are not in `got`
        self.prepared_tokens_max: Any = "4096"
        self.num_aborted = 0  # number of preparations that the proxy has aborted
        self.answers_prepared: web.Response | None = None  # answer to a preparation; None: it waits until it is aborted
        self.models: list[dict[str, Any]] = []
        self.models_answer: Any = None  # answer of /v1/models, instead of the list `models`
        self.asked_for_models: list[str | None] = []  # the Authorization headers of the requests to /v1/models
        self.answers_models = asyncio.Event()
        self.answers_models.set()
        self.cancelled = 0
        self.healthy = True
        self.asked_for_health = asyncio.Event()  # set when a request to /health waits for its answer
        self.answers_health = asyncio.Event()
        self.answers_health.set()
        self.hold = asyncio.Event()  # while not set, streams stop after their first event
        self.hold.set()
        self.hold_first = False  # if True, streams already stop before their first event
        self.pause_s = 0.0  # pause between the events of a stream
        self.texts: list[str] = []  # texts of a stream's events, for streams that look like vLLM's
        self.on_request: Callable[[web.Request], Awaitable[web.StreamResponse | None]] | None = None
        self.app.add_routes([web.post(path, self._generate) for path in bodies.PATHS])
        self.app.add_routes([web.post("/tokenize", self._tokenize), web.get("/health", self._health),
                             web.get("/v1/models", self._models)])

    async def _health(self, _: web.Request) -> web.Response:
        if not self.answers_health.is_set():
            self.asked_for_health.set()
            await self.answers_health.wait()
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        self.asked_for_models.append(request.headers.get("Authorization"))
        await self.answers_models.wait()
        told = {"object": "list", "from": self.name, "data": self.models}
        return web.json_response(told if self.models_answer is None else self.models_answer)

    async def _tokenize(self, _: web.Request) -> web.Response:
        return web.json_response({"tokens": TOKENS, "count": len(TOKENS)})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
        except ValueError:
            return web.json_response({"error": "no JSON"}, status=400)
        if "kvferry_prepare" in (body.get("kv_transfer_params") or {}):
            return await self._prepare(body)
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

    async def _prepare(self, body: dict[str, Any]) -> web.Response:
        self.prepared.append(body)
        if self.answers_prepared is not None:
            return self.answers_prepared
        try:
            await asyncio.Event().wait()
        finally:
            self.num_aborted += 1
        raise AssertionError

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.hold_first:
            await self.hold.wait()
        for number, text in enumerate(self.texts):
            last = number == len(self.texts) - 1
            where = {"delta": {"content": text}} if request.path == bodies.CHAT else {"text": text}
            choice = {"index": 0, "finish_reason": "length" if last else None, **where}
            event = {"id": f"of-{self.name}", "created": 1, "choices": [choice]}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
            await self.hold.wait()
            await asyncio.sleep(self.pause_s)
        if self.texts:
            await response.write(b'data: {"choices": [], "usage": {"completion_tokens": 6}}\n\ndata: [DONE]\n\n')
            return response
        await response.write(b'data: {"n": 0}\n\n')
        await self.hold.wait()
        await response.write(b'data: {"n": 1}\n\n')
        await response.write(b"data: [DONE]\n\n")
        return response


class FakeController(StandIn):
    """Lists the servers, and answers /pair with the first prefill and the first decode server that are not excluded."""

    def __init__(self) -> None:
        super().__init__()
        self.servers: list[FakeVllm] = []
        self.draining: set[str] = set()
        self.skip_prefill = False
        self.nodes_answer: Any = None  # if set, the answer to /nodes in place of the servers
        self.nodes_status = 200  # status of `nodes_answer`
        self.pair_answer: Any = None  # if set, the answer to /pair in place of a pair
        self.began_at = time.monotonic()
        self.answers = asyncio.Event()
        self.answers.set()
        self.asked: list[dict[str, Any]] = []
        self.authorizations: set[str | None] = set()
        self.app.add_routes([web.get("/nodes", self._nodes), web.post("/pair", self._pair)])

    async def start(self) -> None:
        self.began_at = time.monotonic()
        await super().start()

    async def _nodes(self, request: web.Request) -> web.Response:
        self.authorizations.add(request.headers.get("Authorization"))
        await self.answers.wait()
        if self.nodes_answer is not None:
            return web.json_response(self.nodes_answer, status=self.nodes_status)
        uptime_ms = int(1000 * (time.monotonic() - self.began_at))
        return web.json_response({"uptime_ms": uptime_ms, "nodes": [
            {"namespace": "default", "engine_id": server.name, "role": server.role, "serves": server.url,
             "endpoint": f"tcp://{server.name}", "draining": server.name in self.draining, "load": 0, "chunks": 0,
             "prepared_tokens_max": server.prepared_tokens_max}
            for server in self.servers]})

    async def _pair(self, request: web.Request) -> web.Response:
        self.authorizations.add(request.headers.get("Authorization"))
        asked = await request.json()
        self.asked.append(asked)
        await self.answers.wait()
        if self.pair_answer is not None:
            return web.json_response(self.pair_answer, status=503 if "error" in self.pair_answer else 200)
        out = set(asked["exclude"]) | self.draining
        found = {role: next((s for s in self.servers if s.role == role and s.name not in out), None)
                 for role in ("kv_producer", "kv_consumer")}
        if None in found.values():
            return web.json_response({"error": "nobody"}, status=503)
        prefill, decode = ({"engine_id": found[role].name} for role in ("kv_producer", "kv_consumer"))  # type: ignore[union-attr]
        return web.json_response({"prefill": prefill, "decode": decode, "skip_prefill": self.skip_prefill})


class Cluster:
    """Two prefill servers, two decode servers, a controller and the proxy in front of them."""

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
    runner = made.runner = made.door.runner(1.0)  # type: ignore[attr-defined]
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
