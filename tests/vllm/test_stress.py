"""Tests preemption under load: 8 requests at a time on a decode server that has room for two or three."""

import asyncio

from kvferry_launch.node.vllm import KVFERRY_CONNECTOR
from kvferry_launch.testbed.pair import Pair, pair_load
from kvferry_launch.testbed.prompts import PromptSet
from kvferry_launch.testbed.reference import Reference

MAX_TOKENS = 100


def test_preempted_requests_give_the_plain_servers_tokens(
        pair: Pair, reference: Reference, stress_case: PromptSet) -> None:
    prompts = stress_case.prompts()
    result = asyncio.run(pair_load(pair, prompts, reference.generations(prompts, MAX_TOKENS), MAX_TOKENS))

    assert result.complaints() == []
    assert result.preemptions > 0, "the decode server never preempted, so this proved nothing"
    if pair.setup.connector is KVFERRY_CONNECTOR:
        reports = [report for report in result.reports if report is not None]
        assert len(reports) == len(prompts), "a request came back without its report"
        first = [report.admissions[0] for report in reports]
        handed_over = sum(admission.local + admission.loaded == len(prompt) - 1 and admission.loaded > 0
                          for admission, prompt in zip(first, prompts, strict=True))
        assert handed_over >= 0.75 * len(prompts), f"decode got only {handed_over} of {len(prompts)} prompts whole"
        assert result.resumed_loaded_tokens > 0, "no preempted request got its KV back through kvferry"
