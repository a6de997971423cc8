"""What the hand-over costs: the time between the end of the prefill and the first token of the decode server, less one
decode step. One request at a time, asked of the servers directly, so that no front door is in it; and what a client
behind the front door waits for the first and for the second token."""

import asyncio
import itertools
import random
import statistics
import time
from typing import Any

import aiohttp
from deployments import Deployment
from kvferry_launch.proxy.bodies import REMOTE_DECODE

OUTPUT_TOKENS = 12


async def _one(session: aiohttp.ClientSession, deployment: Deployment, model: str,
               prompt: list[int]) -> dict[str, float]:
    body: dict[str, Any] = {"model": model, "prompt": prompt, "temperature": 0.0, "ignore_eos": True}
    start = time.monotonic()
    handed_over = start
    params = None
    if deployment.prefill is not None:
        wanted = REMOTE_DECODE | ({"kvferry_push_to": deployment.push_to} if deployment.push_to else {})
        async with session.post(f"{deployment.prefill.url}/v1/completions",
                                json=body | {"max_tokens": 1, "kv_transfer_params": wanted}) as answer:
            assert answer.status == 200, await answer.text()
            params = (await answer.json()).get("kv_transfer_params")
        handed_over = time.monotonic()
    times = await _token_times(session, deployment.decode.url, body, {"kv_transfer_params": params} if params else {})
    step = statistics.median(later - earlier for earlier, later in itertools.pairwise(times))
    found = {"ttft_ms": 1e3 * (times[0] - start), "step_ms": 1e3 * step}
    if deployment.prefill is None:
        return found
    return found | {"prefill_ms": 1e3 * (handed_over - start), "handover_ms": 1e3 * (times[0] - handed_over - step)}


async def _behind_the_door(session: aiohttp.ClientSession, deployment: Deployment, model: str,
                           prompt: list[int]) -> dict[str, float]:
    start = time.monotonic()
    first, second, *_ = await _token_times(session, deployment.front, {
        "model": model, "prompt": prompt, "temperature": 0.0, "ignore_eos": True})
    return {"door_first_ms": 1e3 * (first - start), "door_second_ms": 1e3 * (second - start)}


async def _token_times(session: aiohttp.ClientSession, url: str, body: dict[str, Any],
                       more: dict[str, Any] | None = None) -> list[float]:
    request = body | {"max_tokens": OUTPUT_TOKENS, "stream": True} | (more or {})
    async with session.post(f"{url}/v1/completions", json=request) as answer:
        assert answer.status == 200, await answer.text()
        return [time.monotonic() async for line in answer.content if line.startswith(b"data: {")]


async def _measure(deployment: Deployment, lengths: list[int], repeat: int) -> list[dict[str, float]]:
    rows = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300),
                                     connector=aiohttp.TCPConnector(force_close=True)) as session:
        async with session.get(f"{deployment.decode.url}/v1/models") as answer:
            model = (await answer.json())["data"][0]["id"]
        for length in lengths:
            turns = []
            for turn in range(repeat + 2):  # the first two warm up
                dice = random.Random(f"{deployment.name} {length} {turn}")
                direct, through_door = ([dice.randrange(3, 500) for _ in range(length)] for _ in range(2))
                turns.append(await _one(session, deployment, model, direct)
                             | await _behind_the_door(session, deployment, model, through_door))
            row: dict[str, float] = {"prompt_tokens": length}
            for name in turns[0]:
                row[name] = round(statistics.median(one[name] for one in turns[2:]), 1)
            rows.append(row)
    return rows


def measure(deployment: Deployment, lengths: list[int], repeat: int) -> list[dict[str, float]]:
    """Medians of `repeat` requests of each length."""
    return asyncio.run(_measure(deployment, lengths, repeat))
