"""The documents: links lead somewhere, commands exist with the options shown, and the front page is one page."""

import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

REPO = Path(__file__).resolve().parents[1]
SKIPPED_FOLDERS = {"build", ".git", ".venv", "node_modules"}
FRONT_PAGE_LINES_MAX = 120
COLUMNS_MAX = 120
BINARY = REPO / os.environ.get("KVFERRY_BUILD", "build/release") / "bin" / "kvferry"
# Programs of others, whose options are theirs.
FOREIGN = {"vllm", "vllm-router", "pip", "cmake", "python", ".venv/bin/python", "ctest", "clang-format", "pre-commit",
           "git", "build/move_blocks/move_blocks"}


def documents() -> list[Path]:
    tracked = subprocess.run(["git", "ls-files", "*.md"], cwd=REPO, capture_output=True, text=True, check=False)
    names = tracked.stdout.split() or [str(path.relative_to(REPO)) for path in REPO.rglob("*.md")]
    return [REPO / name for name in names if not SKIPPED_FOLDERS & set(Path(name).parts)]


def prose(text: str) -> Iterator[str]:
    """The lines outside fences."""
    inside = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside:
            yield line


def anchors(path: Path) -> set[str]:
    """The names that GitHub gives to headings."""
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
def test_lines_are_short(path: Path) -> None:
    """Rows of tables can't be wrapped."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        assert len(line) <= COLUMNS_MAX or line.lstrip().startswith("|"), f"line {number} has {len(line)} columns"


def test_the_front_page_is_one_page() -> None:
    assert len((REPO / "README.md").read_text().splitlines()) <= FRONT_PAGE_LINES_MAX


def commands(text: str) -> Iterator[str]:
    """The commands of `sh` fences, and those in backquotes that begin with a program of kvferry."""
    for block in re.findall(r"^\s*```sh\n(.*?)^\s*```", text, re.MULTILINE | re.DOTALL):
        command = ""
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            command += re.split(r"(?:^| )#", line)[0]
            if command.count("'") % 2 == 0:  # else a quoted text goes on in the next line
                yield command
                command = ""
    yield from re.findall(r"`((?:kvferry (?!controller client)|build/release/bin/|launch/|tests/)[^`]* [^`]*)`",
                          "\n".join(prose(text)).replace("\n", " "))


@functools.cache
def help_of(*command: str) -> str:
    done = subprocess.run([*command, "--help"], cwd=REPO, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, f"{' '.join(command)} --help: {done.stderr or done.stdout}"
    return done.stdout


def own_command(words: list[str]) -> list[str] | None:
    """The command whose --help lists the options, or None if the program is not kvferry's."""
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


def check_command(document: str, line: str) -> bool:
    """Returns whether the program is kvferry's; fails if it has not the options shown."""
    words = [word.strip("[]()") for word in shlex.split(line.replace("|", " "), posix=False)]
    command = own_command(words)
    if command is None:
        return False
    own = words[:words.index("--")] if "--" in words else words
    options = [word.split("=")[0] for word in own if word.startswith("--") and word != "--help"]
    if not options and len(command) == 1:
        return True  # the program exists, which own_command() has checked
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
            elif not line.lstrip().startswith("|---"):
                found[-1].rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
        before = line if line.lstrip().startswith("|") else ""
    return found


def is_of_results(table: Table) -> bool:
    """True if half of the rows have a cell beside the first that begins with a number: no table of settings does."""
    return 2 * sum(any(re.match(r"\**\d", cell) for cell in row[1:]) for row in table.rows) >= len(table.rows)


FIGURES_PAGE = REPO / "launch/docs/figures.md"
FIGURES = [row for table in tables(FIGURES_PAGE.read_text()) for row in table.rows]
# What is measured in these units is a figure, and no setting: those are in ms, s and bytes.
MEASURED = re.compile(r"(?<!every )(?<![\w.,])(\d[\d.,]*(?: ?[kM])? ?(?:us|GB/s|/s|MiB/s|GiB/s)|\d[\d.,]* ?[kM]/s)\b")


@pytest.mark.parametrize(("document", "figure", "command", "measured"), FIGURES)
def test_figures_stand_in_their_documents_and_have_a_command(document: str, figure: str, command: str,
                                                             measured: str) -> None:
    assert figure in " ".join((REPO / document).read_text().split()), f"{document} has no '{figure}'"
    assert check_command("figures.md", command.strip("`")), f"{command} is not a command of kvferry"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", measured), f"{measured} is not a day"


@pytest.mark.parametrize("path", [path for path in documents() if path != FIGURES_PAGE],
                         ids=lambda path: str(path.relative_to(REPO)))
def test_every_result_is_on_the_page_of_figures(path: Path) -> None:
    """Of tables: one row for the head, or one for each row. Of sentences: what is in a unit that no setting has."""
    quoted = [figure for document, figure, *_ in FIGURES if document == str(path.relative_to(REPO))]

    def has_quoted(text: str) -> bool:
        return any(figure in text for figure in quoted)

    for table in filter(is_of_results, tables(path.read_text())):
        assert has_quoted(table.head) or all(has_quoted(" | ".join(row)) for row in table.rows), (
            f"the table '{table.head}' has no row in {FIGURES_PAGE.name}")
    lines = [line.strip() for line in prose(path.read_text()) if not line.lstrip().startswith("|")]
    for found in MEASURED.finditer(" ".join(lines)):
        assert any(found[0] in figure for figure in quoted), f"'{found[0]}' has no row in {FIGURES_PAGE.name}"
