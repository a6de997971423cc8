"""Tests loads that end some steps after the step that began them, as on a GPU, with vLLM's own scheduler."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from kvferry_harness.prompts import prompt
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from kvferry_harness.engine import Engine

MakeEngine = Callable[..., "Engine"]
BOTH = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
LATE = 3


def loading(make_engine: MakeEngine, async_scheduling: bool, **setup: object) -> "Engine":
    """Returns an engine in which request "b" waits for the load of a prompt of four chunks."""
    engine = make_engine(async_scheduling=async_scheduling, executes_late=async_scheduling, late_loads=LATE, **setup)
    engine.add("first", prompt(1, 256), 1)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    engine.add("b", prompt(1, 256), 12)
    while "b" not in [load["request"] for step in engine.log.of("step") for load in step["plan"]["loads"]]:
        engine.step()
    assert engine.request("b").status == RequestStatus.WAITING_FOR_REMOTE_KVS
    return engine


def num_steps(engine: "Engine") -> int:
    return len(engine.log.of("step"))


@BOTH
def test_the_request_waits_and_others_run(make_engine: MakeEngine, async_scheduling: bool) -> None:
    engine = loading(make_engine, async_scheduling)
    engine.add("other", prompt(2, 100), 20)
    began = num_steps(engine)
    while engine.request("b").status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        engine.step()
    assert num_steps(engine) - began >= LATE
    assert engine.told["other"].tokens
    engine.check_done()
    assert engine.metrics()["loaded_tokens_total"] == 255


@BOTH
def test_a_damaged_chunk_is_never_attended_to(make_engine: MakeEngine, async_scheduling: bool) -> None:
    engine = loading(make_engine, async_scheduling)
    engine.corrupt_chunk(2)
    engine.run()
    assert [call["failed"] for call in engine.log.of("vllm_output") if call["failed"]] == [["b"]]
    assert engine.log.of("lookup", "b")[-1]["answer"] == 128
    engine.check_done()


@BOTH
@pytest.mark.parametrize("while_executing", [False, True], ids=["between-steps", "while-executing"])
@pytest.mark.parametrize("moment", range(LATE + 3))
def test_an_aborted_request_keeps_its_blocks_until_the_load_ends(
        make_engine: MakeEngine, async_scheduling: bool, while_executing: bool, moment: int) -> None:
    engine = loading(make_engine, async_scheduling)
    for _ in range(moment):
        engine.step()
    engine.abort("b", while_executing=while_executing)
    assert engine.scheduler.has_requests(), "the engine would not run the step that reports the load"
    engine.check_done()
    engine.add("after", prompt(1, 256), 12)
    engine.check_done()
    assert engine.log.of("lookup", "after")[-1]["answer"] is not None


@BOTH
def test_a_reset_is_refused_while_a_load_uses_blocks(make_engine: MakeEngine, async_scheduling: bool) -> None:
    engine = loading(make_engine, async_scheduling)
    with pytest.raises(RuntimeError):
        engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.check_done()
    assert engine.metrics()["pool_pinned_chunks"] == 0


@BOTH
def test_preempted_requests_load_late_too(make_engine: MakeEngine, async_scheduling: bool) -> None:
    engine = make_engine(num_blocks=16, token_budget=96, async_scheduling=async_scheduling,
                         executes_late=async_scheduling, late_loads=LATE)
    for index in range(1, 7):
        engine.add(f"r{index}", prompt(index, 60 + 40 * (index % 3)), 60)
    engine.run(5000)
    engine.check_done()
    assert engine.metrics()["resumed_hit_tokens_total"] > 0
