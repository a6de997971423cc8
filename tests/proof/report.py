"""Prints the proof's table, for people and, as Markdown, for a README."""

import dataclasses
from typing import Any

from judge import Outcome

COLUMNS = ("configuration", "requests", "right", "given up", "sent again", "kills", "handed over", "preemptions",
           "resumed", "chunks", "in the engine", "loaded", "slowest s", "complaints")


def row(outcome: Outcome) -> tuple[str, ...]:
    loaded = "-" if outcome.recovered is None else f"{outcome.chunks_loaded} of {outcome.chunks_wanted}"
    handed_over = f"{outcome.handed_over} of {outcome.prefilled}" if outcome.prefilled else "-"
    return (outcome.configuration.name, str(outcome.requests), str(outcome.right), str(outcome.aborted),
            str(outcome.resent), str(outcome.kills), handed_over, str(outcome.preemptions), str(outcome.resumed),
            str(outcome.chunks), str(outcome.chunks_local), loaded, f"{outcome.slowest_s:.1f}",
            str(len(outcome.complaints)))


def markdown(outcomes: list[Outcome]) -> str:
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *(row(outcome) for outcome in outcomes)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def table(outcomes: list[Outcome]) -> str:
    lines = [COLUMNS, *(row(outcome) for outcome in outcomes)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.ljust(width) if column == 0 else cell.rjust(width)
                               for column, (cell, width) in enumerate(zip(line, widths, strict=True)))
                     for line in lines)


def as_json(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    entries = []
    for outcome in outcomes:
        entry = dataclasses.asdict(outcome)
        entry["configuration"] = outcome.configuration.name
        entries.append(entry | {"recovered": outcome.recovered})
    return entries


def verdict(outcomes: list[Outcome]) -> str:
    """Returns the verdict in one line. The line says 0 complaints only if there were none."""
    requests, right, aborted = (sum(getattr(outcome, name) for outcome in outcomes)
                                for name in ("requests", "right", "aborted"))
    kept = [outcome for outcome in outcomes if outcome.configuration.recovers]
    gives_up = [outcome for outcome in outcomes if not outcome.configuration.recovers]
    share = ""
    if wanted := sum(outcome.chunks_wanted for outcome in kept):
        loaded = sum(outcome.chunks_loaded for outcome in kept)
        share += (f"of preempted requests' chunks {sum(outcome.chunks_local for outcome in kept)} were in the engine "
                  f"and kvferry loaded {loaded} of the other {wanted} ({loaded / wanted:.1%}), ")
    if wanted := sum(outcome.chunks_wanted for outcome in gives_up):
        share += f"{sum(outcome.chunks_loaded for outcome in gives_up)} of {wanted} where settings give chunks up, "
    return (f"{requests} requests, {right} right, {aborted} given up, "
            f"{sum(outcome.kills for outcome in outcomes)} kills, "
            f"{sum(outcome.preemptions for outcome in outcomes)} preemptions "
            f"({sum(outcome.unbegun for outcome in outcomes)} before the first token), {share}"
            f"{sum(len(outcome.complaints) for outcome in outcomes)} complaints")
