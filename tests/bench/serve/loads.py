"""Measures what loads cost the requests that a decode server computes meanwhile: the times between the tokens of one
stream, while the prefill server of its pair computes prompts of others that stay there, and while it hands them over.
"""

import argparse
import asyncio
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import aiohttp
from deployments import Deployment, Door, door, running
from handover import new_request, session, streamed
from kvferry_launch.progress import Step

WARM_UP = 1  # rounds
PROMPT_TOKENS = 128
STREAM_TOKENS = 400


def figures(without: list[float], with_it: list[float]) -> dict[str, Any]:
    """Returns the median and the 99th percentile of the intervals in ms. `without`, `with_it`: in seconds."""
    before, beside = (statistics.quantiles(one, n=100, method="inclusive") for one in (without, with_it))
    found = {f"itl_p{percent}_ms_{name}": round(1e3 * percentiles[percent - 1], 1)
             for name, percentiles in (("without", before), ("with", beside)) for percent in (50, 99)}
    return found | {"itl_p99_ratio": round(beside[98] / before[98], 3)}


async def intervals_beside(http: aiohttp.ClientSession, url: str, model: str, other_url: str, length: int,
                           max_tokens: int) -> tuple[list[float], int]:
    """Returns the intervals between the tokens of a stream of the server at `url`, and the number of other requests,
    which are sent to `other_url` one after the other until the stream ends. `length`, `max_tokens`: of the others.
    """
    stream = asyncio.create_task(streamed(http, url, new_request(model, PROMPT_TOKENS, STREAM_TOKENS)))
    ends = []
    while not stream.done():
        await streamed(http, other_url, new_request(model, length, max_tokens))
        ends.append(time.monotonic())
    times, _ = await stream
    return [later - earlier for earlier, later in itertools.pairwise(times)], sum(end <= times[-1] for end in ends)


async def _by_turns(deployment: Deployment, proxy: Door, model: str, length: int, rounds: int, step: Step
                    ) -> dict[str, Any]:
    assert deployment.prefill is not None
    sides = (("without", deployment.prefill.url, 1), ("with", proxy.url, 2))
    found: dict[str, list[float]] = {"without": [], "with": []}
    loads = 0
    async with session() as http:
        for number in range(WARM_UP + rounds):
            step.update(number / (WARM_UP + rounds), f"{length} tokens")
            for name, url, max_tokens in sides if number % 2 else reversed(sides):
                intervals, others = await intervals_beside(http, deployment.decode.url, model, url, length, max_tokens)
                if number >= WARM_UP:
                    found[name] += intervals
                    loads += others if name == "with" else 0
    return figures(found["without"], found["with"]) | {"loads": loads}


def measure(model: Path, options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Appends a row for each length as soon as it is measured. Errors: ProcessError, TimeoutError,
    aiohttp.ClientError.
    """
    with Step("loads") as step, running("pushed", model) as deployment, \
            door(deployment, "pushed", "prefill", options.prepare_from) as proxy:
        for length in options.lengths:
            found = asyncio.run(_by_turns(deployment, proxy, str(model), length, options.repeat, step))
            rows.append({"load": "loads", "prompt_tokens": length, "rounds": options.repeat} | found)
