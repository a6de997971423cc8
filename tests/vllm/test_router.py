"""An unmodified vllm-router in front of the pair: text in, the plain server's text out."""

import asyncio
import json
import sys
from collections.abc import Iterator

import aiohttp
import pytest
from kvferry_launch.paths import LOGS
from kvferry_launch.process import ManagedProcess, free_port
from kvferry_launch.testbed.answers import Generation
from kvferry_launch.testbed.client import VllmClient, completion_body, text_of
from kvferry_launch.testbed.pair import Pair
from kvferry_launch.testbed.prompts import PromptSet
from kvferry_launch.testbed.servers import wait_healthy

PROMPT_SET = PromptSet(seed=1, count=24)
REQUESTS = 6
MAX_TOKENS = 100

pytestmark = pytest.mark.servers("base")


@pytest.fixture
def router(pair: Pair) -> Iterator[str]:
    """URL of a router that knows the pair."""
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


def test_a_router_gives_the_plain_servers_text(
        router: str, references: dict[PromptSet, list[Generation]]) -> None:
    async def ask() -> list[str]:
        async with VllmClient(router) as client:
            return [await client.complete_text(text_of(prompt), MAX_TOKENS) for prompt in prompts()]

    assert [answer.split() for answer in asyncio.run(ask())] == expected_words(references)


def test_a_router_streams_the_plain_servers_text(
        router: str, references: dict[PromptSet, list[Generation]]) -> None:
    async def ask() -> list[str]:
        async with aiohttp.ClientSession() as session:
            return [await streamed(session, router, text_of(prompt)) for prompt in prompts()]

    assert [answer.split() for answer in asyncio.run(ask())] == expected_words(references)


def prompts() -> list[list[int]]:
    return PROMPT_SET.prompts()[:REQUESTS]


def expected_words(references: dict[PromptSet, list[Generation]]) -> list[list[str]]:
    return [text_of(generation.tokens).split() for generation in references[PROMPT_SET][:REQUESTS]]


async def streamed(session: aiohttp.ClientSession, url: str, prompt: str) -> str:
    """The text of a streamed completion; it must come in more than one piece and end with [DONE]."""
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
