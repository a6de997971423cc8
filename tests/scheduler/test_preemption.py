"""Tests preemption in every state of a request, because of a lack of blocks, by priority and by resets."""

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
        # The prompt and the output are found again, except for the token that must be computed, and one more if a token
        # was still being computed.
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
    engine.add("a", prompt(1, 127), 100)  # this request needs another block in its next step
    engine.step()
    engine.add("b", prompt(2, 250), 20)  # this load takes the last free blocks
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
    """vLLM's scheduler takes back what it has already scheduled in the same step."""
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
    # The engine is a producer, because vLLM can't reset while a consumer's blocks are in use; see test_failed_loads.py.
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
        # Requests resume in the same step, or once their tails are packed and the controller has answered.
        run_until(engine, lambda names=running: {request.request_id for request in engine.scheduler.running} == names)
    engine.run()
    assert engine.metrics()["resumed_hit_tokens_total"] >= 3 * 4 * 64
    engine.check_done()


@BOTH
def test_reset_with_the_connector_drops_all_chunks(make_engine: MakeEngine, async_scheduling: bool) -> None:
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


@BOTH
def test_after_a_reset_old_kv_of_other_nodes_is_not_taken(make_engine: MakeEngine, async_scheduling: bool) -> None:
    """The weights are updated on one node, then on the other. The nodes share KV before and after the updates, but not
    in between.
    """
    one = make_engine(async_scheduling=async_scheduling, prefix_caching=False)
    other = make_engine(async_scheduling=async_scheduling, prefix_caching=False)

    def found(engine: "Engine", name: str, number: int) -> int:
        engine.add(name, prompt(number, 200), 1)
        run_until(engine, lambda: not engine.scheduler.has_requests() and not engine.busy)
        answers = [call["answer"] for call in engine.log.of("lookup", name) if call["answer"] is not None]
        return int(answers[-1])

    def share(number: int) -> bool:
        """Tries prompts until the controller knows the chunks of one."""
        for attempt in range(number, number + 100):
            found(one, f"one {attempt}", attempt)
            if found(other, f"other {attempt}", attempt):
                return True
        return False

    found(other, "a", 1)
    assert share(100)
    assert found(one, "b", 2) == 0
    assert one.scheduler.reset_prefix_cache(reset_connector=True)
    assert found(one, "c", 1) == 0  # the other node has chunks of the old weights
    assert found(one, "d", 3) == 0
    assert found(other, "e", 2) == 0  # withdrawn
    assert found(other, "f", 3) == 0  # chunks of the new weights
    assert other.scheduler.reset_prefix_cache(reset_connector=True)
    assert share(200)
    for engine in (one, other):
        engine.check_done()


def test_a_handover_from_before_a_reset_is_recomputed(make_engine: MakeEngine) -> None:
    prefill, decode = make_engine(role="kv_producer"), make_engine(role="kv_consumer")
    prefill.add("p", prompt(1, 200), 1, params={"do_remote_decode": True})
    prefill.run()
    assert decode.scheduler.reset_prefix_cache(reset_connector=True)
    decode.add("d", prompt(1, 200), 5, params=prefill.told["p"].params)
    decode.run()
    endpoint, reason, *_ = decode.log.of("add", "d")[-1]["source"]
    assert not endpoint and "weights_epoch" in reason
    assert decode.log.of("lookup", "d")[-1]["answer"] == 0
    decode.check_done()


def test_requests_that_run_through_a_reset_are_not_saved(make_engine: MakeEngine) -> None:
    """vLLM refuses to empty its own prefix cache while requests run, but still calls the connector."""
    engine = make_engine()
    engine.add("a", prompt(1, 100), 100)
    engine.step()
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    saved = engine.metrics()["saved_tokens_total"]
    engine.run()
    engine.add("b", prompt(1, 100), 1)  # this request finds blocks of the old weights in vLLM's prefix cache
    engine.run()
    assert engine.metrics()["saved_tokens_total"] == saved
    assert engine.metrics()["pool_chunks"] == 0

    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.add("c", prompt(1, 100), 1)
    engine.run()
    assert engine.metrics()["saved_tokens_total"] == saved + 100
    assert engine.connector._scheduler._extras.weights_epoch == 1  # the first reset was not counted
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
