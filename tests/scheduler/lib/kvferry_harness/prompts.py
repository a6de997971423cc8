"""Makes prompts that differ for different seeds."""

import random

from kvferry_harness.stamps import VOCAB


def prompt(seed: int, length: int) -> list[int]:
    """Returns a prompt of `length` tokens. Of two prompts with the same seed, the shorter is a prefix of the longer."""
    dice = random.Random(seed)
    return [dice.randrange(1, VOCAB) for _ in range(length)]
