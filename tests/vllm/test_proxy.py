"""Tests launch/proxy in front of real servers that join, drain and die: the text is the plain server's, and no request
fails.
"""

import asyncio
import contextlib
import json
import os
import re
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kvferry_launch.node.vllm import KvConnector
from kvferry_launch.paths import KVFERRY, LAUNCH
from kvferry_launch.testbed.client import VllmClient
from kvferry_launch.testbed.prompts import PromptSet
from kvferry_launch.testbed.reference import Reference
from kvferry_launch.testbed.servers import VllmServer, wait_healthy
from proxy_deployment import DEADLINE_S, PROXIED_CHUNK_TOKENS, START_TIMEOUT_S, ProxyDeployment
from texts import complete_text, completion_body, text_of

REQUESTS = 6
# No other test sends these prompts to this deployment, so all KV that is loaded for them was handed over.
TEXTS = PromptSet(seed=81, count=REQUESTS, tokens_min=100)
STREAMS = PromptSet(seed=82, count=REQUESTS, tokens_min=100)
FIRST_TOKENS = PromptSet(seed=84, count=REQUESTS, tokens_min=100)
TRAFFIC = PromptSet(seed=83, count=REQUESTS)
TENANTS = PromptSet(seed=85, count=1, tokens_min=200)
PUSHED = PromptSet(seed=86, count=3, tokens_min=100)
MAX_TOKENS = 100
JOIN_S = 5.0
PREFILLS = r'kvferry_proxy_stage_seconds_count\{stage="prefill"\}'
SKIPPED = r'kvferry_proxy_skipped_prefills_total\{reason="cached"\}'
FROM_PREFILL = r'kvferry_proxy_first_tokens_total\{reason="",source="prefill"\}'
CANCELLED = "kvferry_proxy_cancelled_total"
# Metrics of the dashboard that have no sample before the first event that they count: a recompute, a push or a pull.
AFTER_AN_EVENT = {"kvferry_recomputed_tokens_total"}
AFTER_A_TRANSFER = ("kvferry_transfer_", "kvferry_pull_stage_", "kvferry_controller_transfer_")
STARTING_PAUSE_S = 1.5  # a pause between requests, so that a server that joins gets its first request in time


def ask_reference(reference: Reference) -> dict[PromptSet, list[list[str]]]:
    """Returns the words of the plain server's answers."""
    return {prompts: [text_of(found.tokens).split() for found in reference.generations(prompts.prompts(), MAX_TOKENS)]
            for prompts in (TEXTS, STREAMS, TRAFFIC)}


@pytest.mark.servers("proxied")
def test_nodes_tell_where_they_serve(proxied: ProxyDeployment) -> None:
    nodes = proxied.nodes()
    assert {name: (node["role"], node["serves"]) for name, node in nodes.items()} == {
        "p0": ("kv_producer", proxied.prefill.url), "d0": ("kv_consumer", proxied.decodes[0].url),
        "d1": ("kv_consumer", proxied.decodes[1].url)}
    assert nodes["p0"]["version"] == nodes["d0"]["version"] != ""
    assert "kv_heads=2" in nodes["p0"]["fingerprint"]


@pytest.mark.servers("proxied")
def test_the_proxy_gives_the_plain_servers_text(proxied: ProxyDeployment, reference: Reference) -> None:
    async def ask() -> list[str]:
        async with VllmClient(proxied.url) as client:
            return [await complete_text(client, text_of(prompt), MAX_TOKENS) for prompt in TEXTS.prompts()]

    prefills = proxied.metric(PREFILLS)
    loaded = total(proxied, "kvferry_loaded_tokens_total")
    assert [answer.split() for answer in asyncio.run(ask())] == ask_reference(reference)[TEXTS]
    assert proxied.metric(PREFILLS) - prefills == REQUESTS
    assert total(proxied, "kvferry_loaded_tokens_total") - loaded == sum(len(each) - 1 for each in TEXTS.prompts())


@pytest.mark.servers("proxied")
def test_a_prompt_that_decode_holds_goes_straight_there(proxied: ProxyDeployment, reference: Reference) -> None:
    """The proxy's keys are those that the connector made: the controller finds that the decode server has the prompt.
    """
    longest = max(range(REQUESTS), key=lambda i: len(TEXTS.prompts()[i]))
    prompt = TEXTS.prompts()[longest]
    whole_chunks = len(prompt) // PROXIED_CHUNK_TOKENS * PROXIED_CHUNK_TOKENS

    async def ask() -> str:
        async with VllmClient(proxied.url) as client:
            return await complete_text(client, text_of(prompt), MAX_TOKENS)

    assert whole_chunks >= 256
    asyncio.run(ask())
    deadline = time.monotonic() + DEADLINE_S
    while (pair := pair_for(proxied, prompt))["decode"]["cached_tokens"] < whole_chunks:
        assert time.monotonic() < deadline, pair
        time.sleep(0.1)
    assert pair["prefill"]["cached_tokens"] >= whole_chunks, pair
    wait_until_idle(proxied)
    before = proxied.metric(SKIPPED)
    assert asyncio.run(ask()).split() == ask_reference(reference)[TEXTS][longest]
    assert proxied.metric(SKIPPED) - before == 1


@pytest.mark.servers("proxied")
def test_the_proxy_streams_the_plain_servers_text(proxied: ProxyDeployment, reference: Reference) -> None:
    async def ask() -> list[str]:
        async with aiohttp.ClientSession() as session:
            return [await whole(session, proxied.url, prompt) for prompt in STREAMS.prompts()]

    loaded = total(proxied, "kvferry_loaded_tokens_total")
    assert [answer.split() for answer in asyncio.run(ask())] == ask_reference(reference)[STREAMS]
    assert total(proxied, "kvferry_loaded_tokens_total") - loaded == sum(len(each) - 1 for each in STREAMS.prompts())


@pytest.mark.servers("proxied")
def test_a_stream_that_begins_with_prefills_token_has_the_text_and_usage_of_any_other(proxied: ProxyDeployment) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"

    async def ask() -> None:
        async with aiohttp.ClientSession(headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"}) as session:
            for index, prompt in enumerate(FIRST_TOKENS.prompts()):
                body = {"prompt": prompt, "max_tokens": 20 + index, "temperature": 0.0, "stop_token_ids": [],
                        "ignore_eos": index % 2 == 0, "repetition_penalty": 1.0 + index / 10}
                streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
                async with session.post(f"{proxied.url}/v1/completions", json=streamed) as answer:
                    lines = (await answer.text()).splitlines()
                events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
                async with session.post(f"{proxied.url}/v1/completions", json=body) as answer:
                    whole = await answer.json()
                choice, usage = whole["choices"][0], whole["usage"]
                assert "".join(one["choices"][0]["text"] for one in events if one["choices"]) == choice["text"]
                assert events[-2]["choices"][0]["finish_reason"] == choice["finish_reason"]
                assert events[-1]["usage"] == {name: count for name, count in usage.items() if count is not None}
                assert len({one["id"] for one in events}) == 1

    before, loaded = proxied.metric(FROM_PREFILL), total(proxied, "kvferry_loaded_tokens_total")
    asyncio.run(ask())
    assert proxied.metric(FROM_PREFILL) - before == REQUESTS
    assert total(proxied, "kvferry_loaded_tokens_total") - loaded >= sum(map(len, FIRST_TOKENS.prompts())), "all of it"
    told = json.loads(proxied.controller.run("explain", "--trace", trace, "--json"))
    roles = [[life["role"] for life in one["lives"]] for one in told["requests"]]
    assert ["kv_producer", "kv_consumer"] in roles, "no server here exports spans, and kvferry explain knows the trace"


@pytest.mark.servers("proxied")
def test_a_client_that_goes_away_ends_the_request_in_the_engine(proxied: ProxyDeployment) -> None:
    async def ask() -> None:
        async with aiohttp.ClientSession() as session:
            prompt = TEXTS.prompts()[0]
            async with contextlib.aclosing(pieces(session, proxied.url, prompt, max_tokens=3000)) as stream:
                for _ in range(3):
                    await anext(stream)

    cancelled = proxied.metric(CANCELLED)
    asyncio.run(ask())
    deadline = time.monotonic() + 5.0
    while total(proxied, "vllm:num_requests_running") > 0:
        assert time.monotonic() < deadline, "the engine goes on for a client that went away"
        time.sleep(0.1)
    assert proxied.metric(CANCELLED) - cancelled == 1


@pytest.mark.servers("proxied")
def test_a_tenant_gets_its_own_cached_tokens_and_no_others(proxied: ProxyDeployment) -> None:
    url, proxy = proxied.start_proxy("proxied-tenants", "--tenant-header", "Authorization", "--without-prefill",
                                     "refuse")
    wait_healthy(proxy, f"{url}/health", DEADLINE_S)
    prompt = TENANTS.prompts()[0]

    async def ask(credential: str) -> str:
        async with aiohttp.ClientSession(headers={"Authorization": credential}) as session:
            return "".join([piece async for piece in pieces(session, url, prompt, max_tokens=10)])

    def cached_tokens() -> float:
        """Returns the tokens that were not computed because an earlier request had left their KV: all that vLLM's own
        prefix caches had, and what kvferry had before the prompt's hand-over.
        """
        own = [asyncio.run(server_metrics(server)).get("vllm:prefix_cache_hits_total", 0.0)
               for server in (proxied.prefill, *proxied.decodes)]
        return sum(own) + asyncio.run(server_metrics(proxied.prefill)).get("kvferry_hit_tokens_total", 0.0)

    texts, cached = [], []
    for credential in ("Bearer a", "Bearer b", "Bearer a"):
        before = cached_tokens()
        texts.append(asyncio.run(ask(credential)))
        wait_until_idle(proxied)
        cached.append(cached_tokens() - before)
    assert cached[:2] == [0, 0]
    assert cached[2] >= len(prompt) // PROXIED_CHUNK_TOKENS * PROXIED_CHUNK_TOKENS
    assert len(set(texts)) == 1
    assert len(set(re.findall("tenant [0-9a-f]{8}", proxy.log_text()))) == 2
    proxy.stop()


@pytest.mark.servers("proxied")
def test_every_metric_that_the_dashboard_queries_is_exported(proxied: ProxyDeployment) -> None:
    async def ask() -> None:
        async with VllmClient(proxied.url) as client:
            for prompt in PUSHED.prompts():  # the end of a push is reported in the next request's step
                await complete_text(client, text_of(prompt), 2)

    def page(url: str) -> str:
        with urllib.request.urlopen(f"{url}/metrics", timeout=DEADLINE_S) as answer:
            text: str = answer.read().decode()
            return text

    asyncio.run(ask())
    panels = json.loads((LAUNCH / "examples" / "monitoring" / "dashboard.json").read_text())["panels"]
    queried = {name for panel in panels for target in panel.get("targets", [])
               for name in re.findall(r"\b(?:kvferry_|vllm:)[a-z_]+", target["expr"])}
    assert queried >= AFTER_AN_EVENT
    of_transfers = {name for name in queried if name.startswith(AFTER_A_TRANSFER)}
    pages = {"proxy": page(proxied.url), "controller": proxied.controller_text("/metrics"),
             **{server.url: page(server.url) for server in (proxied.prefill, *proxied.decodes)}}
    for where, text in pages.items():
        expected = {name for name in queried if name.startswith(f"kvferry_{where}_") or (
            where.startswith("http") and not name.startswith(("kvferry_proxy_", "kvferry_controller_")))}
        assert len(expected) > 4, where
        samples = set(re.findall(r"^([a-z_:]+)[{ ]", text, re.MULTILINE))
        assert expected - samples <= AFTER_AN_EVENT | of_transfers, where
        if where == proxied.prefill.url:
            assert {name for name in of_transfers if name.startswith("kvferry_transfer_")} <= samples


def wait_until_idle(deployment: ProxyDeployment) -> None:
    """Waits until each node has reported to the controller that it is idle. A pair is chosen by the nodes' last
    heartbeats, which come every 0.5 s and may count a request that has ended meanwhile.
    """
    deadline, since = time.monotonic() + DEADLINE_S, time.monotonic()
    while time.monotonic() - since < 1.5:
        assert time.monotonic() < deadline, "the nodes have requests that nobody sent"
        if any(node["load"] for node in deployment.ask_controller("/nodes")["nodes"]):
            since = time.monotonic()
        time.sleep(0.1)


def pair_for(deployment: ProxyDeployment, prompt: list[int]) -> dict[str, Any]:
    return deployment.ask_controller("/pair", {"token_ids": prompt})


def total(deployment: ProxyDeployment, name: str) -> float:
    """Returns the sum of a metric over all decode servers."""
    return sum(asyncio.run(server_metrics(server)).get(name, 0.0) for server in deployment.decodes)


@pytest.mark.long  # tests/cluster/run --quick already has servers that join, drain and die
def test_servers_join_drain_and_die_under_traffic_without_a_failed_request(
        toy: Path, kvferry_connector: KvConnector, servers: Any, reference: Reference) -> None:
    servers.stop()
    deployment = ProxyDeployment(toy, kvferry_connector)
    try:
        deployment.start()
        asyncio.run(_join_drain_and_die(deployment, ask_reference(reference)[TRAFFIC]))
    finally:
        deployment.stop()


async def _join_drain_and_die(deployment: ProxyDeployment, texts: list[list[str]]) -> None:
    async with traffic(deployment.url, texts) as sent:
        await sent.more(3)
        # A decode server joins. It starts on the same cores, so the clients pause between requests. It shares a core
        # with the prefill server: vLLM's workers spin for a second after each step, and a server that starts on such a
        # core gets almost no time.
        sent.pause_s = STARTING_PAUSE_S
        joined = deployment.server("d1", "kv_consumer")
        await asyncio.to_thread(joined.wait_ready, START_TIMEOUT_S)
        ready_at = time.monotonic()
        sent.pause_s = 0.0
        while (await served(joined)) == 0:
            assert time.monotonic() - ready_at < JOIN_S, "a joined server gets nothing"
            await asyncio.sleep(0.1)
        print(f"the joined server has its first request after {time.monotonic() - ready_at:.1f} s")
        # The first decode server is drained and ends.
        drain = await asyncio.to_thread(
            subprocess.run, [KVFERRY, "drain", "d0", "--controller", deployment.controller.address],
            env=os.environ | deployment.key, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert drain.returncode == 0, drain.stderr
        assert deployment.nodes()["d0"]["draining"] is True
        assert deployment.nodes()["d0"]["load"] == 0
        before = await served(deployment.decodes[0])
        await sent.more(6)
        assert await served(deployment.decodes[0]) == before, "a drained server got something new"
        deployment.decodes[0].process.kill()
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
    pause_s: float = 0.0  # pause of each client between two requests
    failures: list[str] = field(default_factory=list)

    async def more(self, count: int) -> None:
        goal, deadline = self.num_answered + count, time.monotonic() + DEADLINE_S
        while self.num_answered < goal:
            assert not self.failures, self.failures
            assert time.monotonic() < deadline, f"only {self.num_answered} of {goal} answered"
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def traffic(url: str, texts: list[list[str]]) -> AsyncIterator[Sent]:
    """Runs three clients, each of which sends one request after the other, and judges the answers."""
    sent = Sent()
    ending = asyncio.Event()

    prompts = TRAFFIC.prompts()

    async def client(number: int) -> None:
        index = number
        async with VllmClient(url) as server:
            while not ending.is_set():
                index = (index + 1) % REQUESTS
                try:
                    text = await complete_text(server, text_of(prompts[index]), MAX_TOKENS)
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
    """Returns the pieces of a streamed completion, which must end with [DONE]."""
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
