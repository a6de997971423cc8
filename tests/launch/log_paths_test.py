"""Tests that the chosen path is read correctly from a worker's log line, for tests/cluster/run and tests/proof/run."""

import pytest
from kvferry_launch.testbed.log_paths import chosen_path, path_complaints, path_lines

START = "2026-11-24 14:51:56.848 kvferry[17478] info transport: measured the paths to peer 1, uses the fastest: "
SHM = START + "pools by shm 17.7 GB/s, tcp 1.6 GB/s; other memory by cma 8.4 GB/s, tcp 1.3 GB/s"
TCP = START + "pools by tcp 1.6 GB/s, no shm (the peer is on another host); other memory by cma 8.4 GB/s"
FAILED = START + ("pools by no tcp (too slow to measure: less than about 3 MB/s, or no connection in time); "
                  "other memory by tcp 0.1 GB/s")
SETTING = ("2026-11-24 14:51:50.000 kvferry[17478] info rank 0: its pool has 64.0 MiB of shared memory; "
           "transport: path tcp; tcp")


@pytest.mark.parametrize(("line", "path"), [(SHM, "shm"), (TCP, "tcp"), (FAILED, None), (SETTING, None)])
def test_the_chosen_path_is_the_first_that_works_for_pools(line: str, path: str | None) -> None:
    assert chosen_path(line) == path


def test_only_measured_paths_count_and_not_the_setting() -> None:
    lines = path_lines("\n".join([SETTING, TCP, "tcp 3 GB/s"]))
    assert len(lines) == 1
    assert chosen_path(lines[0]) == "tcp"


@pytest.mark.parametrize(("lines", "complaints"), [
    ([TCP], []),
    ([TCP, FAILED], []),
    ([TCP, SHM], ["a path other than tcp"]),
    ([FAILED], ["no log says"]),
    ([], ["no log says"]),
    ([SHM], ["a path other than tcp", "no log says"]),
])
def test_every_peer_must_be_reached_by_the_wanted_path(lines: list[str], complaints: list[str]) -> None:
    found = path_complaints(lines, "tcp")
    assert [line.startswith(start) for line, start in zip(found, complaints, strict=True)] == [True] * len(complaints)
