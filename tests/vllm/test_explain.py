"""Tests `kvferry explain` under load on a real pair: the parts of a preempted request add up to its time."""

import asyncio
import statistics
from collections.abc import Awaitable

import pytest
from kvferry_launch.node.vllm import KvConnector
from kvferry_launch.testbed.answers import Answer
from kvferry_launch.testbed.client import VllmClient, prefill_then_decode, run_load
from kvferry_launch.testbed.pair import CONCURRENCY, Pair
from kvferry_launch.testbed.prompts import PromptSet

REQUESTS = PromptSet(seed=98, count=16)
MAX_TOKENS = 100

pytestmark = pytest.mark.servers("base")


async def load(pair: Pair) -> dict[str, Answer]:
    """Sends the requests through the pair. Returns the answers by the names of the requests."""
    prompts = REQUESTS.prompts()

    def send(prompt: list[int]) -> Awaitable[Answer]:
        name = f"explained{prompts.index(prompt)}" if prompt in prompts else "warm"
        return prefill_then_decode(prefill, decode, prompt, MAX_TOKENS, request_id=name)

    async with VllmClient(pair.prefill.url) as prefill, VllmClient(pair.decode.url) as decode:
        await send([5, 6, 7])  # a server's first request waits for imports before vLLM notes its arrival
        answers = await run_load(prompts, send, CONCURRENCY)
    return {f"explained{number}": answer for number, answer in enumerate(answers)}


def test_the_parts_of_a_preempted_request_add_up_to_its_time(kvferry_connector: KvConnector, pair: Pair) -> None:
    del kvferry_connector
    assert pair.controller is not None
    misses = {}
    for name, answer in asyncio.run(load(pair)).items():
        assert answer.error is None, answer.error
        wall_ms = answer.seconds * 1e3
        told = pair.controller.explain(name)
        if any(event["event"] == "preempted" for life in told["lives"] for event in life["events"]):
            assert [life["role"] for life in told["lives"]] == ["kv_producer", "kv_consumer"]
            parts_ms = sum(part["ms"] for part in told["parts"])
            misses[name] = abs(parts_ms / wall_ms - 1)
            print(f"{name}: {wall_ms:.0f} ms, parts {parts_ms:.0f} ms")
    assert len(misses) >= 3, "the decode server hardly preempted, so this proved nothing"
    print(f"{len(misses)} preempted requests: their parts miss their times by {statistics.median(misses.values()):.1%} "
          f"(median), {max(misses.values()):.1%} (largest)")
    # The largest says how late a busy host lets the client see its answer, which is in no part.
    assert statistics.median(misses.values()) <= 0.05, misses
