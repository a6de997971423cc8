"""Tests the stress test itself: it must report wrong KV as wrong, and must not blame vLLM's own preemption."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from kvferry_launch.testbed.answers import Generation, LoadResult
from kvferry_launch.testbed.client import VllmClient, judged_load, plain
from kvferry_launch.testbed.pair import DECODE_FLAGS, own_cores
from kvferry_launch.testbed.prompts import PromptSet
from kvferry_launch.testbed.reference import Reference
from kvferry_launch.testbed.servers import VllmServer

MAX_TOKENS = 100
PROMPTS = PromptSet(seed=0, count=24).prompts()
LONG_PROMPTS = [prompt for prompt in PROMPTS if len(prompt) > 96]
DAMAGED = [[*prompt[:32], *reversed(prompt[32:64]), *prompt[64:]] for prompt in LONG_PROMPTS]


def ask_reference(reference: Reference) -> None:
    for prompts in (PROMPTS, LONG_PROMPTS, DAMAGED):
        reference.generations(prompts, MAX_TOKENS)


def test_a_plain_server_that_preempts_passes_and_other_weights_fail(
        toy: Path, other_toy: Path, reference: Reference, run_server: Callable[[VllmServer], VllmServer]) -> None:
    same = run_server(VllmServer("same-weights", toy, own_cores()[0], flags=DECODE_FLAGS))
    other = run_server(VllmServer("other-weights", other_toy, own_cores()[1], flags=DECODE_FLAGS))
    same.wait_ready()
    other.wait_ready()
    expected = reference.generations(PROMPTS, MAX_TOKENS)

    right = asyncio.run(_load(same.url, expected))
    wrong = asyncio.run(_load(other.url, expected))

    assert right.complaints() == []
    assert right.preemptions > 0
    assert len(wrong.mismatches) == len(PROMPTS)
    assert wrong.errors == {}


def test_one_wrong_block_of_a_prompt_changes_its_tokens(reference: Reference) -> None:
    """Changing 32 tokens of a prompt has the same effect as attending to one wrong block. Every request must show it.
    """
    expected = reference.generations(LONG_PROMPTS, MAX_TOKENS)

    got = reference.generations(DAMAGED, MAX_TOKENS)

    assert all(right.tokens != wrong.tokens for right, wrong in zip(expected, got, strict=True))


async def _load(url: str, expected: list[Generation]) -> LoadResult:
    async with VllmClient(url) as client:
        return await judged_load(client, PROMPTS, expected, lambda prompt: plain(client, prompt, MAX_TOKENS), 8)
