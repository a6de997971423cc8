"""Judges what engines with kvferry said, feature by feature, by what an engine without it said."""

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvferry_launch.testbed.answers import Generation, first_mismatch

# Errors with which vLLM says that the engine has too few blocks or a too small length.
_TOO_LITTLE = re.compile(
    "KV cache is needed, which is larger than the available KV cache memory|No available memory for the cache blocks"
    "|Cannot auto-fit max_model_len|No free blocks available|longer than the maximum ")
VALUES_DIFFER = 0.02  # logprobs of one token that differ by more are no rounding errors


class Outcome(Enum):
    RIGHT = "right"
    REFUSED = "refused"
    NOT_IN_VLLM = "vLLM alone"
    WRONG = "wrong"


@dataclass(frozen=True)
class Cell:
    outcome: Outcome
    text: str


def without_kvferry(error: str) -> Cell:
    """Judges a feature with which the plain engine has failed: vLLM does not serve it, or had too little for it."""
    if _TOO_LITTLE.search(error):
        return Cell(Outcome.WRONG, f"the table gives vLLM alone too little: {error}")
    return Cell(Outcome.NOT_IN_VLLM, error)


def judged(phases: dict[str, Any], plain: dict[str, Any], rounding: float = 0.0) -> Cell:
    """Judges one feature by its phases and the plain engine's. rounding: how near another token must have been in the
    plain engine where an answer differs first; 0: tokens must be equal.
    """
    if "error" in plain:
        return without_kvferry(plain["error"])
    if "error" in phases:
        return Cell(Outcome.WRONG, phases["error"])
    expected = plain["plain"]["answers"]
    for name, phase in phases.items():
        if complaint := complaint_about(phase, expected, rounding):
            return Cell(Outcome.WRONG, f"{name}: {complaint}")
    requests = sum(len(phase["answers"]) for phase in phases.values())
    preempted, loaded = (sum(phase[what] for phase in phases.values()) for what in ("preempted", "loaded"))
    text = f"right: {requests} requests, {preempted} preempted, {loaded} tokens from KV"
    if rounding:
        other = sum(got["tokens"] != wanted["tokens"] for phase in phases.values()
                    for got, wanted in zip(phase["answers"], expected, strict=True))
        text += f", {other} rounded to other tokens"
    return Cell(Outcome.RIGHT, text)


def complaint_about(phase: dict[str, Any], expected: list[dict[str, Any]], rounding: float = 0.0) -> str:
    """Returns what is wrong in a phase, or an empty text."""
    if len(phase["answers"]) != len(expected):
        return f"{len(phase['answers'])} answers instead of {len(expected)}"
    for index, (got, wanted) in enumerate(zip(phase["answers"], expected, strict=True)):
        mismatch = first_mismatch(*(Generation(one["tokens"], one["margins"]) for one in (wanted, got)))
        if mismatch and (not rounding or mismatch.margin > rounding):
            return f"request {index}: {mismatch}"
        pairs = zip(got["values"], wanted["values"], strict=False)
        if len(got["values"]) != len(wanted["values"]) or any(abs(a - b) > VALUES_DIFFER for a, b in pairs):
            return f"request {index}: other logprobs"
    if phase["loaded"] < phase["at_least"]:
        return f"{phase['loaded']} tokens were loaded instead of at least {phase['at_least']}"
    if phase["at_most"] is not None and phase["loaded"] > phase["at_most"]:
        return f"{phase['loaded']} tokens were loaded instead of at most {phase['at_most']}"
    return ""


def moved(plain: dict[str, Any], other: dict[str, Any]) -> float:
    """Returns by how much the tokens' leads over the second best ones differ at most between two plain engines of
    unlike types, as far as both say the same tokens. Where the first other token is, its lead has gone.
    """
    found = [0.0]
    for one, two in zip(plain["plain"]["answers"], other["plain"]["answers"], strict=True):
        steps = list(zip(one["tokens"], two["tokens"], one["margins"], two["margins"], strict=True))
        same = next((place for place, (own, got, *_) in enumerate(steps) if own != got), len(steps))
        found += [abs(lead - second) for _, _, lead, second in steps[:same]]
        found += [lead for _, _, lead, _ in steps[same:same + 1]]
    return max(found)


def blind(plain: dict[str, Any], changed: dict[str, Any]) -> bool:
    """Returns True if several answers stay the same when a token of their prompts changes: tokens would not show wrong
    KV.
    """
    if "error" in plain or "plain" not in changed:  # the cell has this error, or was not asked with other prompts
        return False
    pairs = zip(plain["plain"]["answers"], changed["plain"]["answers"], strict=True)
    return sum(one["tokens"] == other["tokens"] for one, other in pairs) > 1
