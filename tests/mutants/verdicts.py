"""Decides from the output of a test or of the simulator what it says about a mutant. This module runs nothing."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

PROMISES = ("idempotent-lookup", "exact-load", "no-stale-spec", "saved-is-computed", "fenced-reuse", "exactly-once",
            "bounded-hold", "sane-counts", "verified-only", "no-engine-death", "fair-eviction", "purged-is-gone")
NAME = "|".join(PROMISES)


class Outcome(Enum):
    """What a mutant's runs showed. If several outcomes apply, the first in this list counts."""

    CAUGHT = "caught by its own promise"
    UNUSABLE = "can't be judged"
    HANGS = "hangs"
    CRASHES = "crashes"
    ANOTHER = "caught by another promise"
    NAMELESS = "fails without naming a promise"
    SURVIVES = "survives"


@dataclass(frozen=True)
class Ended:
    """The result of a command. A status of None means that the command exceeded its time limit."""

    status: int | None
    output: str


@dataclass(frozen=True)
class Evidence:
    outcome: Outcome
    told: str = ""


def by_promise(named: str, promise: str, told: str) -> Evidence:
    """Returns the evidence of a failure. `named`: the promise that the failure names, or empty."""
    if not named:
        return Evidence(Outcome.NAMELESS, told)
    return Evidence(Outcome.CAUGHT if named == promise else Outcome.ANOTHER, f"{named}: {told}")


def of_its_end(ended: Ended, where: str) -> Evidence | None:
    """Returns the evidence of a hang, or of a signal that ended the command without a message about a promise. Returns
    None if the command ended by itself.
    """
    if ended.status is None:
        return Evidence(Outcome.HANGS, f"{where} runs into its time limit")
    if ended.status < 0:
        return Evidence(Outcome.CRASHES, f"{where} is ended by signal {-ended.status}")
    return None


def of_simulator(ended: Ended, promise: str) -> Evidence:
    """Reads the simulator's output, which names the promise that was broken.

    Under no-engine-death the simulator also reports its own hangs and crashes. Any break can cause them, so they count
    as hangs and crashes.
    """
    if ended.status == 0:
        return Evidence(Outcome.SURVIVES)
    failure = re.search(rf"^broken promise: ({NAME})\n  seed (\d+): (.*)", ended.output, re.MULTILINE)
    if failure is None:
        return of_its_end(ended, "the simulator") or by_promise("", promise, last_line(ended.output))
    named, seed, message = failure.groups()
    told = f"seed {seed}: {shortened(message, named)}"
    if message.startswith("ended by signal"):
        return Evidence(Outcome.CRASHES, told)
    if message.startswith("hangs for"):
        return Evidence(Outcome.HANGS, told)
    return by_promise(named, promise, told)


def of_tests(ended: Ended, promise: str, named_test: str = "") -> Evidence:
    """Reads GoogleTest's brief output.

    A failure names a promise by the message of a check or by EXPECT_BREAKS. An exception without such a message would
    end the engine. A failed assertion in `named_test` counts for the mutant's promise.
    """
    if ended.status == 0:
        return Evidence(Outcome.SURVIVES)
    seen = []
    for text, test in re.findall(r"(?ms)(.*?)^\[  FAILED  \] ([^\s,]+)[^\n]* \(\d+ ms\)$", ended.output):
        for part in re.split(r"^(?=.+: Failure$)", text, flags=re.MULTILINE)[1:]:
            named = named_in(part) or (promise if test == named_test else "")
            seen.append(by_promise(named, promise, f"{test}: {shortened(what_failed(part), named)}"))
    crash = of_its_end(ended, "a test")
    if crash is not None:
        end = last_line(ended.output)  # the last line is what a check prints before it aborts
        named = named_in(end) if crash.outcome is Outcome.CRASHES else ""
        seen.append(by_promise(named, promise, shortened(end, named)) if named else crash)
    return worst(seen) if seen else by_promise("", promise, last_line(ended.output))


def named_in(text: str) -> str:
    """Returns the promise that the text of a failure names. For an exception that names none, this is no-engine-death.
    """
    thrown = re.search(r"^C\+\+ exception with description \"(.*)", text, re.MULTILINE)
    if thrown is not None:
        found = re.match(rf"(?:kvferry: failed check: )?({NAME}):", thrown[1])
        return found[1] if found else "no-engine-death"
    found = re.search(rf"kvferry: failed check: ({NAME}):|breaks no promise, expected ({NAME})\b", text)
    return (found[1] or found[2]) if found else ""


def what_failed(failure: str) -> str:
    lines = [line.strip() for line in failure.splitlines()[1:]]
    return " ".join(line for line in lines if line and not line.startswith("["))


def shortened(message: str, named: str) -> str:
    message = message.removeprefix('C++ exception with description "')
    message = message.removeprefix("kvferry: failed check: ")
    return message.removeprefix(f"{named}: ")


def last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1] if lines else "no output"


def worst(seen: Sequence[Evidence]) -> Evidence:
    """Returns the evidence that decides: that for the mutant's own promise, otherwise the worst one."""
    order = list(Outcome)
    return min(seen, key=lambda evidence: order.index(evidence.outcome))


def summary(outcomes: Sequence[Outcome], seconds: float) -> str:
    """Returns the last line of a run's output."""
    took = f"in {seconds / 60:.1f} min" if seconds >= 60 else f"in {seconds:.0f} s"
    caught = sum(outcome is Outcome.CAUGHT for outcome in outcomes)
    if caught == len(outcomes):
        return f"{len(outcomes)} mutants, all caught by their own promise, {took}"
    others = [f"{outcomes.count(outcome)} {outcome.value}" for outcome in Outcome
              if outcome is not Outcome.CAUGHT and outcome in outcomes]
    return f"{len(outcomes)} mutants, {caught} caught by their own promise, {', '.join(others)}, {took}"
