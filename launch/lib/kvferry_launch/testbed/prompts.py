"""Makes sets of prompts from a seed. The prompts are token ids, so that no tokenizer is needed."""

import random
from dataclasses import dataclass

FIRST_TOKEN = 1
LAST_TOKEN = 510  # token 511 ends a sequence


@dataclass(frozen=True)
class PromptSet:
    """`count` prompts of `tokens_min` to `tokens_max` tokens. Equal fields give equal prompts.

    If `shared_prefixes` is greater than 0, there are that many common prefixes of 32 to 224 tokens. Each prompt starts
    with one of these prefixes, or with the beginning of one if the prompt is too short for the whole prefix, and ends
    with at least one token of its own.
    """

    seed: int
    count: int
    tokens_min: int = 8
    tokens_max: int = 400
    shared_prefixes: int = 0

    def prompts(self) -> list[list[int]]:
        rng = random.Random(f"kvferry-{self.seed}-{self.tokens_min}-{self.tokens_max}-{self.shared_prefixes}")

        def tokens(count: int) -> list[int]:
            return [rng.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]

        prefixes = [tokens(rng.randint(32, 224)) for _ in range(self.shared_prefixes)]
        prompts = []
        for _ in range(self.count):
            prefix = rng.choice(prefixes) if prefixes else []
            length = rng.randint(self.tokens_min, self.tokens_max)
            prompts.append(prefix[: length - 1] + tokens(max(length - len(prefix), 1)))
        return prompts
