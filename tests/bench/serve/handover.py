"""Sends one request at a time, and measures how long the client waits, how long the hand-over takes, and how much
processor time each part uses.

The time of the prefill server's answer comes from launch/proxy's own stages. Other pairs get requests directly, as
their router would send them, so that their hand-over contains no time of a router.
"""

import asyncio
import itertools
import random
import re
import statistics
import time
from typing import Any, NamedTuple

import aiohttp
import processors
from deployments import TRANSFERS, Deployment, Door
from kvferry_launch.process import ProcessError
from kvferry_launch.proxy.bodies import REMOTE_DECODE

OUTPUT_TOKENS = 12
WARM_UP = 2
PATH = "/v1/completions"


class Answer(NamedTuple):
    """The times of one request by the client's clock, in seconds."""

    sent: float
    prefilled: float | None  # time of the prefill server's answer; None without a prefill server
    tokens: list[float]
    first_is_of_prefill: bool = False


def figures(answer: Answer) -> dict[str, float]:
    """Returns the request's times in ms. The hand-over ends with the decode server's first token, minus the step that
    computes it.

    If the prefill server samples the first token, the decode server's first token is the second one of the answer. In
    both cases it comes one step after the KV has arrived.
    """
    times = answer.tokens
    step = statistics.median(later - earlier for earlier, later in itertools.pairwise(times[1:]))
    found = {"ttft_ms": times[0] - answer.sent, "second_token_ms": times[1] - answer.sent, "step_ms": step}
    if answer.prefilled is not None:
        decoded = times[1] if answer.first_is_of_prefill else times[0]
        found |= {"prefill_ms": answer.prefilled - answer.sent,
                  "first_token_after_prefill_ms": times[0] - answer.prefilled,
                  "handover_ms": decoded - answer.prefilled - step}
    return {name: 1e3 * seconds for name, seconds in found.items()}


def new_prompt(length: int) -> list[int]:
    """Returns random tokens, which no server has seen before."""
    dice = random.SystemRandom()
    return [dice.randrange(3, 500) for _ in range(length)]


def new_request(model: str, length: int, max_tokens: int) -> dict[str, Any]:
    """Returns the body of a request with a new prompt, whose answer has exactly `max_tokens` tokens."""
    return {"model": model, "prompt": new_prompt(length), "temperature": 0.0, "ignore_eos": True,
            "max_tokens": max_tokens}


REQUEST_SECONDS = 300


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(REQUEST_SECONDS),
                                 connector=aiohttp.TCPConnector(force_close=True))


async def streamed(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[list[float], list[str]]:
    """Returns the times of a stream's events, and the events. Errors: ProcessError."""
    times, events = [], []
    async with http.post(url + PATH, json=body | {"stream": True}) as answer:
        if answer.status != 200:
            raise ProcessError(f"{url} answered with status {answer.status}: {(await answer.text())[:300]}")
        async for line in answer.content:
            if line.startswith(b"data: {"):
                times.append(time.monotonic())
                events.append(line.removeprefix(b"data: ").decode())
    return times, events


async def _by_hand(http: aiohttp.ClientSession, deployment: Deployment, body: dict[str, Any]) -> Answer:
    """Sends the request to the two servers as a router does, or to the only server."""
    sent, prefilled = time.monotonic(), None
    if deployment.prefill is not None:
        question = body | {"max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}
        async with http.post(deployment.prefill.url + PATH, json=question) as answer:
            handed_over = (await answer.json())["kv_transfer_params"]
        prefilled = time.monotonic()
        body = body | {"kv_transfer_params": handed_over}
    times, _ = await streamed(http, deployment.decode.url, body)
    return Answer(sent, prefilled, times)


async def metric(http: aiohttp.ClientSession, url: str, pattern: str) -> float:
    """Returns the sum of a server's metrics whose names and labels match the pattern."""
    async with http.get(f"{url}/metrics") as answer:
        found = re.findall(rf"^{pattern} (\S+)$", await answer.text(), re.MULTILINE)
    return sum(map(float, found))


async def through_proxy(http: aiohttp.ClientSession, door: Door, body: dict[str, Any]) -> Answer:
    async def stages() -> tuple[float, float]:
        after_prefill = r'kvferry_proxy_stage_seconds_sum\{stage="(?:hand_over|first_byte|rest)"\}'
        return (await metric(http, door.url, after_prefill),
                await metric(http, door.url, r'kvferry_proxy_first_tokens_total\{reason="",source="prefill"\}'))

    before = await stages()
    sent = time.monotonic()
    times, _ = await streamed(http, door.url, body)
    ended = time.monotonic()
    after_prefill, num_of_prefill = (after - first for after, first in zip(await stages(), before, strict=True))
    return Answer(sent, ended - after_prefill, times, first_is_of_prefill=num_of_prefill == 1)


def _seconds(deployment: Deployment, door: Door) -> dict[str, float]:
    found = {"wall": time.monotonic(), "client": time.process_time()}
    for side, server in (("prefill", deployment.prefill), ("decode", deployment.decode)):
        if server is not None:
            found |= {f"{side} {part}": value for part, value in processors.of_server(server.process.pid).items()}
    for name, process in (("door", door.process), ("controller", getattr(deployment.controller, "process", None))):
        if process is not None:
            found[name] = processors.of_program(process.pid)
    return found


async def _measure(deployment: Deployment, door: Door, name: str, length: int, repeat: int) -> dict[str, Any]:
    answers = []
    async with session() as http:
        for turn in range(WARM_UP + repeat):
            if turn == WARM_UP:
                before = _seconds(deployment, door)
            body = new_request(str(deployment.decode.model), length, OUTPUT_TOKENS)
            answers.append(await (through_proxy(http, door, body) if name in TRANSFERS else
                                  _by_hand(http, deployment, body)))
        after = _seconds(deployment, door)
    measured = [figures(answer) for answer in answers[WARM_UP:]]
    row: dict[str, Any] = {key: round(statistics.median(one[key] for one in measured), 1) for key in measured[0]}
    row["first_of_prefill"] = sum(answer.first_is_of_prefill for answer in answers[WARM_UP:])
    return row | {"repeat": repeat, "seconds_per_request": {part: round((after[part] - before[part]) / repeat, 3)
                                                            for part in after}}


def measure(deployment: Deployment, door: Door, name: str, length: int, repeat: int) -> dict[str, Any]:
    """Returns the medians of `repeat` requests with new prompts, and the mean seconds that each part computes for one
    request.
    """
    return asyncio.run(_measure(deployment, door, name, length, repeat))
