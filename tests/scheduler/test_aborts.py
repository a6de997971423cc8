"""Tests aborts at every moment: nothing stays held, nothing arrives late, and other requests are not affected."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from kvferry_harness.prompts import prompt
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from kvferry_harness.engine import Engine

MakeEngine = Callable[..., "Engine"]
BOTH = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])


def pressed(make_engine: MakeEngine, async_scheduling: bool) -> "Engine":
    """Starts six requests with too few blocks for all of them. One of the requests loads from the pool."""
    engine = make_engine(num_blocks=16, token_budget=96, async_scheduling=async_scheduling,
                         executes_late=async_scheduling)
    engine.add("first", prompt(1, 200), 1)
    engine.run()
    engine.scheduler.reset_prefix_cache()
    for index in range(1, 7):
        engine.add(f"r{index}", prompt(index, 60 + 40 * (index % 3)) if index > 1 else prompt(1, 200), 60)
    return engine


@BOTH
@pytest.mark.parametrize("while_executing", [False, True], ids=["between-steps", "while-executing"])
@pytest.mark.parametrize("moment", [*range(12), 20, 30, 45, 60, 90])
def test_aborts_after_so_many_steps(
        make_engine: MakeEngine, async_scheduling: bool, while_executing: bool, moment: int) -> None:
    """At the different moments, requests are waiting, prefilling, loading, decoding or preempted."""
    engine = pressed(make_engine, async_scheduling)
    for _ in range(moment):
        engine.step()
    living = [request_id for request_id in engine.scheduler.requests if request_id != "first"]
    engine.abort(*living[::2], while_executing=while_executing)
    engine.run()
    engine.add("after", prompt(1, 200), 10)
    engine.check_done()


@BOTH
@pytest.mark.parametrize("state", ["PREEMPTED", "RUNNING", "WAITING"])
def test_aborts_in_every_state(make_engine: MakeEngine, async_scheduling: bool, state: str) -> None:
    engine = pressed(make_engine, async_scheduling)
    for _ in range(400):
        found = [request_id for request_id, request in engine.scheduler.requests.items()
                 if request.status.name == state]
        if found:
            break
        engine.step()
    assert found, f"nobody is ever {state}"
    engine.abort(found[-1])
    assert engine.log.of("vllm_finished", found[-1])[0]["holds"] is False
    engine.check_done()


@BOTH
def test_aborts_while_a_look_up_waits_for_other_nodes(make_engine: MakeEngine, async_scheduling: bool) -> None:
    nowhere = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 9, "remote_engine_id": "gone",
               "remote_request_id": "x", "remote_num_tokens": 100}
    engine = make_engine(async_scheduling=async_scheduling, patience_s=0)
    engine.add("waits", prompt(1, 100), 5, params=nowhere)
    engine.add("runs", prompt(2, 100), 5)
    while not engine.told["runs"].tokens:
        engine.step()
    assert engine.log.of("lookup", "waits")[-1]["answer"] is None
    assert engine.request("waits").status == RequestStatus.WAITING
    engine.abort("waits")
    engine.check_done()


def test_twice_after_the_end_and_of_nobody(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add("a", prompt(1, 100), 5)
    engine.step()
    engine.abort("a")
    engine.abort("a")
    engine.add("b", prompt(1, 100), 1)
    engine.run()
    engine.abort("b")
    engine.scheduler.finish_requests(["nobody"], RequestStatus.FINISHED_ABORTED)
    assert len(engine.log.of("vllm_finished", "a")) == 1
    assert len(engine.log.of("vllm_finished", "b")) == 1
    engine.check_done()


@BOTH
def test_before_the_first_step(make_engine: MakeEngine, async_scheduling: bool) -> None:
    engine = make_engine(async_scheduling=async_scheduling)
    engine.add("a", prompt(1, 100), 5)
    engine.abort("a")
    engine.check_done()
    assert [call["call"] for call in engine.log.calls if call.get("request") == "a"] == [
        "add", "vllm_finished", "finished"]


@BOTH
def test_an_id_that_comes_again_at_once(make_engine: MakeEngine, async_scheduling: bool) -> None:
    engine = make_engine(async_scheduling=async_scheduling, prefix_caching=False)
    engine.add("first", prompt(1, 150), 1)
    engine.run()
    for moment in range(6):
        engine.add("again", prompt(1, 150) + prompt(moment, 30), 20)
        for _ in range(moment):
            engine.step()
        engine.abort("again")
        if async_scheduling:  # otherwise vLLM would give the new request the late output of the old one
            engine.run()
    engine.add("again", prompt(1, 150), 20)
    engine.check_done()


@BOTH
@pytest.mark.parametrize("pause", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL], ids=["new", "all"])
@pytest.mark.parametrize("moment", [0, 1, 3, 8])
def test_sleep_and_wake(make_engine: MakeEngine, async_scheduling: bool, pause: PauseState, moment: int) -> None:
    """Puts the engine to sleep: the scheduler is paused (`abort` ends the running requests, `keep` interrupts them),
    and later continues.
    """
    engine = pressed(make_engine, async_scheduling)
    for _ in range(moment):
        engine.step()
    if pause == PauseState.PAUSED_NEW:
        engine.abort(*engine.scheduler.requests)
    engine.scheduler.set_pause_state(pause)
    for _ in range(4):
        engine.step()
    if pause == PauseState.PAUSED_NEW:
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        assert engine.metrics()["pool_chunks"] == 0
    engine.add("while-asleep", prompt(3, 100), 5)
    for _ in range(3):
        engine.step()
    assert engine.told["while-asleep"].tokens == []
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.add("after", prompt(1, 200), 5)
    engine.check_done()


@BOTH
def test_shutdown_with_requests_in_every_state(make_engine: MakeEngine, async_scheduling: bool) -> None:
    engine = pressed(make_engine, async_scheduling)
    for _ in range(15):
        engine.step()
    engine.shutdown()
    engine.shutdown()  # called twice, because vLLM may do so
