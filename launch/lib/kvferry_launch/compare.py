"""Tokens against a reference: where they part and whether rounding can explain it."""

from dataclasses import dataclass

from kvferry_launch.client import Generation

ROUNDING_MARGIN = 0.01  # a wider lead of the best token is not lost by rounding


@dataclass(frozen=True)
class Mismatch:
    """The first position at which two generations part; `margin` is the reference's lead there, in logprob."""

    position: int
    expected: int | None
    got: int | None
    margin: float

    def __str__(self) -> str:
        kind = "wrong KV" if self.margin > ROUNDING_MARGIN else "may be rounding"
        return (f"token {self.position} is {self.got}, the reference has {self.expected} "
                f"with a margin of {self.margin:.4f} ({kind})")


def first_mismatch(reference: Generation, got: Generation) -> Mismatch | None:
    """None when all tokens are equal, lengths included."""
    for position, (expected, token) in enumerate(zip(reference.tokens, got.tokens, strict=False)):
        if expected != token:
            return Mismatch(position, expected, token, reference.margins[position])
    if len(reference.tokens) != len(got.tokens):
        position = min(len(reference.tokens), len(got.tokens))
        tokens = [generation.tokens[position] if position < len(generation.tokens) else None
                  for generation in (reference, got)]
        return Mismatch(position, *tokens, margin=float("inf"))
    return None
