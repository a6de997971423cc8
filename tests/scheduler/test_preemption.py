"""Preemption in every state a request can be in, by full blocks, by priority and by resets."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from kvferry_harness.prompts import prompt

if TYPE_CHECKING:
    from kvferry_harness.engine import Engine

MakeEngine = Callable[..., "Engine"]
BOTH = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
RUNNERS = pytest.mark.parametrize("v2_runner", [False, True], ids=["v1", "v2"])


def run_until(engine: "Engine", condition: Callable[[], bool]) -> None:
    for _ in range(200):
        if condition():
            return
        engine.step()
        time.sleep(0.002)
    raise AssertionError("it never came")


def preempted(engine: "Engine") -> list[str]:
    return [request_id for call in engine.log.of("step") for request_id in call["preempted"]]


@BOTH
@RUNNERS
def test_a_decoding_request_gets_its_kv_back(
        make_engine: MakeEngine, async_scheduling: bool, v2_runner: bool) -> None:
    engine = make_engine(num_blocks=12, prefix_caching=False, async_scheduling=async_scheduling, v2_runner=v2_runner)
    engine.add("a", prompt(1, 100), 120)
    engine.add("b", prompt(2, 100), 120)
    engine.run()

    assert "b" in preempted(engine)
    resumed = [call for call in engine.log.of("vllm_match", "b") if call["status"] == "PREEMPTED" and call["answer"][0]]
    for call in resumed:
        # Prompt and output, all but the token that has to be computed; one more is unsaved while one is in flight.
        assert call["num_tokens"] - call["answer"][0] in (1, 2)
    assert resumed
    engine.check_done()


@BOTH
@pytest.mark.parametrize("reserve_full_prompt", [False, True])
def test_a_request_in_the_middle_of_its_prefill(
        make_engine: MakeEngine, async_scheduling: bool, reserve_full_prompt: bool) -> None:
    engine = make_engine(num_blocks=14, token_budget=64, async_scheduling=async_scheduling,
                         reserve_full_prompt=reserve_full_prompt)
    engine.add("a", prompt(1, 60), 200)
    engine.step()
    engine.add("b", prompt(2, 330), 10)
    engine.run()
    if not reserve_full_prompt:
        assert "b" in preempted(engine)
    engine.check_done()


@BOTH
def test_a_request_that_was_just_loaded(make_engine: MakeEngine, async_scheduling: bool) -> None:
    engine = make_engine(num_blocks=14, prefix_caching=False, async_scheduling=async_scheduling)
    engine.add("first", prompt(2, 250), 1)
    engine.run()
    engine.add("a", prompt(1, 127), 100)  # one block more in its next step
    engine.step()
    engine.add("b", prompt(2, 250), 20)  # loads into the last free blocks
    engine.run()
    assert "b" in preempted(engine)
    assert engine.metrics()["resumed_hit_tokens_total"] > 0
    engine.check_done()


@BOTH
def test_again_and_again(make_engine: MakeEngine, async_scheduling: bool) -> None:
    engine = make_engine(num_blocks=18, async_scheduling=async_scheduling, token_budget=96)
    for index in range(10):
        engine.add(str(index), prompt(index, 40 + 20 * index), 100)
    engine.run()
    assert len(preempted(engine)) >= 5
    assert engine.metrics()["resumed_hit_tokens_total"] > 0
    engine.check_done()


@BOTH
def test_by_priority_in_the_step_that_had_scheduled_it(make_engine: MakeEngine, async_scheduling: bool) -> None:
    """The scheduler takes back what it had already scheduled in the same step."""
    engine = make_engine(num_blocks=14, policy="priority", async_scheduling=async_scheduling, token_budget=256)
    engine.add("low", prompt(1, 120), 100, priority=9)
    engine.step()
    engine.add("mid", prompt(2, 120), 100, priority=5)
    engine.step()
    engine.add("high", prompt(3, 120), 100, priority=1)
    engine.run()
    assert preempted(engine)[0] == "low"
    engine.check_done()


@BOTH
@RUNNERS
@pytest.mark.parametrize("tails", [False, True], ids=["chunks", "tails"])
def test_reset_with_running_requests_preempts_and_resumes_all(
        make_engine: MakeEngine, async_scheduling: bool, v2_runner: bool, tails: bool) -> None:
    # A producer: with a consumer's blocks in flight vLLM can't reset, see test_failed_loads.py.
    engine = make_engine(async_scheduling=async_scheduling, v2_runner=v2_runner, role="kv_producer",
                         extra={"save_partial_chunks": tails})
    for index in range(4):
        engine.add(str(index), prompt(index, 100), 40)
    for moment in (1, 2, 5):
        for _ in range(moment):
            engine.step()
        running = {request.request_id for request in engine.scheduler.running}
        assert running
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.step()
        assert set(engine.log.of("step")[-1]["preempted"]) == running
        # They resume in the same step already, or when their tails are packed and the controller has answered.
        run_until(engine, lambda names=running: {request.request_id for request in engine.scheduler.running} == names)
    engine.run()
    assert engine.metrics()["resumed_hit_tokens_total"] >= 3 * 4 * 64
    engine.check_done()


@BOTH
def test_reset_with_the_connector_forgets_all_chunks(make_engine: MakeEngine, async_scheduling: bool) -> None:
    engine = make_engine(async_scheduling=async_scheduling, role="kv_producer")
    engine.add("old", prompt(1, 200), 30)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.add("new", prompt(1, 200), 5)
    engine.run()
    looked_up = [call["answer"] for call in engine.log.of("lookup") if call["local"] == 0]
    assert not any(looked_up), "KV from before the reset was found"
    engine.check_done()


def test_reset_without_running_requests_is_refused_while_some_run(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add("a", prompt(1, 100), 10)
    engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    assert engine.metrics()["pool_chunks"] > 0
    engine.run()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.metrics()["pool_chunks"] == 0
    engine.add("b", prompt(1, 100), 10)
    engine.run()
    assert engine.log.of("lookup", "b")[-1]["answer"] == 0
    engine.check_done()


@BOTH
def test_a_pool_that_is_full_of_what_others_hold(make_engine: MakeEngine, async_scheduling: bool) -> None:
    engine = make_engine(num_blocks=18, pool_chunks=3, async_scheduling=async_scheduling)
    for index in range(8):
        engine.add(str(index), prompt(index, 100 + index), 90)
    engine.run()
    assert preempted(engine)
    assert engine.metrics()["evicted_chunks_total"] > 0
    engine.check_done()


@BOTH
@pytest.mark.parametrize("setting", ["save_decode_cache", "save_partial_chunks"])
def test_settings_that_save_less(make_engine: MakeEngine, async_scheduling: bool, setting: str) -> None:
    engine = make_engine(num_blocks=12, prefix_caching=False, async_scheduling=async_scheduling,
                         extra={setting: False})
    engine.add("a", prompt(1, 100), 120)
    engine.add("b", prompt(2, 100), 120)
    engine.run()
    assert "b" in preempted(engine)
    matches = [call for call in engine.log.of("vllm_match", "b")
               if call["status"] == "PREEMPTED" and call["answer"][0]]
    most = 100 if setting == "save_decode_cache" else 192
    assert all(call["answer"][0] <= most for call in matches)
    engine.check_done()
