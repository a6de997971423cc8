"""Reads the documents of the checkout: their prose, and the commands that they show."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from kvferry_launch.paths import REPO

SKIPPED_FOLDERS = {"build", ".git", ".venv", "node_modules"}


def documents() -> list[Path]:
    tracked = subprocess.run(["git", "ls-files", "*.md"], cwd=REPO, capture_output=True, text=True, check=False)
    names = tracked.stdout.split() or [str(path.relative_to(REPO)) for path in REPO.rglob("*.md")]
    return [REPO / name for name in names if not SKIPPED_FOLDERS & set(Path(name).parts)]


def prose(text: str) -> Iterator[str]:
    """Yields the lines outside of code fences."""
    inside = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside:
            yield line


def fenced_commands(text: str) -> Iterator[str]:
    """Yields the commands in `sh` fences, without comments. A command that continues on the next line is returned as
    one.
    """
    for block in re.findall(r"^\s*```sh\n(.*?)^\s*```", text, re.MULTILINE | re.DOTALL):
        command = ""
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            command += re.split(r"(?:^| )#", line)[0]
            # an odd number of quotes means that a quoted text continues on the next line
            if command.count("'") % 2 == 0:
                if command.strip():
                    yield command.strip()
                command = ""
