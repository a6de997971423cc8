"""Preemption under load: 8 requests at a time on a decode server with room for two or three."""

import asyncio

import pytest
from kvferry_launch.answers import Generation, LoadResult
from kvferry_launch.client import VllmClient, judged_load, prefill_then_decode
from kvferry_launch.pair import Pair
from kvferry_launch.prompts import PromptSet
from kvferry_launch.reference import Reference
from kvferry_launch.servers import KVFERRY_CONNECTOR, KvConnector

REQUESTS = 24
CONCURRENCY = 8
MAX_TOKENS = 100


@pytest.mark.parametrize(("shared_prefixes",), [
    pytest.param(0, id="base", marks=pytest.mark.servers("base")),
    pytest.param(3, id="shared prefixes", marks=pytest.mark.servers("base")),
    pytest.param(0, id="chunked prefill", marks=pytest.mark.servers("chunked")),
    pytest.param(0, id="both roles", marks=pytest.mark.servers("both")),
])
def test_preempted_requests_give_the_plain_servers_tokens(
        pair: Pair, reference: Reference, connector: KvConnector | None, shared_prefixes: int,
        stress_seed: int) -> None:
    prompts = PromptSet(stress_seed, REQUESTS, shared_prefixes=shared_prefixes).prompts()
    expected = reference.generations(prompts, MAX_TOKENS)

    result = asyncio.run(stress(pair, prompts, expected))

    assert result.complaints() == []
    assert result.preemptions > 0, "the decode server never preempted, so this proved nothing"
    if connector is KVFERRY_CONNECTOR:
        assert all(report is not None for report in result.reports), "a request came back without its report"
        assert result.resumed_loaded_tokens > 0, "no preempted request got its KV back through kvferry"


async def stress(pair: Pair, prompts: list[list[int]], expected: list[Generation]) -> LoadResult:
    report = {"kvferry_report": True} if pair.setup.connector is KVFERRY_CONNECTOR else None
    async with VllmClient(pair.prefill.url) as prefill, VllmClient(pair.decode.url) as decode:
        return await judged_load(
            decode, prompts, expected,
            lambda prompt: prefill_then_decode(prefill, decode, prompt, MAX_TOKENS, report), CONCURRENCY)
