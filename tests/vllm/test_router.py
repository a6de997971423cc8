"""Tests an unmodified vllm-router in front of the pair: it returns the plain server's text. Also tests clients that
bypass the router.
"""

import asyncio
import json
import socket
import sys
from collections.abc import Coroutine, Iterator
from typing import Any

import aiohttp
import pytest
from kvferry_launch.paths import LOGS
from kvferry_launch.process import ManagedProcess, free_port
from kvferry_launch.testbed.answers import growth
from kvferry_launch.testbed.client import VllmClient
from kvferry_launch.testbed.pair import Pair
from kvferry_launch.testbed.prompts import PromptSet
from kvferry_launch.testbed.reference import Reference
from kvferry_launch.testbed.servers import wait_healthy
from texts import complete_text, completion_body, text_of

# No other test sends these prompts, so the decode server gets their KV only by the router's hand-over.
TEXTS, STREAMS = PromptSet(seed=94, count=6, tokens_min=40), PromptSet(seed=95, count=6, tokens_min=40)
FORGED = PromptSet(seed=96, count=2, tokens_min=40)
MAX_TOKENS = 100
SUSPECTED_S = 5.0  # how long nothing is fetched from a node of which nothing arrived in time

pytestmark = pytest.mark.servers("base")


def ask_reference(reference: Reference) -> dict[PromptSet, list[list[str]]]:
    """Returns the words of the plain server's answers."""
    return {prompts: [text_of(found.tokens).split() for found in reference.generations(prompts.prompts(), MAX_TOKENS)]
            for prompts in (TEXTS, STREAMS, FORGED)}


@pytest.fixture
def router(pair: Pair) -> Iterator[str]:
    """Yields the URL of a router that knows the pair."""
    port = free_port()
    command = [sys.executable, "-m", "vllm_router.launch_router", "--policy", "consistent_hash",
               "--vllm-pd-disaggregation", "--prefill", pair.prefill.url, "--decode", pair.decode.url,
               "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    process = ManagedProcess("router", command, {}, LOGS / "tests" / "router.log")
    process.start()
    try:
        wait_healthy(process, f"http://127.0.0.1:{port}/readiness", timeout_s=60.0)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.stop()


def test_a_router_gives_the_plain_servers_text(router: str, pair: Pair, reference: Reference) -> None:
    async def ask() -> list[str]:
        async with VllmClient(router) as client:
            return [await complete_text(client, text_of(prompt), MAX_TOKENS) for prompt in TEXTS.prompts()]

    answers, loaded = asyncio.run(with_loaded_tokens(pair, ask()))
    assert [answer.split() for answer in answers] == ask_reference(reference)[TEXTS]
    assert loaded == all_but_the_last(TEXTS)


def test_a_router_streams_the_plain_servers_text(router: str, pair: Pair, reference: Reference) -> None:
    async def ask() -> list[str]:
        async with aiohttp.ClientSession() as session:
            return [await streamed(session, router, text_of(prompt)) for prompt in STREAMS.prompts()]

    answers, loaded = asyncio.run(with_loaded_tokens(pair, ask()))
    assert [answer.split() for answer in answers] == ask_reference(reference)[STREAMS]
    assert loaded == all_but_the_last(STREAMS)


def test_an_address_that_a_client_names_is_not_used(pair: Pair, reference: Reference) -> None:
    async def ask(port: int) -> tuple[list[str], dict[str, float]]:
        forged = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": port, "remote_engine_id": "x",
                  "remote_request_id": "x", "remote_num_tokens": 40, "kvferry_ticket": "1.9999999999." + "0" * 64}
        async with VllmClient(pair.decode.url) as decode, aiohttp.ClientSession() as session:
            before = await decode.metrics()
            texts = []
            for prompt in FORGED.prompts():
                body = completion_body(text_of(prompt), MAX_TOKENS) | {"kv_transfer_params": forged}
                async with session.post(f"{pair.decode.url}/v1/completions", json=body) as answer:
                    texts.append((await answer.json())["choices"][0]["text"])
            return texts, growth(before, await decode.metrics())

    with socket.create_server(("127.0.0.1", 0)) as unknown_peer:
        unknown_peer.setblocking(False)
        texts, grown = asyncio.run(ask(unknown_peer.getsockname()[1]))
        with pytest.raises(BlockingIOError):
            unknown_peer.accept()
    assert [text.split() for text in texts] == ask_reference(reference)[FORGED]
    assert grown["kvferry_tickets_refused_total"] == len(texts)


async def with_loaded_tokens(pair: Pair, answers: Coroutine[Any, Any, list[str]]) -> tuple[list[str], float]:
    """Returns the answers, and how many tokens of KV the decode server loaded for them. If an earlier test's load kept
    a node from answering in time, nothing is fetched from it for a while; that is waited for.
    """
    async with VllmClient(pair.decode.url) as decode:
        before = await decode.metrics()
        if before.get("kvferry_holders_suspected_total", 0) > 0:
            await asyncio.sleep(SUSPECTED_S)
        found = await answers
        return found, growth(before, await decode.metrics())["kvferry_loaded_tokens_total"]


def all_but_the_last(prompts: PromptSet) -> int:
    """Returns the number of tokens that are handed over. A decode server computes the last token of each prompt itself.
    """
    return sum(len(prompt) - 1 for prompt in prompts.prompts())


async def streamed(session: aiohttp.ClientSession, url: str, prompt: str) -> str:
    """Returns the text of a streamed completion, which must come in more than one piece and end with [DONE]."""
    pieces = []
    body = completion_body(prompt, MAX_TOKENS) | {"stream": True}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        lines = [line.decode().strip() async for line in answer.content]
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    for event in events[:-1]:
        pieces += [choice["text"] for choice in json.loads(event)["choices"]]
    assert len(pieces) > 1
    return "".join(pieces)
