"""Tests that equal seeds give equal prompt sets, and that the sets have the promised lengths and prefixes."""

from kvferry_launch.testbed.prompts import FIRST_TOKEN, LAST_TOKEN, PromptSet


def test_the_same_seed_gives_the_same_prompts_and_another_one_others() -> None:
    assert PromptSet(1, 24).prompts() == PromptSet(1, 24).prompts()
    assert PromptSet(1, 24).prompts() != PromptSet(2, 24).prompts()


def test_prompts_keep_to_the_lengths_and_tokens_asked_for() -> None:
    for shared_prefixes in (0, 3):
        for prompt in PromptSet(5, 200, tokens_min=4, tokens_max=400, shared_prefixes=shared_prefixes).prompts():
            assert 4 <= len(prompt) <= 400
            assert all(FIRST_TOKEN <= token <= LAST_TOKEN for token in prompt)


def test_prompts_share_as_many_beginnings_as_asked_for_and_no_two_are_equal() -> None:
    prompts = PromptSet(1, 24, shared_prefixes=3).prompts()
    assert len({tuple(prompt[:32]) for prompt in prompts if len(prompt) > 32}) == 3
    assert len({tuple(prompt) for prompt in prompts}) == 24
