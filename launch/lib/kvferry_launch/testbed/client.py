"""A client of vLLM's endpoint that takes and returns tokens, and functions that send one request through a prefill and
a decode server, or many requests at once.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp

from kvferry_launch.proxy.bodies import REMOTE_DECODE
from kvferry_launch.testbed.answers import Answer, Generation, LoadResult, growth, parse_metrics

REQUEST_TIMEOUT_S = 120.0
FREQUENCY_PENALTY = 1.5  # without a penalty, greedy sampling of a random model repeats itself


class RequestError(Exception):
    """A request was not answered as expected; the message says why, with the server's answer if there is one."""


class VllmClient:
    """A client of one server, for use inside `async with`. It can send any number of requests at the same time."""

    def __init__(self, url: str, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "VllmClient":
        # Each request has its own connection, because vLLM's server closes idle connections after some seconds. If a
        # request were sent while the server closes its connection, the outcome would not be known.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(self._timeout_s), connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def generate(self, prompt: Sequence[int], max_tokens: int,
                       kv_transfer_params: dict[str, Any] | None = None, **fields: str) -> Generation:
        """Generates exactly `max_tokens` tokens greedily. `fields` are added to the request's body. Errors:
        RequestError.
        """
        body: dict[str, Any] = {
            "token_ids": list(prompt),
            "sampling_params": {
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "temperature": 0.0,
                "frequency_penalty": FREQUENCY_PENALTY,
                "logprobs": 2,
            },
        } | fields
        if kv_transfer_params is not None:
            body["kv_transfer_params"] = kv_transfer_params
        answer = await self.post("/inference/v1/generate", body)
        choice = answer["choices"][0]
        if choice["finish_reason"] != "length":
            raise RequestError(f"finish_reason is {choice['finish_reason']!r}, not 'length', after "
                               f"{len(choice['token_ids'])} tokens")
        return Generation(choice["token_ids"], [_margin(step) for step in choice["logprobs"]["content"]],
                          answer.get("kv_transfer_params"))

    async def metrics(self) -> dict[str, float]:
        """Returns the value of each metric in /metrics, summed over its labels."""
        assert self._session is not None, "use the client inside 'async with'"
        async with self._session.get(f"{self.url}/metrics") as answer:
            return parse_metrics(await answer.text())

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a POST of JSON. Errors: RequestError."""
        assert self._session is not None, "use the client inside 'async with'"
        try:
            async with self._session.post(self.url + path, json=body) as answer:
                if answer.status != 200:
                    raise RequestError(f"status {answer.status}: {(await answer.text())[:300]}")
                content: dict[str, Any] = await answer.json()
                return content
        except asyncio.TimeoutError as error:
            raise RequestError(f"no answer within {self._timeout_s:.0f} s") from error
        except aiohttp.ClientError as error:
            raise RequestError(f"{type(error).__name__}: {error}") from error


async def prefill_then_decode(prefill: VllmClient, decode: VllmClient, prompt: list[int], max_tokens: int,
                              extra: dict[str, Any] | None = None, **fields: str) -> Answer:
    """Sends one request as routers do: to the prefill server for one token, then to the decode server with the
    kv_transfer_params of the prefill server's answer.

    `extra` is added to the kv_transfer_params of the request to the decode server, and `fields` to its body. An error
    of a request is returned in the answer.
    """
    start = time.monotonic()
    handed_over = start
    try:
        first = await prefill.generate(prompt, 1, REMOTE_DECODE)
        handed_over = time.monotonic()
        params = {**(first.kv_transfer_params or {}), **(extra or {})}
        generation = await decode.generate(prompt, max_tokens, params or None, **fields)
    except RequestError as error:
        return Answer(prompt, time.monotonic() - start, error=str(error))
    end = time.monotonic()
    return Answer(prompt, end - start, generation, None, handed_over - start, end - handed_over)


async def plain(server: VllmClient, prompt: list[int], max_tokens: int) -> Answer:
    """Sends one request to one server. An error of the request is returned in the answer."""
    start = time.monotonic()
    try:
        generation = await server.generate(prompt, max_tokens)
    except RequestError as error:
        return Answer(prompt, time.monotonic() - start, error=str(error))
    return Answer(prompt, time.monotonic() - start, generation)


async def run_load(prompts: Sequence[list[int]], send: Callable[[list[int]], Awaitable[Answer]], concurrency: int,
                   on_answer: Callable[[int, Answer], None] = lambda index, answer: None) -> list[Answer]:
    """Sends the prompts in their order, `concurrency` at a time. Returns the answers in the same order."""
    gate = asyncio.Semaphore(concurrency)

    async def one(index: int, prompt: list[int]) -> Answer:
        async with gate:
            answer = await send(prompt)
        on_answer(index, answer)
        return answer

    return list(await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts))))


async def judged_load(counters: VllmClient, prompts: Sequence[list[int]], references: list[Generation],
                      send: Callable[[list[int]], Awaitable[Answer]], concurrency: int,
                      on_answer: Callable[[int, Answer], None] = lambda index, answer: None) -> LoadResult:
    """Sends the prompts with run_load(). Returns the answers together with `references` and with the growth of the
    metrics of one server meanwhile. `counters`: a client of that server.
    """
    before = await counters.metrics()
    answers = await run_load(prompts, send, concurrency, on_answer)
    return LoadResult(answers, references, growth(before, await counters.metrics()))


def _margin(step: dict[str, Any]) -> float:
    best = sorted((entry["logprob"] for entry in step["top_logprobs"]), reverse=True)
    return float(best[0] - best[1])
