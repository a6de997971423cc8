"""launch/proxy in front of real servers that come, drain and die: the plain server's text, and no failed request."""

import asyncio
import contextlib
import json
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kvferry_launch.node.vllm import KvConnector
from kvferry_launch.paths import KVFERRY
from kvferry_launch.testbed.answers import Generation
from kvferry_launch.testbed.client import VllmClient, completion_body, text_of
from kvferry_launch.testbed.prompts import PromptSet
from kvferry_launch.testbed.servers import VllmServer
from proxy_deployment import DEADLINE_S, START_TIMEOUT_S, ProxyDeployment

PROMPT_SET = PromptSet(seed=1, count=24)
REQUESTS = 6
MAX_TOKENS = 100
JOIN_S = 5.0
STARTING_PAUSE_S = 1.5  # so that a joined server has its first request in time


@pytest.fixture(scope="module")
def deployment(toy: Path, references: dict[PromptSet, list[Generation]], _pairs: Any,
               kvferry_connector: KvConnector) -> Iterator[ProxyDeployment]:
    del references  # they are made before, by a server that wants a core of its own
    _pairs.stop()
    made = ProxyDeployment(toy, kvferry_connector)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def prompts() -> list[list[int]]:
    return PROMPT_SET.prompts()[:REQUESTS]


def expected(references: dict[PromptSet, list[Generation]]) -> list[list[str]]:
    return [text_of(generation.tokens).split() for generation in references[PROMPT_SET][:REQUESTS]]


def test_nodes_tell_where_they_serve(deployment: ProxyDeployment) -> None:
    nodes = deployment.nodes()
    assert {name: (node["role"], node["serves"]) for name, node in nodes.items()} == {
        "p0": ("kv_producer", deployment.prefill.url), "d0": ("kv_consumer", deployment.decode.url)}
    assert nodes["p0"]["version"] == nodes["d0"]["version"] != ""
    assert "kv_heads=2" in nodes["p0"]["fingerprint"]


def test_the_proxy_gives_the_plain_servers_text(
        deployment: ProxyDeployment, references: dict[PromptSet, list[Generation]]) -> None:
    async def ask() -> list[str]:
        async with VllmClient(deployment.url) as client:
            return [await client.complete_text(text_of(prompt), MAX_TOKENS) for prompt in prompts()]

    assert [answer.split() for answer in asyncio.run(ask())] == expected(references)
    assert deployment.metric(r'kvferry_proxy_stage_seconds_count\{stage="prefill"\}') == REQUESTS
    metrics = asyncio.run(server_metrics(deployment.decode))
    assert metrics["kvferry_loaded_tokens_total"] > 0, "decode got nothing of what was prefilled"


def test_a_prompt_that_decode_holds_goes_straight_there(
        deployment: ProxyDeployment, references: dict[PromptSet, list[Generation]]) -> None:
    """Its keys are those that the connector made: the controller sees that decode has the prompt by now."""
    longest = max(range(REQUESTS), key=lambda i: len(prompts()[i]))

    async def ask() -> str:
        async with VllmClient(deployment.url) as client:
            return await client.complete_text(text_of(prompts()[longest]), MAX_TOKENS)

    assert len(prompts()[longest]) > 256
    before = deployment.metric(r'kvferry_proxy_skipped_prefills_total\{reason="cached"\}')
    assert asyncio.run(ask()).split() == expected(references)[longest]
    question = json.dumps({"token_ids": prompts()[longest]}).encode()
    with urllib.request.urlopen(f"http://{deployment.http}/pair", data=question, timeout=30) as answer:
        pair = json.load(answer)
    assert pair["decode"]["cached_tokens"] >= 256, pair
    assert pair["prefill"]["cached_tokens"] >= 256, pair
    left = len(prompts()[longest]) - pair["decode"]["cached_tokens"]
    skipped = deployment.metric(r'kvferry_proxy_skipped_prefills_total\{reason="cached"\}') - before
    assert (skipped == 1) == (left <= 64), (skipped, pair)


def test_the_proxy_streams_the_plain_servers_text(
        deployment: ProxyDeployment, references: dict[PromptSet, list[Generation]]) -> None:
    async def ask() -> list[str]:
        async with aiohttp.ClientSession() as session:
            return [await whole(session, deployment.url, prompt) for prompt in prompts()]

    assert [answer.split() for answer in asyncio.run(ask())] == expected(references)


def test_a_client_that_goes_away_ends_the_request_in_the_engine(deployment: ProxyDeployment) -> None:
    async def ask() -> None:
        async with aiohttp.ClientSession() as session:
            async with contextlib.aclosing(pieces(session, deployment.url, prompts()[0], max_tokens=3000)) as stream:
                for _ in range(3):
                    await anext(stream)
            metrics = await server_metrics(deployment.decode)
            deadline = time.monotonic() + 5.0
            while metrics["vllm:num_requests_running"] > 0:
                assert time.monotonic() < deadline, "the engine goes on for a client that went away"
                await asyncio.sleep(0.1)
                metrics = await server_metrics(deployment.decode)

    asyncio.run(ask())
    assert deployment.metric("kvferry_proxy_cancelled_total") == 1


def test_servers_join_drain_and_die_under_traffic_without_a_failed_request(
        deployment: ProxyDeployment, references: dict[PromptSet, list[Generation]]) -> None:
    asyncio.run(_join_drain_and_die(deployment, expected(references)))


async def _join_drain_and_die(deployment: ProxyDeployment, texts: list[list[str]]) -> None:
    async with traffic(deployment.url, texts) as sent:
        await sent.more(3)
        # A decode server joins. It starts on the same cores, so that clients leave it some of them; beside the prefill
        # server: vLLM's workers spin for a second after each step, and who starts on such a core gets next to nothing.
        sent.pause_s = STARTING_PAUSE_S
        joined = deployment.server("d1", "kv_consumer")
        await asyncio.to_thread(joined.wait_ready, START_TIMEOUT_S)
        ready_at = time.monotonic()
        sent.pause_s = 0.0
        while (await served(joined)) == 0:
            assert time.monotonic() - ready_at < JOIN_S, "a joined server gets nothing"
            await asyncio.sleep(0.1)
        print(f"the joined server has its first request after {time.monotonic() - ready_at:.1f} s")
        # The first one is drained and goes.
        drain = await asyncio.to_thread(
            subprocess.run, [KVFERRY, "drain", "d0", "--controller", deployment.controller.address],
            capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert drain.returncode == 0, drain.stderr
        assert deployment.nodes()["d0"]["draining"] is True
        assert deployment.nodes()["d0"]["load"] == 0
        before = await served(deployment.decode)
        await sent.more(6)
        assert await served(deployment.decode) == before, "a drained server got something new"
        deployment.decode.process.kill()
        await sent.more(6)
        # The only prefill server dies.
        deployment.prefill.process.kill()
        await sent.more(6)
    assert sent.failures == []
    assert sent.num_wrong == 0


@dataclass
class Sent:
    num_answered: int = 0
    num_wrong: int = 0
    pause_s: float = 0.0  # of each client between two requests
    failures: list[str] = field(default_factory=list)

    async def more(self, count: int) -> None:
        goal, deadline = self.num_answered + count, time.monotonic() + DEADLINE_S
        while self.num_answered < goal:
            assert not self.failures, self.failures
            assert time.monotonic() < deadline, f"only {self.num_answered} of {goal} answered"
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def traffic(url: str, texts: list[list[str]]) -> AsyncIterator[Sent]:
    """Three clients that ask one request after the other, all the time; what comes back is judged."""
    sent = Sent()
    ending = asyncio.Event()

    async def client(number: int) -> None:
        index = number
        async with VllmClient(url) as server:
            while not ending.is_set():
                index = (index + 1) % REQUESTS
                try:
                    text = await server.complete_text(text_of(prompts()[index]), MAX_TOKENS)
                except Exception as error:
                    sent.failures.append(f"{type(error).__name__}: {error}")
                    return
                sent.num_wrong += text.split() != texts[index]
                sent.num_answered += 1
                await asyncio.sleep(sent.pause_s)

    clients = [asyncio.create_task(client(number)) for number in range(3)]
    try:
        yield sent
    finally:
        ending.set()
        await asyncio.gather(*clients)


async def served(server: VllmServer) -> float:
    return (await server_metrics(server)).get("vllm:prompt_tokens_total", 0.0)


async def server_metrics(server: VllmServer) -> dict[str, float]:
    async with VllmClient(server.url) as client:
        return await client.metrics()


async def whole(session: aiohttp.ClientSession, url: str, prompt: list[int]) -> str:
    return "".join([piece async for piece in pieces(session, url, prompt)])


async def pieces(session: aiohttp.ClientSession, url: str, prompt: list[int],
                 max_tokens: int = MAX_TOKENS) -> AsyncIterator[str]:
    """The pieces of a streamed completion, which must end with [DONE]."""
    body = completion_body(text_of(prompt), max_tokens) | {"stream": True}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        event = ""
        async for line in answer.content:
            if line.startswith(b"data: "):
                event = line.decode().removeprefix("data: ").strip()
                if event != "[DONE]":
                    yield "".join(choice["text"] for choice in json.loads(event)["choices"])
        assert event == "[DONE]"
