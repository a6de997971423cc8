"""Preemption under load: 8 requests at a time on a decode server with room for two or three."""

import asyncio

from kvferry_launch.node.vllm import KVFERRY_CONNECTOR
from kvferry_launch.testbed.answers import Generation
from kvferry_launch.testbed.pair import Pair, pair_load
from kvferry_launch.testbed.prompts import PromptSet

MAX_TOKENS = 100


def test_preempted_requests_give_the_plain_servers_tokens(
        pair: Pair, references: dict[PromptSet, list[Generation]], stress_case: PromptSet) -> None:
    result = asyncio.run(pair_load(pair, stress_case.prompts(), references[stress_case], MAX_TOKENS))

    assert result.complaints() == []
    assert result.preemptions > 0, "the decode server never preempted, so this proved nothing"
    if pair.setup.connector is KVFERRY_CONNECTOR:
        assert all(report is not None for report in result.reports), "a request came back without its report"
        assert result.resumed_loaded_tokens > 0, "no preempted request got its KV back through kvferry"
