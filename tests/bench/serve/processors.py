"""Reads from /proc how many processor seconds processes and their threads have used."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def seconds_of(stat: str) -> float:
    """Returns the user and system time of a process or thread. `stat`: content of its /proc/.../stat; the name in it
    may contain spaces.
    """
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _members(leader: int) -> Iterator[tuple[Path, str, str]]:
    """Yields the processes and threads in a server's session as (folder in /proc, stat, part of the server)."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
        except OSError:
            continue  # the process has ended meanwhile
        _, parent, _, session, *_ = stat.rpartition(")")[2].split()
        if int(session) == leader:
            part = "api" if int(folder.name) == leader else "engine" if int(parent) == leader else "model"
            yield folder, stat, part


def of_program(leader: int) -> float:
    """Returns the seconds of all processes in the session that `leader` began."""
    return sum(seconds_of(stat) for _, stat, _ in _members(leader))


def of_server(leader: int) -> dict[str, float]:
    """Returns a vLLM server's seconds by part: `api` is the first process, `engine` the main thread of the engine
    process, which schedules, `model` the main thread of the worker, which computes, and `helpers` all other threads of
    the engine and the worker.
    """
    found = {"api": 0.0, "engine": 0.0, "model": 0.0, "helpers": 0.0}
    for folder, stat, part in _members(leader):
        main = seconds_of(stat if part == "api" else (folder / "task" / folder.name / "stat").read_text())
        found[part] += main
        found["helpers"] += seconds_of(stat) - main
    return found


def part_from_helpers(leader: int, models_core: int, helpers_core: int) -> None:
    """Binds the server's threads that schedule and compute, the main ones of the engine and of the worker, to one core,
    and all other threads of the server to another core.
    """
    for folder, _, part in _members(leader):
        for task in (folder / "task").iterdir():
            is_main = part in ("engine", "model") and task.name == folder.name
            os.sched_setaffinity(int(task.name), {models_core if is_main else helpers_core})


def bind(leader: int, core: int) -> None:
    """Binds all threads of the session that `leader` began to one core."""
    for folder, _, _ in _members(leader):
        for task in (folder / "task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # the thread has ended meanwhile
                os.sched_setaffinity(int(task.name), {core})
