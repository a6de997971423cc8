"""Tests the documents: links lead to existing places, commands exist and have the options shown, the front page is one
page long.
"""

import functools
import os
import re
import shlex
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from documents import documents, fenced_commands, prose
from kvferry_launch.paths import REPO

FRONT_PAGE_LINES_MAX = 120
COLUMNS_MAX = 120
BINARY = REPO / os.environ.get("KVFERRY_BUILD", "build/release") / "bin" / "kvferry"
# Programs of other projects, whose options are not checked.
FOREIGN = {"vllm", "vllm-router", "pip", "cmake", "python", ".venv/bin/python", "ctest", "clang-format", "pre-commit",
           "git", "build/move_blocks/move_blocks", "curl", "export"}


def anchors(path: Path) -> set[str]:
    """Returns the anchors that GitHub makes from the headings of a document."""
    headings = [line.lstrip("#").strip() for line in prose(path.read_text()) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(REPO)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", "\n".join(prose(path.read_text()))):
        if target.startswith(("http:", "https:")):
            continue
        name, _, anchor = target.partition("#")
        found = (path.parent / name).resolve() if name else path
        assert found.exists(), f"{target}: no such file"
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found), f"{target}: no such heading"


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(REPO)))
def test_paths_lead_somewhere(path: Path) -> None:
    """Checks the paths in backquotes that begin with a room's name. NAME, X and * are placeholders. A path may omit its
    suffix.
    """
    for name in re.findall(r"`((?:transport|kernels|controller|connector|launch|tests)/[\w./*]+)", path.read_text()):
        known = re.split(r"NAME|\bX\b|\*", name)[0]
        assert any((folder / known).exists() or list(folder.glob(f"{known.rstrip('/')}*"))
                   for folder in (REPO, path.parent)), f"{name}: no such path"


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(REPO)))
def test_lines_are_short(path: Path) -> None:
    """Only rows of tables may be long, because they can't be wrapped."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        assert len(line) <= COLUMNS_MAX or line.lstrip().startswith("|"), f"line {number} has {len(line)} columns"


def test_the_front_page_is_one_page() -> None:
    assert len((REPO / "README.md").read_text().splitlines()) <= FRONT_PAGE_LINES_MAX


def commands(text: str) -> Iterator[str]:
    """Yields the commands in `sh` fences, and the commands in backquotes that begin with a program of kvferry."""
    yield from fenced_commands(text)
    yield from re.findall(r"`((?:kvferry (?!controller client)|build/release/bin/|launch/|tests/)[^`]* [^`]*)`",
                          "\n".join(prose(text)).replace("\n", " "))


@functools.cache
def help_of(*command: str) -> str:
    done = subprocess.run([*command, "--help"], cwd=REPO, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, f"{' '.join(command)} --help: {done.stderr or done.stdout}"
    return done.stdout


def own_command(words: list[str]) -> list[str] | None:
    """Returns the command whose --help lists the options, or None if the program does not belong to kvferry."""
    program = words[0]
    if program in FOREIGN or re.match(r"\w+=", program):
        return None
    if Path(program).name == "kvferry":
        subcommands = []
        for word in words[1:3]:
            if not re.fullmatch(r"[a-z]+", word) or (subcommands and subcommands[0] != "bench"):
                break
            subcommands.append(word)
        return [str(BINARY), *subcommands]
    assert (REPO / program).exists(), f"{program}: no such program"
    if program == "launch/cluster" and len(words) > 1:
        return [program, words[1]]
    return [sys.executable, program] if program.endswith(".py") else [program]


def checked_commands() -> list[tuple[str, str]]:
    found = []
    for path in documents():
        for line in commands(path.read_text()):
            if line.strip():
                found.append((str(path.relative_to(REPO)), line.strip()))
    return sorted(set(found))


def is_not_built(program: str) -> bool:
    """Returns whether the program is one of those that tests/run --quick does not build."""
    if not program.startswith("build/release/bin/") or (REPO / program).exists():
        return False
    lists = "".join(path.read_text() for path in (REPO / "tests").rglob("CMakeLists.txt"))
    return f"add_executable({Path(program).name} " in lists


def check_command(document: str, line: str) -> bool:
    """Returns whether the program belongs to kvferry. Fails if the program does not have the options shown."""
    words = [word.strip("[]()") for word in shlex.split(line.replace("|", " "), posix=False)]
    if is_not_built(words[0]):
        return True
    command = own_command(words)
    if command is None:
        return False
    own = words[:words.index("--")] if "--" in words else words
    options = [word.split("=")[0] for word in own if word.startswith("--") and word != "--help"]
    if not options and len(command) == 1:
        return True  # own_command() has checked that the program exists
    text = help_of(*command)
    for option in options:
        assert re.search(rf"{option}(?![\w-])", text), f"{document}: {' '.join(command)} has no {option}"
    return True


@pytest.mark.parametrize(("document", "line"), checked_commands())
def test_commands_exist_with_the_options_shown(document: str, line: str) -> None:
    check_command(document, line)


class Table(NamedTuple):
    head: str
    rows: list[list[str]]


def tables(text: str) -> list[Table]:
    found: list[Table] = []
    before = ""
    for line in [*prose(text), ""]:
        if line.lstrip().startswith("|"):
            if not before:
                found.append(Table(line, []))
            elif not re.match(r"\s*\| *---", line):
                found[-1].rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
        before = line if line.lstrip().startswith("|") else ""
    return found


def is_of_results(table: Table) -> bool:
    """Returns True if at least half of the rows have a cell after the first that begins with a number. Tables of
    settings do not.
    """
    return 2 * sum(any(re.match(r"\**\d", cell) for cell in row[1:]) for row in table.rows) >= len(table.rows)


FIGURES_PAGE = REPO / "launch/docs/figures.md"
FIGURES = [row for table in tables(FIGURES_PAGE.read_text()) for row in table.rows]
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
# Matches a number with a unit in a sentence. It is a measured figure unless LIMITS has it. "128 keys" and "every 50 ms"
# do not match.
MEASURED = re.compile(
    r"(?<!every )(?<![\w.,-])\d[\d.,]*(?: to \d[\d.,]*)? ?(?:[kM]?/s|GB/s|[MG]iB/s|%|us|ms|s|GB|seconds|minutes|hours"
    r"|requests|schedules|messages|mutants|kills|preemptions|attacks|transfers|nodes)(?![\w/])")
# Numbers that are no measured figures but settings of a program or a test: deadlines, rates, sizes. Keyed by document,
# in the form in which MEASURED finds them.
LIMITS = {
    "CHANGELOG.md": ["5 s", "10 s", "2 ms", "20 ms", "5 to 60 s", "15 minutes", "2 s", "75 s", "200 ms"],
    "connector/DESIGN.md": ["30 s", "200 ms"],
    "controller/DESIGN.md": ["2 ms", "20 ms", "50 ms", "100 ms", "200 ms", "2 s", "2.5 s", "5 s", "10 s", "15 s",
                             "51 s", "32 messages", "64 messages", "1024 messages", "4096 nodes"],
    "controller/PROTOCOL.md": ["1.5 s"],
    "launch/DESIGN.md": ["5 s", "10 s", "30 s"],
    "launch/docs/benchmarks.md": ["256 requests", "2500 nodes", "3000 nodes", "1000 nodes", "3900 nodes",
                                  "32 messages", "8 s"],
    "launch/docs/deployment.md": ["1 s", "2.5 s", "4 s", "5 s", "10 s", "30 s", "75 s", "10 minutes",
                                  # calculated from links' rates
                                  "400 GB/s", "3 ms", "0.7 ms", "0.4 ms", "22 ms", "5.4 ms", "2.7 ms", "86 ms",
                                  "11 ms"],
    "launch/docs/http-api.md": ["200 ms", "2 s", "3 s", "10 s"],
    "launch/docs/operations.md": ["4,096 requests"],
    "tests/PROOF.md": ["20 s", "15 %", "95 %"],
    "tests/README.md": ["1 ms", "2.5 s", "4 s", "5 s", "20 s", "24 requests", "18,000 schedules", "20,000 transfers",
                        "1000000 transfers", "10 ms",
                        # calculated from links' rates
                        "3 ms", "0.4 ms", "22 ms", "2.7 ms", "0.6 ms", "0.1 ms"],
    "tests/cluster/README.md": ["60 s"],
    "tests/mutants/README.md": ["400 schedules", "20,000 schedules"],
    "tests/sim/README.md": ["30,000 schedules"],
    "transport/DESIGN.md": ["8 messages", "200 us"],
}


def quoted_rows(document: str, figure: str) -> list[list[str]]:
    """Returns the rows of the table whose head has the figure, or else the rows that have it. Returns none if the
    figure is in a sentence.
    """
    found = tables((REPO / document).read_text())
    for table in found:
        if figure in table.head:
            return table.rows
    return [row for table in found for row in table.rows if figure in " | ".join(row)]


def numbers_of(rows: list[list[str]]) -> str:
    """Returns a checksum of all numbers in the rows, so that a changed number is noticed; empty if there are no rows.
    """
    numbers = " ".join(NUMBER.findall(" | ".join(cell for row in rows for cell in row)))
    return f"{zlib.crc32(numbers.encode()):08x}" if rows else ""


@pytest.mark.parametrize(("document", "figure", "command", "measured", "numbers"), FIGURES)
def test_figures_stand_in_their_documents_and_have_a_command(document: str, figure: str, command: str, measured: str,
                                                             numbers: str) -> None:
    assert figure in " ".join((REPO / document).read_text().split()), f"{document} has no '{figure}'"
    assert check_command("figures.md", command.strip("`")), f"{command} is not a command of kvferry"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", measured), f"{measured} is not a day"
    now = numbers_of(quoted_rows(document, figure))
    assert numbers == now, (f"the table's numbers are others than those of {measured}; if the command printed them, "
                            f"write its day and {now}")


@pytest.mark.parametrize("path", [path for path in documents() if path != FIGURES_PAGE],
                         ids=lambda path: str(path.relative_to(REPO)))
def test_every_result_is_on_the_page_of_figures(path: Path) -> None:
    """The page of figures needs one row for a table's head or one for each row of the table, and one for each number
    with a unit in a sentence, except for limits.
    """
    document = str(path.relative_to(REPO))
    quoted = [figure for other, figure, *_ in FIGURES if other == document]

    def has_quoted(text: str) -> bool:
        return any(figure in text for figure in quoted)

    for table in filter(is_of_results, tables(path.read_text())):
        assert has_quoted(table.head) or all(has_quoted(" | ".join(row)) for row in table.rows), (
            f"the table '{table.head}' has no row in {FIGURES_PAGE.name}")
    lines = [line.strip() for line in prose(path.read_text()) if not line.lstrip().startswith("|")]
    found = [match[0] for match in MEASURED.finditer(" ".join(lines))]
    for text in found:
        assert text in LIMITS.get(document, ()) or any(text in figure for figure in quoted), (
            f"'{text}' has no row in {FIGURES_PAGE.name}; if it is no measurement, it belongs into LIMITS")
    unused = set(LIMITS.get(document, ())) - set(found)
    assert not unused, f"{document} does not say {unused} any more"


def values(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]


def is_rounded(shown: str, exact: list[float]) -> bool:
    """Returns whether the number is one of `exact`, rounded to the digits that are shown, in units or in thousands."""
    value, step = float(shown.replace(",", "")), 10.0 ** -len(shown.partition(".")[2])
    return any(abs(value - one * unit) <= step / 2 * 1.001 for one in exact for unit in (1e-6, 1e-3, 1, 1e3))


def test_the_front_page_has_the_figures_of_the_pages_behind_it() -> None:
    """Each number in a table of the front page must be in a table of the same command on another page. The line about
    the proof must have the sums of the proof's table.
    """
    table = next(found for found in tables((REPO / "README.md").read_text()) if "| measured |" in found.head)
    for row in table.rows:
        command = next(command for document, figure, command, *_ in FIGURES
                       if document == "README.md" and figure in " | ".join(row))
        behind = [cell for document, figure, other, *_ in FIGURES if other == command and document != "README.md"
                  for cells in quoted_rows(document, figure) for cell in cells]
        for shown in NUMBER.findall(" | ".join(row[1:])):
            assert is_rounded(shown, values(" | ".join(behind))), f"{shown} of '{row[0]}' is not among: {command}"

    proof = next(found for found in tables((REPO / "tests/PROOF.md").read_text()) if "| loaded |" in found.head)
    columns = proof.head.strip("| ").split(" | ")
    sums = {name: sum(int(row[column]) for row in proof.rows) for column, name in enumerate(columns)
            if name in ("requests", "right", "given up", "kills", "preemptions")}
    front = " ".join((REPO / "README.md").read_text().split())
    for name, number in sums.items():
        assert f"{number} {name}" in front, f"the proof's {name} are {number}"
    gives_chunks_up = ("no decode cache, no tails", "a pool that is always full")
    for words, is_meant in (("{} of the other {}", lambda row: row[0] not in gives_chunks_up),
                            ("{} of {} where settings give chunks up", lambda row: row[0] in gives_chunks_up)):
        loaded = [row[columns.index("loaded")].split(" of ") for row in proof.rows if is_meant(row)]
        text = words.format(*(sum(int(pair[side]) for pair in loaded) for side in (0, 1)))
        assert text in front, f"the proof's loaded chunks are {text}"
