"""The documents: links lead somewhere, commands exist with the options shown, and the front page is one page."""

import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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


@pytest.mark.parametrize(("document", "line"), checked_commands())
def test_commands_exist_with_the_options_shown(document: str, line: str) -> None:
    words = [word.strip("[]()") for word in shlex.split(line.replace("|", " "), posix=False)]
    command = own_command(words)
    if command is None:
        return
    own = words[:words.index("--")] if "--" in words else words
    options = [word.split("=")[0] for word in own if word.startswith("--") and word != "--help"]
    text = help_of(*command)
    for option in options:
        assert re.search(rf"{option}(?![\w-])", text), f"{document}: {' '.join(command)} has no {option}"
