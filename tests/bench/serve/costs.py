"""Measures what kvferry costs a model: requests go by turns to a server without it and to one with it, so that a slow
minute of the machine slows both.
"""

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import processors
from deployments import door, own_cores, running, running_alone
from handover import new_request, session, streamed
from kvferry_launch.progress import Step

WARM_UP = 2  # rounds
REQUESTS_A_TURN = 3  # one after the other, so that work left over by one delays the next


class Side(NamedTuple):
    """Where one half of the turns goes."""

    url: str
    model: str
    output_tokens: int


class Sides(NamedTuple):
    without: Side
    with_it: Side
    swap: Callable[[], None]  # gives each side the other one's core


class Times(NamedTuple):
    """The times of one turn, in seconds."""

    first_token: float  # median of its requests
    whole: float


@contextlib.contextmanager
def saves(model: Path, output_tokens: int) -> Iterator[Sides]:
    """Starts a server without kvferry and one that saves all KV that it computes, each on a core of its own."""
    cores = own_cores()
    with running_alone("plain", model, cores[0]) as plain, running_alone("saving", model, cores[1]) as saving:
        leaders = [plain.process.pid, saving.process.pid]

        def swap() -> None:
            leaders.reverse()
            for leader, core in zip(leaders, cores, strict=True):
                processors.bind(leader, int(core))

        yield Sides(Side(plain.url, str(model), output_tokens), Side(saving.url, str(model), output_tokens), swap)


@contextlib.contextmanager
def pair(model: Path, output_tokens: int) -> Iterator[Sides]:
    """Starts a pair, whose prefill server alone is asked for one token, and whose proxy for that and the others."""
    with running("pushed", model) as deployment, door(deployment, "pushed", "prefill") as proxy:
        assert deployment.prefill is not None
        yield Sides(Side(deployment.prefill.url, str(model), 1), Side(proxy.url, str(model), output_tokens),
                    lambda: None)


COMPARED = {"saves": saves, "pair": pair}


def figures(rounds: list[tuple[Times, Times]], output_tokens: int) -> dict[str, Any]:
    """Returns the medians of the turns without kvferry and of those with it, and the median and the quartiles of the
    rounds' ratios. `rounds`: the turn without and the turn with kvferry of each round.
    """
    found: dict[str, Any] = {}
    for name, value in (("ttft_ms", lambda turn: 1e3 * turn.first_token),
                        ("tokens_per_s", lambda turn: REQUESTS_A_TURN * output_tokens / turn.whole)):
        without, with_it = ([value(turn) for turn in turns] for turns in zip(*rounds, strict=True))
        ratios = [mine / plain for plain, mine in zip(without, with_it, strict=True)]
        lower, middle, upper = statistics.quantiles(ratios, n=4, method="inclusive")
        found |= {f"{name}_without": round(statistics.median(without), 1),
                  f"{name}_with": round(statistics.median(with_it), 1), f"{name}_ratio": round(middle, 3),
                  f"{name}_quartiles": f"{lower:.3f} to {upper:.3f}"}
    return found


def ttft_alone(found: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures without rates: a pair's prefill server alone is asked for one token of each answer."""
    return {name: value for name, value in found.items() if name.startswith("ttft_")}


async def turn(http: aiohttp.ClientSession, side: Side, length: int) -> Times:
    """Sends requests with new prompts, one after the other."""
    firsts = []
    begin = time.monotonic()
    for _ in range(REQUESTS_A_TURN):
        sent = time.monotonic()
        times, _ = await streamed(http, side.url, new_request(side.model, length, side.output_tokens))
        firsts.append(times[0] - sent)
    return Times(statistics.median(firsts), time.monotonic() - begin)


async def by_turns(sides: Sides, length: int, rounds: int, step: Step) -> list[tuple[Times, Times]]:
    """The sides begin a round by turns, and exchange cores every second round, so that neither is always the first or
    always on the better core.
    """
    found = []
    async with session() as http:
        for number in range(WARM_UP + rounds):
            step.update(number / (WARM_UP + rounds), f"{length} tokens")
            if number % 2:
                second, first = await turn(http, sides.with_it, length), await turn(http, sides.without, length)
                sides.swap()
            else:
                first, second = await turn(http, sides.without, length), await turn(http, sides.with_it, length)
            found.append((first, second))
    return found[WARM_UP:]


def measure(model: Path, options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Appends a row for each comparison and length as soon as it is measured. Errors: ProcessError, TimeoutError,
    aiohttp.ClientError.
    """
    for name, compared in COMPARED.items():
        with Step(name) as step, compared(model, options.output_tokens) as sides:
            for length in options.lengths:
                rounds = asyncio.run(by_turns(sides, length, options.repeat, step))
                row = {"load": "costs", "compared": name, "prompt_tokens": length, "rounds": len(rounds)}
                found = figures(rounds, options.output_tokens)
                rows.append(row | (ttft_alone(found) if compared is pair else found))
