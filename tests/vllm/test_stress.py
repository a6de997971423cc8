"""Preemption under load: 8 requests at a time on a decode server with room for two or three."""

import asyncio

import pytest
from kvferry_launch.answers import Generation
from kvferry_launch.pair import Pair, pair_load
from kvferry_launch.prompts import PromptSet
from kvferry_launch.servers import KVFERRY_CONNECTOR

MAX_TOKENS = 100


@pytest.mark.parametrize(("shared_prefixes",), [
    pytest.param(0, id="base", marks=pytest.mark.servers("base")),
    pytest.param(3, id="shared prefixes", marks=pytest.mark.servers("base")),
    pytest.param(0, id="chunked prefill", marks=pytest.mark.servers("chunked")),
    pytest.param(0, id="both roles", marks=pytest.mark.servers("both")),
])
def test_preempted_requests_give_the_plain_servers_tokens(
        pair: Pair, references: dict[PromptSet, list[Generation]], shared_prefixes: int, stress_seed: int) -> None:
    prompt_set = PromptSet(stress_seed, 24, shared_prefixes=shared_prefixes)

    result = asyncio.run(pair_load(pair, prompt_set.prompts(), references[prompt_set], MAX_TOKENS))

    assert result.complaints() == []
    assert result.preemptions > 0, "the decode server never preempted, so this proved nothing"
    if pair.setup.connector is KVFERRY_CONNECTOR:
        assert all(report is not None for report in result.reports), "a request came back without its report"
        assert result.resumed_loaded_tokens > 0, "no preempted request got its KV back through kvferry"
