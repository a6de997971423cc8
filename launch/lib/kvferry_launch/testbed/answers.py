"""The answers of servers: their tokens, the connector's reports, the comparison with reference answers.

This module uses only the standard library.
"""

import re
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

ROUNDING_MARGIN = 0.01  # if the best two logprobs of a position differ by more, rounding can't change the choice
SLOW_S = 20.0


@dataclass(frozen=True)
class Generation:
    """The tokens of one answer. `margins[i]`: difference between the logprobs of the best and of the second best choice
    for token i.
    """

    tokens: list[int]
    margins: list[float]
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(frozen=True)
class Admission:
    """One admission of a request by vLLM's scheduler, as reported by the connector.

    `hit`: number of tokens that the connector or the engine's prefix cache has, whichever has more. `local`: number of
    tokens in the engine's prefix cache. `to_load`: number of tokens that the engine asked the connector to load.
    `loaded`: number of tokens that the connector loaded. `resumed`: True after a preemption. `tokens`: length of the
    request at the time of the admission.
    """

    hit: int
    local: int
    to_load: int
    loaded: int
    resumed: bool
    tokens: int = 0


@dataclass(frozen=True)
class Report:
    """The report that KvFerryConnector adds to the answer of a request with `kvferry_report`."""

    admissions: list[Admission]
    preemptions: int
    transfer_ms: float | None = None

    @staticmethod
    def of(generation: Generation) -> "Report | None":
        """Reads the report in an answer. Returns None if there is no report. Errors: KeyError if a field is missing."""
        raw = (generation.kv_transfer_params or {}).get("kvferry_report")
        if raw is None:
            return None
        names = ("hit", "local", "to_load", "loaded", "resumed", "tokens")
        admissions = [Admission(**{name: entry[name] for name in names}) for entry in raw["admissions"]]
        return Report(admissions, raw["preemptions"], raw.get("transfer_ms"))


@dataclass(frozen=True)
class Answer:
    """One request and its outcome; exactly one of `generation` and `error` is set."""

    prompt: list[int]
    seconds: float
    generation: Generation | None = None
    error: str | None = None
    prefill_s: float | None = None
    decode_s: float | None = None


@dataclass(frozen=True)
class Mismatch:
    """The first position at which two generations differ. `margin`: the reference's margin at that position; infinite
    if one of the two generations ends there.
    """

    position: int
    expected: int | None
    got: int | None
    margin: float

    def __str__(self) -> str:
        kind = "probably wrong KV" if self.margin > ROUNDING_MARGIN else "may be rounding"
        return (f"token {self.position} is {self.got}, the reference has {self.expected} "
                f"with a logprob margin of {self.margin:.4f} ({kind})")


def first_mismatch(reference: Generation, got: Generation) -> Mismatch | None:
    """Compares two generations. Returns None if they have the same tokens."""
    for position, (expected, token) in enumerate(zip(reference.tokens, got.tokens, strict=False)):
        if expected != token:
            return Mismatch(position, expected, token, reference.margins[position])
    if len(reference.tokens) != len(got.tokens):
        position = min(len(reference.tokens), len(got.tokens))
        expected_token, got_token = (generation.tokens[position] if position < len(generation.tokens) else None
                                     for generation in (reference, got))
        return Mismatch(position, expected_token, got_token, float("inf"))
    return None


@dataclass(frozen=True)
class LoadResult:
    """The answers to a set of requests, the reference answers, and how much the decode server's metrics grew during the
    requests (`grown`).
    """

    answers: list[Answer]
    references: list[Generation]
    grown: dict[str, float]

    @property
    def mismatches(self) -> dict[int, Mismatch]:
        """The first mismatch of each wrong request, by the request's index."""
        found = {}
        for index, (answer, reference) in enumerate(zip(self.answers, self.references, strict=True)):
            mismatch = first_mismatch(reference, answer.generation) if answer.generation else None
            if mismatch:
                found[index] = mismatch
        return found

    @property
    def wrong_tokens(self) -> int:
        """Number of positions, in all answers together, at which the answer's token differs from the reference's, or at
        which only one of the two has a token.
        """
        return sum(left != right for answer, reference in zip(self.answers, self.references, strict=True)
                   if answer.generation
                   for left, right in zip_longest(answer.generation.tokens, reference.tokens))

    @property
    def errors(self) -> dict[int, str]:
        """The error of each failed request, by the request's index."""
        return {index: answer.error for index, answer in enumerate(self.answers) if answer.error is not None}

    @property
    def preemptions(self) -> int:
        return round(self.grown.get("vllm:num_preemptions_total", 0.0))

    @property
    def reports(self) -> list[Report | None]:
        return [Report.of(answer.generation) if answer.generation else None for answer in self.answers]

    @property
    def resumed_loaded_tokens(self) -> int:
        """Number of tokens that kvferry loaded in admissions that followed a preemption."""
        return sum(admission.loaded for report in self.reports if report
                   for admission in report.admissions if admission.resumed)

    def complaints(self) -> list[str]:
        """Returns a line for every request that was answered wrongly, failed, or took longer than SLOW_S, and for every
        admission in which more tokens were loaded than the engine asked for.
        """
        lines = [f"request {index}: {mismatch}" for index, mismatch in self.mismatches.items()]
        lines += [f"request {index}: {error}" for index, error in self.errors.items()]
        lines += [f"request {index}: took {answer.seconds:.1f} s, more than {SLOW_S:.0f} s"
                  for index, answer in enumerate(self.answers) if answer.seconds > SLOW_S]
        for index, report in enumerate(self.reports):
            for admission in report.admissions if report else []:
                if admission.loaded > admission.to_load:
                    lines.append(f"request {index}: loaded {admission.loaded} tokens, more than the "
                                 f"{admission.to_load} that the engine asked for")
        return lines


def parse_metrics(text: str) -> dict[str, float]:
    """Parses metrics in Prometheus' text format. Returns the value of each metric, summed over its labels."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        sample = re.match(r"([A-Za-z_:][\w:]*)(?:\{.*\})? (\S+)", line)
        if sample:
            values[sample[1]] = values.get(sample[1], 0.0) + float(sample[2])
    return values


def growth(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Returns the growth of each metric. A metric that is not in `before` counts from 0."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}
