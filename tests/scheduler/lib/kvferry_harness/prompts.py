"""Prompts that differ where they should."""

import random

from kvferry_harness.stamps import VOCAB


def prompt(seed: int, length: int) -> list[int]:
    """`length` tokens; prompts of the same seed are prefixes of each other."""
    dice = random.Random(seed)
    return [dice.randrange(1, VOCAB) for _ in range(length)]
