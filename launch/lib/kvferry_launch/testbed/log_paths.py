"""What workers log about the path to a peer's pool. Standard library only."""

import re
from collections.abc import Iterable

_LINE = re.compile(r"kvferry\[\d+\] info transport: measured the paths to peer .*")
_CHOSEN = re.compile(r"uses the fastest: pools by (\w+) [\d.]+ GB/s")


def path_lines(log: str) -> list[str]:
    """Returns the lines that name the path to a peer. They list everything that was measured, failures too."""
    return _LINE.findall(log)


def chosen_path(line: str) -> str | None:
    """Returns the path that carries what is in pools, the first that the line names; None if all of them failed."""
    found = _CHOSEN.search(line)
    return found[1] if found else None


def path_complaints(lines: Iterable[str], wanted: str) -> list[str]:
    """Returns a complaint for each line that chose another path, and one if none chose this. A peer that is killed
    while it is measured has no path."""
    lines = list(lines)
    complaints = [f"a path other than {wanted}: {line}" for line in lines if chosen_path(line) not in (wanted, None)]
    if wanted not in map(chosen_path, lines):
        complaints.append(f"no log says that a peer's pool is reached by {wanted}")
    return complaints
