"""Processor seconds of processes and of their threads, from /proc."""

import os
from collections.abc import Iterator
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def seconds_of(stat: str) -> float:
    """Returns user and system time of a process or thread. `stat`: its /proc/.../stat, whose name may hold spaces."""
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _members(leader: int) -> Iterator[tuple[Path, str]]:
    """The processes of a session, as (folder in /proc, stat)."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
        except OSError:
            continue  # it has ended
        if int(stat.rpartition(")")[2].split()[3]) == leader:
            yield folder, stat


def of_program(leader: int) -> float:
    """Returns the seconds of all processes in the session that `leader` began."""
    return sum(seconds_of(stat) for _, stat in _members(leader))


def of_server(leader: int) -> dict[str, float]:
    """Returns a vLLM server's seconds: `api` of its first process, `model` of its engine's main thread, which computes,
    and `helpers` of the engine's other threads: those of the connector, and the model's own if it has several cores."""
    found = {"api": 0.0, "model": 0.0, "helpers": 0.0}
    for folder, stat in _members(leader):
        if int(folder.name) == leader:
            found["api"] += seconds_of(stat)
        else:
            main = seconds_of((folder / "task" / folder.name / "stat").read_text())
            found["model"] += main
            found["helpers"] += seconds_of(stat) - main
    return found


def part_from_helpers(leader: int, models_core: int, helpers_core: int) -> None:
    """Gives the main thread of a server's engine one core, and all its other threads another."""
    for folder, _ in _members(leader):
        for task in (folder / "task").iterdir():
            computes = int(folder.name) != leader and task.name == folder.name
            os.sched_setaffinity(int(task.name), {models_core if computes else helpers_core})
