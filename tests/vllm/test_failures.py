"""Tests that a process that dies near the decode server costs a recompute at most: right tokens, no error, no hang."""

import asyncio

import pytest
from kvferry_launch.node.vllm import KvConnector
from kvferry_launch.proxy.bodies import REMOTE_DECODE
from kvferry_launch.testbed.answers import Answer, Generation, LoadResult
from kvferry_launch.testbed.client import VllmClient, judged_load
from kvferry_launch.testbed.pair import CONCURRENCY, Pair, pair_load
from kvferry_launch.testbed.prompts import PromptSet
from kvferry_launch.testbed.reference import Reference

# No other test sends these two sets.
DURING, AFTER = PromptSet(seed=92, count=24), PromptSet(seed=93, count=8, tokens_min=40)
UNSEEN = PromptSet(seed=97, count=6)
MAX_TOKENS = 100
KILL_AFTER = 6  # answers

pytestmark = pytest.mark.servers("base")


def ask_reference(reference: Reference) -> dict[PromptSet, list[Generation]]:
    return {prompts: reference.generations(prompts.prompts(), MAX_TOKENS) for prompts in (DURING, AFTER, UNSEEN)}


@pytest.mark.disruptive(1)
def test_a_controller_that_dies_and_returns_costs_no_request(
        kvferry_connector: KvConnector, pair: Pair, reference: Reference) -> None:
    assert pair.controller is not None, f"{kvferry_connector.name} runs with a controller"
    controller = pair.controller
    answered = 0

    def kill_in_the_middle(index: int, answer: Answer) -> None:
        del index, answer
        nonlocal answered
        answered += 1
        if answered == KILL_AFTER:
            controller.process.kill()
        elif answered == 2 * KILL_AFTER:
            controller.start()

    references = ask_reference(reference)
    during = asyncio.run(pair_load(pair, DURING.prompts(), references[DURING], MAX_TOKENS, kill_in_the_middle))
    controller.wait_ready()
    after = asyncio.run(pair_load(pair, AFTER.prompts(), references[AFTER], MAX_TOKENS))

    assert during.complaints() == []
    assert after.complaints() == []
    assert loaded_tokens(after) > 0, "nothing was loaded after the controller had come back"
    assert pair.decode.healthy()
    assert pair.prefill.healthy()


@pytest.mark.disruptive(2)
def test_a_prefill_server_that_dies_before_its_kv_is_read_costs_a_recompute(
        kvferry_connector: KvConnector, pair: Pair, reference: Reference) -> None:
    """The decode server has no KV of these prompts, and after the prefill server's death no other node has it."""
    del kvferry_connector
    prompts = UNSEEN.prompts()

    async def prefill_all() -> list[Generation]:
        async with VllmClient(pair.prefill.url) as prefill:
            return [await prefill.generate(prompt, 1, REMOTE_DECODE) for prompt in prompts]

    async def decode_all(handed_over: dict[tuple[int, ...], dict[str, object] | None]) -> LoadResult:
        async with VllmClient(pair.decode.url) as decode:

            async def send(prompt: list[int]) -> Answer:
                start = asyncio.get_running_loop().time()
                params = (handed_over[tuple(prompt)] or {}) | {"kvferry_report": True}
                generation = await decode.generate(prompt, MAX_TOKENS, params)
                return Answer(prompt, asyncio.get_running_loop().time() - start, generation)

            return await judged_load(decode, prompts, ask_reference(reference)[UNSEEN], send, CONCURRENCY)

    first = asyncio.run(prefill_all())
    assert all(generation.kv_transfer_params for generation in first), "the prefill server handed nothing over"
    pair.prefill.process.kill()
    params = {tuple(prompt): generation.kv_transfer_params for prompt, generation in zip(prompts, first, strict=True)}
    result = asyncio.run(decode_all(params))

    assert result.complaints() == []
    reports = [report for report in result.reports if report]
    assert len(reports) == len(prompts)
    assert all(report.admissions[0].loaded == 0 for report in reports), reports
    assert pair.decode.healthy()


def loaded_tokens(result: LoadResult) -> int:
    return sum(admission.loaded for report in result.reports if report for admission in report.admissions)
