"""Tests which failures the proof excuses, when it takes a process for dead, and which errors it finds in a server's
counters.
"""

import asyncio
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvferry_launch.process import ManagedProcess
from kvferry_launch.testbed.client import RequestError
from load import Load, StageError
from proof_deployment import GAUGES, Server, died_of_kill

IDLE = dict.fromkeys(GAUGES, 0.0)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Server]]:
    """Starts processes that sleep in place of vLLM servers, and marks the servers as ready."""
    started = []

    def make(name: str) -> Server:
        process = ManagedProcess(name, ["sleep", "60"], {}, tmp_path / name)
        server = Server(SimpleNamespace(name=name, url="", process=process, start=process.start))  # type: ignore
        started.append(server)
        server.start()
        server.ready = True
        return server

    yield make
    for server in started:
        server.server.process.kill()


@pytest.fixture
def server(start: Callable[[str], Server]) -> Server:
    return start("decode0")


def failure(server: Server, life: int = 1) -> StageError:
    return StageError(server, life, RequestError("status 500"))


def test_a_failure_is_excused_only_by_the_death_of_its_own_server(start: Callable[[str], Server]) -> None:
    server, other = start("decode0"), start("prefill0")
    assert server.kill()
    assert failure(server).was_killed
    assert not failure(other).was_killed
    server.start()
    server.ready = True
    assert failure(server, life=1).was_killed
    assert not failure(server, life=2).was_killed


def test_a_server_that_dies_by_itself_excuses_nothing(server: Server) -> None:
    server.server.process.signal(signal.SIGTERM)
    assert server.server.process.wait(10) == -signal.SIGTERM
    assert not failure(server).was_killed
    assert not server.kill(), "it was dead before"


def test_a_stage_names_the_life_in_which_it_began(server: Server) -> None:
    async def generate(*_: Any) -> None:
        server.kill()
        server.start()
        server.ready = True
        raise RequestError("connection reset")

    server.client = SimpleNamespace(generate=generate)  # type: ignore
    with pytest.raises(StageError) as caught:
        asyncio.run(Load._stage(server, [1], 1, {}))
    assert caught.value.was_killed


def test_a_kill_is_seen_only_where_a_process_ran_and_died_of_it(tmp_path: Path) -> None:
    ended = ManagedProcess("ended", ["true"], {}, tmp_path / "ended")
    assert not died_of_kill(ended), "it was never started"
    ended.start()
    assert ended.wait(10) == 0
    assert not died_of_kill(ended), "it had ended"
    running = ManagedProcess("running", ["sleep", "60"], {}, tmp_path / "running")
    running.start()
    assert died_of_kill(running)
    assert subprocess.run(["kill", "-0", str(running.pid)], check=False, capture_output=True).returncode != 0


@pytest.mark.parametrize(("before", "after", "alarms"), [
    ({"kvferry_loads_total": 3.0}, {"kvferry_loads_total": 2.0}, ["kvferry_loads_total shrank from 3 to 2"]),
    ({"vllm:x_bucket": 3.0}, {"vllm:x_bucket": 2.0}, ["vllm:x_bucket shrank from 3 to 2"]),
    ({}, {"kvferry_pool_pinned_chunks": -1.0}, ["kvferry_pool_pinned_chunks is -1"]),
    ({}, {"vllm:x_total": -1.0}, ["vllm:x_total shrank from 0 to -1", "vllm:x_total is -1"]),
    ({"kvferry_loads_total": 3.0}, {"kvferry_loads_total": 3.0}, []),
    ({"kvferry_pool_chunks": 3.0, "vllm:y": 1.0}, {"kvferry_pool_chunks": 0.0, "vllm:y": -1.0}, []),
])
def test_counters_only_grow_and_nothing_of_ours_is_negative(
        server: Server, before: dict[str, float], after: dict[str, float], alarms: list[str]) -> None:
    server.check_counters(before)
    server.check_counters(after)
    assert server.alarms == [f"decode0: {alarm}" for alarm in alarms]


def test_counters_begin_anew_with_a_life_and_are_summed_over_all(server: Server) -> None:
    server.check_counters({"kvferry_loads_total": 3.0})
    server.kill()
    server.start()
    server.check_counters({"kvferry_loads_total": 1.0})
    assert server.alarms == []
    assert server.counters() == {"kvferry_loads_total": 4.0}


@pytest.mark.parametrize(("metrics", "left"), [
    (IDLE, {}),
    (IDLE | {"kvferry_pool_pinned_chunks": 2.0}, {"kvferry_pool_pinned_chunks": 2.0}),
    (IDLE | {"vllm:num_requests_waiting": 1.0}, {"vllm:num_requests_waiting": 1.0}),
    (dict(list(IDLE.items())[1:]), None),
])
def test_what_is_left_over_is_told_and_a_missing_gauge_is_an_error(
        server: Server, metrics: dict[str, float], left: dict[str, float] | None) -> None:
    async def generate(*_: Any) -> None:
        pass

    async def found() -> dict[str, float]:
        return metrics

    server.client = SimpleNamespace(generate=generate, metrics=found)  # type: ignore
    if left is None:
        with pytest.raises(RequestError, match=GAUGES[0]):
            asyncio.run(server.left_over())
    else:
        assert asyncio.run(server.left_over()) == left


def test_a_log_is_read_for_alarms_and_paths(server: Server) -> None:
    path = "kvferry[7] info transport: measured the paths to peer 1, uses the fastest: pools by tcp 1.6 GB/s"
    server.server.process.kill()
    server.server.process.log.write_text(f"fine\nkvferry: failed check: exact-load\n2026 {path}\n")
    server.read_log()
    assert server.alarms == ["decode0 says: kvferry: failed check: exact-load"]
    assert server.paths == [f"decode0 says: {path}"]
