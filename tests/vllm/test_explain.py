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

NUM_REQUESTS = 16
MAX_TOKENS = 100
LOADS_MAX, PREEMPTED_MIN, MISS_MAX = 5, 3, 0.05

pytestmark = pytest.mark.servers("base")


async def load(pair: Pair, number: int) -> dict[str, Answer]:
    """Sends requests through the pair, other ones for each number. Returns the answers by the names of the requests."""
    prompts = PromptSet(seed=98 + number, count=NUM_REQUESTS).prompts()

    def name_of(index: int) -> str:
        return f"explained-{number}-{index}"

    def send(prompt: list[int]) -> Awaitable[Answer]:
        name = name_of(prompts.index(prompt)) if prompt in prompts else "warm"
        return prefill_then_decode(prefill, decode, prompt, MAX_TOKENS, request_id=name)

    async with VllmClient(pair.prefill.url) as prefill, VllmClient(pair.decode.url) as decode:
        await send([5, 6, 7])  # a server's first request waits for imports before vLLM notes its arrival
        answers = await run_load(prompts, send, CONCURRENCY)
    return {name_of(index): answer for index, answer in enumerate(answers)}


def misses_of(pair: Pair, number: int) -> list[float]:
    """Sends a load. Returns by which share of its time the parts of each preempted request miss the time. How many are
    preempted depends on how fast prefill is.
    """
    assert pair.controller is not None
    misses = []
    for name, answer in asyncio.run(load(pair, number)).items():
        assert answer.error is None, answer.error
        wall_ms = answer.seconds * 1e3
        told = pair.controller.explain(name)
        if any(event["event"] == "preempted" for life in told["lives"] for event in life["events"]):
            assert [life["role"] for life in told["lives"]] == ["kv_producer", "kv_consumer"]
            parts_ms = sum(part["ms"] for part in told["parts"])
            misses.append(abs(parts_ms / wall_ms - 1))
            print(f"{name}: {wall_ms:.0f} ms, parts {parts_ms:.0f} ms")
    print(f"{len(misses)} preempted requests: their parts miss their times by {[f'{miss:.1%}' for miss in misses]}")
    return misses


def test_the_parts_of_a_preempted_request_add_up_to_its_time(kvferry_connector: KvConnector, pair: Pair) -> None:
    """The way of an answer to its client is in no part. It is long where other processes have the processor, so another
    load is sent if the median was too large, or hardly a request was preempted.
    """
    del kvferry_connector
    loads = [misses_of(pair, 0)]
    while len(loads) < LOADS_MAX and (len(loads[-1]) < PREEMPTED_MIN or statistics.median(loads[-1]) > MISS_MAX):
        loads.append(misses_of(pair, len(loads)))
    assert len(loads[-1]) >= PREEMPTED_MIN, "the decode server hardly preempted, so this proved nothing"
    assert statistics.median(loads[-1]) <= MISS_MAX
