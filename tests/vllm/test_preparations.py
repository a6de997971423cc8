"""Tests on real servers that decode loads a prompt's KV while prefill computes it, and that nothing is left when either
side fails: launch/proxy with a prefill server that computes its prompts in many steps.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kvferry.tickets import PUSH_TARGET, signer_of
from kvferry_launch.node.vllm import KvConnector
from kvferry_launch.testbed.client import VllmClient
from kvferry_launch.testbed.prompts import PromptSet
from kvferry_launch.testbed.servers import VllmServer
from proxy_deployment import DEADLINE_S, ProxyDeployment

PROMPTS = PromptSet(seed=91, count=6, tokens_min=600, tokens_max=900).prompts()
MAX_TOKENS = 30
COMPUTING_S = 0.05  # less than prefill takes for a prompt, and more than it takes for the first chunk
ENDS = ("kvferry_prepared_total", "kvferry_preparations_refused_total", "kvferry_preparations_abandoned_total")


@pytest.fixture(scope="module")
def prepared(toy: Path, kvferry_connector: KvConnector, servers: Any) -> Iterator[ProxyDeployment]:
    servers.stop()
    deployment = ProxyDeployment(toy, kvferry_connector, "prepared", 1, {"chunk_tokens": 64},
                                 ("--max-num-batched-tokens", "64"), proxy_flags=("--prepare-from", "1"))
    try:
        deployment.start()
        yield deployment
    finally:
        deployment.stop()


def body_of(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0.0, "repetition_penalty": 1.3,
            "ignore_eos": True, **more}


async def computed(server: VllmServer, prompt: list[int]) -> str:
    """Returns the text that follows the prompt, computed by this server alone."""
    async with aiohttp.ClientSession() as session, session.post(f"{server.url}/v1/completions",
                                                                json=body_of(prompt)) as answer:
        assert answer.status == 200, await answer.text()
        return str((await answer.json())["choices"][0]["text"])


async def streamed(url: str, prompt: list[int]) -> str:
    async with aiohttp.ClientSession() as session, session.post(
            f"{url}/v1/completions", json=body_of(prompt, stream=True)) as answer:
        assert answer.status == 200, await answer.text()
        lines = (await answer.text()).splitlines()
    assert [line for line in lines if line][-1] == "data: [DONE]"
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


async def metrics(server: VllmServer) -> dict[str, float]:
    async with VllmClient(server.url) as client:
        return await client.metrics()


def ends(found: dict[str, float]) -> list[float]:
    return [found.get(name, 0.0) for name in ENDS]


async def until(deployment: ProxyDeployment, condition: Callable[[dict[str, float]], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition(found := await metrics(deployment.decodes[0])):
        assert time.monotonic() < deadline, {name: value for name, value in found.items() if "num_req" in name}
        await asyncio.sleep(0.02)


def is_idle(found: dict[str, float]) -> bool:
    """Returns True if the server has no request and no block in use. The reservation of a push by a server that died
    ends later, at its own deadline.
    """
    return all(found.get(name, 0.0) == 0 for name in (
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "kvferry_pool_pinned_chunks"))


def has_preparation(found: dict[str, float]) -> bool:
    return found.get("vllm:num_requests_waiting", 0.0) > 0


async def half_prepared(deployment: ProxyDeployment, prompt: list[int]) -> "asyncio.Task[str]":
    """Asks for a completion, and returns while prefill computes the prompt. Prefill stands still until decode shows the
    preparation: else prefill could be done between two looks at decode's gauges.
    """
    group = deployment.prefill.process.pid
    os.killpg(group, signal.SIGSTOP)
    try:
        asking = asyncio.create_task(streamed(deployment.url, prompt))
        await until(deployment, has_preparation)
    finally:
        os.killpg(group, signal.SIGCONT)
    await asyncio.sleep(COMPUTING_S)
    return asking


def test_streams_have_the_text_of_a_server_that_computes_everything(prepared: ProxyDeployment) -> None:
    async def test() -> None:
        before = ends(await metrics(prepared.decodes[0]))
        texts = [await (await half_prepared(prepared, prompt)) for prompt in PROMPTS[:3]]
        assert texts == [await computed(prepared.prefill, prompt) for prompt in PROMPTS[:3]]
        # A counter may be told later than the answer.
        await until(prepared, lambda found: sum(ends(found)) >= sum(before) + len(texts))
        after = await metrics(prepared.decodes[0])
        num_prepared, _, num_abandoned = (now - then for now, then in zip(ends(after), before, strict=True))
        assert num_prepared >= 2 and num_abandoned == 0, after
        await until(prepared, is_idle)

    asyncio.run(test())


def test_two_requests_with_one_prompt_at_once(prepared: ProxyDeployment) -> None:
    async def test() -> None:
        texts = await asyncio.gather(*(streamed(prepared.url, PROMPTS[3]) for _ in range(2)))
        assert texts == [await computed(prepared.prefill, PROMPTS[3])] * 2
        await until(prepared, is_idle)

    asyncio.run(test())


def test_nothing_is_left_of_a_client_that_goes_away_while_its_prompt_is_computed(prepared: ProxyDeployment) -> None:
    async def test() -> None:
        asking = await half_prepared(prepared, PROMPTS[4])
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(prepared, is_idle)
        assert await streamed(prepared.url, PROMPTS[4]) == await computed(prepared.prefill, PROMPTS[4])

    asyncio.run(test())


def test_a_preparation_that_comes_late_computes_nothing_and_delays_nobody(prepared: ProxyDeployment) -> None:
    async def test() -> None:
        node = prepared.nodes()["d0"]
        target = signer_of(str(prepared.controller.key_file)).signed(
            PUSH_TARGET, {"engine_id": "d0", "endpoint": node["endpoint"]})
        late = body_of([*PROMPTS[0], 1], max_tokens=1) | {"kv_transfer_params": {"kvferry_prepare": target}}
        before = await metrics(prepared.decodes[0])
        async with aiohttp.ClientSession() as session:
            asking = asyncio.create_task(session.post(f"{prepared.decodes[0].url}/v1/completions", json=late))
            await until(prepared, has_preparation)
            assert await streamed(prepared.url, PROMPTS[1]) == await computed(prepared.prefill, PROMPTS[1])
            assert not asking.done()
            asking.cancel()
        await until(prepared, is_idle)
        after = await metrics(prepared.decodes[0])
        assert after["kvferry_preparations_refused_total"] > before.get("kvferry_preparations_refused_total", 0.0)
        assert after["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"] <= len(PROMPTS[1]) + 1

    asyncio.run(test())


def test_a_prefill_that_is_killed_leaves_nothing_and_the_answer_is_right(prepared: ProxyDeployment) -> None:
    async def test() -> None:
        asking = await half_prepared(prepared, PROMPTS[5])
        prepared.prefill.process.kill()
        found = await asking
        assert found == await computed(prepared.decodes[0], PROMPTS[5])
        await until(prepared, is_idle)

    asyncio.run(test())
