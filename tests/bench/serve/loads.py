"""Measures what loads cost the requests that a decode server computes meanwhile: the times between the tokens of one
stream, beside other requests of three kinds that take turns:
- without: the pair's prefill server computes a prompt, and nothing else happens.
- cached: after that, the decode server computes a token of a prompt that is in vLLM's own cache, so nothing is loaded.
- with: the pair serves the request, whose KV the decode server loads. It then computes a token of it, as above.
"""

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from deployments import Deployment, Door, door, running
from handover import new_request, session, streamed
from kvferry_launch.progress import Step

WARM_UP = 1  # rounds
PROMPT_TOKENS = 128
STREAM_TOKENS = 400

Send = Callable[[], Awaitable[object]]  # sends what is to run beside the stream, and waits for its answer


def figures(intervals: dict[str, list[float]]) -> dict[str, Any]:
    """Returns the medians and the 99th percentiles of the intervals in ms, which are given in seconds, and how many
    times longer the percentile with loads is.
    """
    percentiles = {name: statistics.quantiles(times, n=100, method="inclusive") for name, times in intervals.items()}
    found = {f"itl_p{percent}_ms_{name}": round(1e3 * those[percent - 1], 1)
             for name, those in percentiles.items() for percent in (50, 99)}
    return found | {f"itl_p99_ratio_{name}": round(percentiles["with"][98] / percentiles[name][98], 3)
                    for name in ("without", "cached")}


async def intervals_beside(http: aiohttp.ClientSession, url: str, model: str, send: Send) -> tuple[list[float], int]:
    """Returns the intervals between the tokens of a stream of the server at `url`, and how many other requests ended
    meanwhile, which are sent one after the other until the stream ends.
    """
    stream = asyncio.create_task(streamed(http, url, new_request(model, PROMPT_TOKENS, STREAM_TOKENS)))
    ends = []
    while not stream.done():
        await send()
        ends.append(time.monotonic())
    times, _ = await stream
    return [later - earlier for earlier, later in itertools.pairwise(times)], sum(end <= times[-1] for end in ends)


async def by_turns(deployment: Deployment, proxy: Door, model: str, length: int, rounds: int, step: Step
                   ) -> dict[str, Any]:
    assert deployment.prefill is not None
    prefill, decode = deployment.prefill.url, deployment.decode.url
    kept = new_request(model, length + 1, 1)  # of this prompt, vLLM's cache can have all blocks before the last token
    async with session() as http:
        async def computed() -> None:
            await streamed(http, prefill, new_request(model, length, 1))

        async def cached() -> None:
            await computed()
            await streamed(http, decode, kept)

        async def served() -> None:
            await streamed(http, proxy.url, new_request(model, length, 2))

        kinds: dict[str, Send] = {"without": computed, "cached": cached, "with": served}
        found: dict[str, list[float]] = {name: [] for name in kinds}
        loads = 0
        for number in range(WARM_UP + rounds):
            step.update(number / (WARM_UP + rounds), f"{length} tokens")
            for name in kinds if number % 2 else reversed(kinds):
                intervals, others = await intervals_beside(http, decode, model, kinds[name])
                if number >= WARM_UP:
                    found[name] += intervals
                    loads += others if name == "with" else 0
    return figures(found) | {"loads": loads}


def measure(model: Path, options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Appends a row for each length as soon as it is measured. Errors: ProcessError, TimeoutError,
    aiohttp.ClientError.
    """
    with Step("loads") as step, running("pushed", model) as deployment, \
            door(deployment, "pushed", "prefill", options.prepare_from) as proxy:
        for length in options.lengths:
            found = asyncio.run(by_turns(deployment, proxy, str(model), length, options.repeat, step))
            rows.append({"load": "loads", "prompt_tokens": length, "rounds": options.repeat} | found)
