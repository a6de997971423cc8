"""Reads the log lines in which workers name the path to a peer's pool. This module uses only the standard library."""

import re
from collections.abc import Iterable

_LINE = re.compile(r"kvferry\[\d+\] info transport: measured the paths to peer .*")
_CHOSEN = re.compile(r"uses the fastest: pools by (\w+) [\d.]+ GB/s")


def path_lines(log: str) -> list[str]:
    """Returns the log lines that list the measured paths to a peer, including the paths that failed. Such a line also
    names the path that was chosen, if there is one.
    """
    return _LINE.findall(log)


def chosen_path(line: str) -> str | None:
    """Returns the path that the worker chose for transfers between pools; None if the line names no such path."""
    found = _CHOSEN.search(line)
    return found[1] if found else None


def path_complaints(lines: Iterable[str], wanted: str) -> list[str]:
    """Returns a complaint for each line that names a chosen path other than `wanted`, and one if no line names
    `wanted`.

    A line that names no chosen path is ignored, because a peer may be killed while its paths are measured.
    """
    lines = list(lines)
    complaints = [f"a path other than {wanted}: {line}" for line in lines if chosen_path(line) not in (wanted, None)]
    if wanted not in map(chosen_path, lines):
        complaints.append(f"no log says that a peer's pool is reached by {wanted}")
    return complaints
