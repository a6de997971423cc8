"""Tests aborts on a real pair: they change no tokens of other requests, nothing stays held, and servers end when they
are told to.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kvferry_launch.node.vllm import KvConnector
from kvferry_launch.proxy.bodies import REMOTE_DECODE
from kvferry_launch.testbed.answers import Answer, Generation, Report
from kvferry_launch.testbed.client import RequestError, VllmClient, prefill_then_decode
from kvferry_launch.testbed.pair import Pair
from kvferry_launch.testbed.prompts import PromptSet
from kvferry_launch.testbed.reference import Reference
from kvferry_launch.testbed.servers import VllmServer

PROMPT_SET = PromptSet(seed=96, count=24)
# so many requests that both servers still work when they are stopped
STOPPED = PromptSet(seed=91, count=40, tokens_min=200)
MAX_TOKENS = 100
RESET_TRIES = 20
STOP_S = 20.0

pytestmark = pytest.mark.servers("base")


def ask_reference(reference: Reference) -> list[Generation]:
    return reference.generations(PROMPT_SET.prompts(), MAX_TOKENS)


async def settle(server: VllmServer) -> dict[str, float]:
    """Returns the server's metrics once no request runs there. Gauges are only updated by a step, so a small request is
    sent first.
    """
    async with VllmClient(server.url) as client:
        deadline = time.monotonic() + STOP_S
        while True:
            await client.generate([5, 6, 7], 2)
            metrics = await client.metrics()
            idle = metrics.get("vllm:num_requests_running", 0) == metrics.get("vllm:num_requests_waiting", 0) == 0
            if idle and metrics["vllm:kv_cache_usage_perc"] == 0 and metrics["kvferry_pool_pinned_chunks"] == 0:
                return metrics
            assert time.monotonic() < deadline, {
                name: metrics.get(name) for name in ("vllm:num_requests_running", "vllm:num_requests_waiting",
                                                     "vllm:kv_cache_usage_perc", "kvferry_pool_pinned_chunks")}
            await asyncio.sleep(0.3)


async def leave(task: Awaitable[object], after_s: float) -> None:
    """Waits `after_s`, then cancels the request, as a client that disconnects does."""
    with contextlib.suppress(TimeoutError, asyncio.CancelledError, RequestError, aiohttp.ClientError):
        await asyncio.wait_for(task, after_s)


async def stream_and_leave(url: str, prompt: list[int], chunks: int) -> None:
    """Reads `chunks` pieces of a streamed answer, then closes the connection."""
    body = {"model": "", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0.0, "stream": True,
            "ignore_eos": True}
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/v1/models") as answer:
            body["model"] = (await answer.json())["data"][0]["id"]
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            for _ in range(chunks):
                await answer.content.readline()


def test_clients_that_disconnect(kvferry_connector: KvConnector, pair: Pair, reference: Reference) -> None:
    del kvferry_connector
    prompts = PROMPT_SET.prompts()

    async def run() -> list[Answer]:
        async with VllmClient(pair.prefill.url) as prefill, VllmClient(pair.decode.url) as decode:
            stay = [prefill_then_decode(prefill, decode, prompt, MAX_TOKENS) for prompt in prompts[::3]]
            # The aborts come during a prefill, at a hand-over, while a request waits for a slot or a load, and in the
            # middle of decoding.
            go = [leave(prefill_then_decode(prefill, decode, prompt, MAX_TOKENS), 0.03 + 0.15 * index)
                  for index, prompt in enumerate(prompts[1::3])]
            go += [leave(decode.generate(prompt, MAX_TOKENS), 0.05 + 0.2 * index)
                   for index, prompt in enumerate(prompts[2::3])]
            go += [stream_and_leave(pair.decode.url, prompt, chunks) for chunks, prompt in enumerate(prompts[2:8:3])]
            return (await asyncio.gather(asyncio.gather(*stay), asyncio.gather(*go)))[0]

    answers = asyncio.run(run())
    assert_right(answers, ask_reference(reference)[::3])
    asyncio.run(settle(pair.decode))
    assert pair.prefill.healthy()
    assert pair.decode.healthy()


def test_prefills_that_nobody_comes_for_can_be_aborted(kvferry_connector: KvConnector, pair: Pair) -> None:
    del kvferry_connector

    async def run() -> None:
        async with VllmClient(pair.prefill.url) as prefill:
            await asyncio.gather(*(leave(prefill.generate(prompt, 1, dict(REMOTE_DECODE)), 0.02 * index)
                                   for index, prompt in enumerate(PROMPT_SET.prompts())))
            # The chunks of finished requests are kept for decode workers; their blocks are not.
            deadline = time.monotonic() + STOP_S
            while True:
                await prefill.generate([5, 6, 7], 2)
                if (await prefill.metrics())["vllm:kv_cache_usage_perc"] == 0:
                    break
                assert time.monotonic() < deadline, "prefill holds blocks of aborted requests"
                await asyncio.sleep(0.3)

    asyncio.run(run())
    assert pair.prefill.healthy()


def test_resets_and_sleep_under_load(kvferry_connector: KvConnector, pair: Pair, reference: Reference) -> None:
    del kvferry_connector
    expected = ask_reference(reference)[:10]
    answers = asyncio.run(load_with_resets(pair, PROMPT_SET.prompts()[:10]))
    assert_right(answers, expected)
    asyncio.run(settle(pair.decode))
    asyncio.run(sleep_and_wake(pair, PROMPT_SET.prompts()[0], expected[0]))
    prompt = list(reversed(PROMPT_SET.prompts()[1]))
    # this works because both servers are in the same weights epoch again
    assert asyncio.run(handed_over(pair, prompt)) == len(prompt) - 1


@pytest.mark.disruptive(3)
def test_servers_end_on_sigterm_under_load_and_leave_no_pool(kvferry_connector: KvConnector, pair: Pair) -> None:
    del kvferry_connector
    # the prefill server comes last, because without it no request reaches the decode server
    servers = (pair.decode, pair.prefill)
    sessions = {server.process.pid for server in servers}
    assert processes_with_pools(sessions), "no process of the pair has a pool mapped"
    for server in servers:
        asyncio.run(stop_under_load(pair, server))
    left = processes_with_pools(sessions)
    assert not left, f"processes are left that have a pool mapped: {left}"


def assert_right(answers: list[Answer], references: list[Generation]) -> None:
    for answer, reference in zip(answers, references, strict=True):
        assert answer.error is None, answer.error
        assert answer.generation is not None
        assert answer.generation.tokens == reference.tokens


def processes_with_pools(sessions: set[int]) -> set[int]:
    """Returns those processes of the sessions that have mapped a chunk pool. A pool is a memfd, so it exists as long as
    such a process.
    """
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            pid = int(maps.parent.name)
            if os.getsid(pid) in sessions and "/memfd:kvferry-" in maps.read_text():
                found.add(pid)
    return found


async def load_with_resets(pair: Pair, prompts: list[list[int]]) -> list[Answer]:
    async with (VllmClient(pair.prefill.url) as prefill, VllmClient(pair.decode.url) as decode,
                aiohttp.ClientSession() as session):

        async def reset() -> None:
            for query in ("", "?reset_running_requests=true", "?reset_running_requests=true&reset_external=true") * 3:
                await asyncio.sleep(0.4)
                for server in (pair.prefill, pair.decode):
                    # Requests that wait for KV hold no blocks, so the reset of running requests must succeed. It is
                    # repeated, because a request that has just ended may still have its blocks.
                    for _ in range(RESET_TRIES):
                        done = (await posted(session, f"{server.url}/reset_prefix_cache{query}"))["success"]
                        if done or not query:
                            break
                        await asyncio.sleep(0.1)
                    assert done or not query, f"{server.name} refuses {query}"

        resets = asyncio.create_task(reset())
        answers = await asyncio.gather(
            *(prefill_then_decode(prefill, decode, prompt, MAX_TOKENS) for prompt in prompts))
        await resets
        return list(answers)


async def posted(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.post(url) as answer:
        assert answer.status == 200, await answer.text()
        told: dict[str, Any] = await answer.json()
        return told


async def sleep_and_wake(pair: Pair, prompt: list[int], reference: Generation) -> None:
    """vLLM's CPU build reports that it sleeps and ends the running requests. Its workers only log that they keep their
    memory.

    Both servers are put to sleep, because each sleep starts a weights epoch.
    """
    async with VllmClient(pair.decode.url) as decode, aiohttp.ClientSession() as session:
        # two, so that one runs while the other is between two requests
        busy = [asyncio.create_task(ask_until_aborted(decode, prompt)) for _ in range(2)]
        while (await decode.metrics())["vllm:num_requests_running"] == 0:
            await asyncio.sleep(0.02)
        for server in (pair.decode, pair.prefill):
            assert await posted(session, f"{server.url}/sleep?level=1") == {"status": "sleeping", "level": 1}
            assert await is_sleeping(session, server)
            assert "sleep mode is not supported on CPU" in server.process.log_text()
            assert await posted(session, f"{server.url}/wake_up") == {"status": "awake", "tags": None}
            assert not await is_sleeping(session, server)
        aborted, others = await asyncio.wait(busy, timeout=STOP_S, return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        assert aborted, "the sleep has ended no request"
        for task in aborted:
            task.result()
        assert (await decode.generate(prompt, MAX_TOKENS)).tokens == reference.tokens


async def ask_until_aborted(server: VllmClient, prompt: list[int]) -> None:
    """Sends a request again and again, until the server ends one."""
    with pytest.raises(RequestError, match="finish_reason is 'abort'"):
        while True:
            await server.generate(prompt, 1023 - len(prompt))  # as many tokens as the server allows


async def is_sleeping(session: aiohttp.ClientSession, server: VllmServer) -> bool:
    async with session.get(f"{server.url}/is_sleeping") as answer:
        return bool((await answer.json())["is_sleeping"])


async def handed_over(pair: Pair, prompt: list[int]) -> int:
    """Returns how many tokens of the prompt the decode server loaded."""
    async with VllmClient(pair.prefill.url) as prefill, VllmClient(pair.decode.url) as decode:
        answer = await prefill_then_decode(prefill, decode, prompt, 5, {"kvferry_report": True})
    assert answer.generation is not None, answer.error
    report = Report.of(answer.generation)
    assert report is not None
    return sum(admission.loaded for admission in report.admissions)


async def stop_under_load(pair: Pair, server: VllmServer) -> None:
    async with (VllmClient(pair.prefill.url) as prefill, VllmClient(pair.decode.url) as decode,
                VllmClient(server.url) as watched):
        before = (await watched.metrics())["vllm:prompt_tokens_total"]
        tasks = [asyncio.create_task(leave(prefill_then_decode(prefill, decode, prompt, MAX_TOKENS), 10))
                 for prompt in STOPPED.prompts()]
        deadline = time.monotonic() + STOP_S
        while (await watched.metrics())["vllm:prompt_tokens_total"] == before:
            assert time.monotonic() < deadline, f"{server.name} has nothing to do"
            await asyncio.sleep(0.05)
        began = time.monotonic()
        server.process.signal(signal.SIGTERM)
        status = await asyncio.to_thread(server.process.wait, STOP_S)
        assert status is not None, f"{server.name} runs {STOP_S:.0f} s after SIGTERM"
        # At its end vLLM 0.32's serve_http() names the process that listens at its port, and fails if that is its own
        # engine, which has just ended.
        is_vllms_own = status == 1 and "psutil.ZombieProcess" in server.process.log_text()
        assert is_vllms_own or status in (0, -signal.SIGTERM, 128 + signal.SIGTERM), f"{server.name} ends with {status}"
        assert time.monotonic() - began < STOP_S
        for task in tasks:
            task.cancel()
