"""Tests damaged chunks: they are never attended to, they are recomputed or reported as an error, and they are not
offered again.
"""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from kvferry_harness.prompts import prompt
from kvferry_launch.testbed.prompts import PromptSet

if TYPE_CHECKING:
    from kvferry_harness.engine import Engine

MakeEngine = Callable[..., "Engine"]
BOTH = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])


def filled(make_engine: MakeEngine, length: int = 256, **setup: object) -> "Engine":
    """Returns an engine whose pool has prompt 1 in chunks of 64 tokens, and whose own prefix cache is empty."""
    engine = make_engine(**setup)
    engine.add("first", prompt(1, length), 1)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    assert engine.metrics()["pool_chunks"] == -(-length // 64)
    return engine


@BOTH
@pytest.mark.parametrize("chunk", [0, 2, 3])
def test_recompute_from_the_first_damaged_chunk(
        make_engine: MakeEngine, async_scheduling: bool, chunk: int) -> None:
    engine = filled(make_engine, async_scheduling=async_scheduling)
    engine.corrupt_chunk(chunk)
    engine.add("b", prompt(1, 256), 12)
    engine.run()

    failures = [call for call in engine.log.of("vllm_output") if call["bad_blocks"] or call["failed"]]
    if async_scheduling:  # vLLM starts the request again from token 0, and finds the undamaged chunks again
        assert [call["failed"] for call in failures] == [["b"]]
        assert engine.log.of("lookup", "b")[-1]["answer"] == 64 * chunk
    else:
        assert [len(call["bad_blocks"]) for call in failures] == [8 - 2 * chunk]
    assert engine.metrics()["load_failures_total"] == 1
    engine.check_done()
    # The damaged chunk is saved again, and serves the next request.
    assert engine.scheduler.reset_prefix_cache()
    engine.add("c", prompt(1, 256), 12)
    engine.run()
    assert engine.metrics()["load_failures_total"] == 1
    assert engine.log.of("lookup", "c")[-1]["answer"] == 255
    engine.check_done()


@BOTH
def test_fail_ends_the_request_and_nobody_reads_its_blocks(make_engine: MakeEngine, async_scheduling: bool) -> None:
    engine = filled(make_engine, async_scheduling=async_scheduling, on_failed_load="fail")
    engine.corrupt_chunk(1)
    engine.add("b", prompt(1, 256), 12)
    engine.run()
    assert engine.told["b"].reason is not None
    assert engine.told["b"].reason.name == "ERROR"
    assert engine.told["b"].tokens == []
    engine.add("c", prompt(1, 256), 12)
    engine.run()
    engine.check_done()


@BOTH
@pytest.mark.parametrize("on_failed_load", ["recompute", "fail"])
def test_requests_that_share_the_blocks_of_a_failed_load(
        make_engine: MakeEngine, async_scheduling: bool, on_failed_load: str) -> None:
    """vLLM counts blocks as cached when they are allocated, so other requests hit them in the same step as the load."""
    engine = filled(make_engine, async_scheduling=async_scheduling, on_failed_load=on_failed_load)
    engine.corrupt_chunk(1)
    engine.add("b", prompt(1, 256), 12)
    engine.add("c", prompt(1, 256) + prompt(2, 40), 12)
    engine.add("d", prompt(1, 100), 12)
    engine.add("e", prompt(3, 100), 12)
    engine.run()
    assert engine.metrics()["load_failures_total"] >= 1
    assert engine.told["e"].tokens == engine.told["e"].expected
    engine.add("f", prompt(1, 256), 12)
    engine.run()
    engine.check_done()


@BOTH
@pytest.mark.parametrize("token_budget", [40, 512])
def test_requests_that_share_the_blocks_wait_for_their_recompute(
        make_engine: MakeEngine, async_scheduling: bool, token_budget: int) -> None:
    """The request whose load failed recomputes in chunks. The other request had found its whole prefix in the cache."""
    engine = filled(make_engine, async_scheduling=async_scheduling)
    engine.corrupt_chunk(0)
    engine.add("b", prompt(1, 250), 12)
    engine.add("c", prompt(1, 250) + prompt(2, 6), 12)
    engine.scheduler.max_num_scheduled_tokens = 512
    engine.step()
    engine.scheduler.max_num_scheduled_tokens = token_budget
    engine.run()
    engine.check_done()


@BOTH
@pytest.mark.parametrize("while_executing", [False, True], ids=["between-steps", "while-executing"])
def test_an_abort_before_the_failure_is_heard_leaves_no_garbage_in_the_prefix_cache(
        make_engine: MakeEngine, async_scheduling: bool, while_executing: bool) -> None:
    engine = filled(make_engine, async_scheduling=async_scheduling)
    engine.corrupt_chunk(0)
    engine.add("b", prompt(1, 256), 12)
    if while_executing:
        engine.abort("b", while_executing=True)
        engine.step()
    else:
        engine.step()
        engine.abort("b")
    engine.add("c", prompt(1, 256) + prompt(2, 20), 12)
    engine.run()
    engine.check_done()


@BOTH
def test_a_preemption_before_the_failure_is_heard(make_engine: MakeEngine, async_scheduling: bool) -> None:
    engine = filled(make_engine, async_scheduling=async_scheduling, role="kv_producer", num_blocks=20)
    engine.add("old", prompt(5, 250), 60)  # this request has 8 blocks and soon needs more
    engine.step()
    engine.step()
    engine.corrupt_chunk(0)
    engine.add("b", prompt(1, 256), 90)
    engine.run()
    engine.check_done()


def test_each_damaged_chunk_fails_one_load(make_engine: MakeEngine) -> None:
    """A chunk whose load failed once is never offered again, however often it is looked up."""
    engine = filled(make_engine, num_blocks=24)
    engine.corrupt_pool()
    for index in range(6):
        engine.add(f"b{index}", prompt(1, 256), 3)
        engine.run()
        assert engine.scheduler.reset_prefix_cache()
        assert engine.metrics()["load_failures_total"] == min(index + 1, 4)
    engine.check_done()


@BOTH
def test_a_reset_between_a_failed_load_and_its_report(make_engine: MakeEngine, async_scheduling: bool) -> None:
    engine = filled(make_engine, async_scheduling=async_scheduling)
    engine.corrupt_chunk(0)
    engine.add("b", prompt(1, 256), 12)
    engine.step()
    # vLLM can't reset while a consumer's blocks are in use. It raises an error, but still preempts all requests.
    with pytest.raises(RuntimeError) if async_scheduling else contextlib.nullcontext():
        engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.add("c", prompt(1, 256), 12)
    engine.run()
    engine.check_done()


def test_failed_loads_never_keep_the_blocks_from_each_other(make_engine: MakeEngine) -> None:
    """vLLM reserves blocks for loads that failed, and looks only at the first of them. Once, a run took 127,000 steps
    because of this.
    """
    engine = make_engine(num_blocks=24, prefix_caching=False, async_scheduling=True, executes_late=True)
    waiting = [(f"{turn}-{index}", [1 + token % 390 for token in tokens]) for turn in range(2)
               for index, tokens in enumerate(PromptSet(7, 8, 20, 220, shared_prefixes=2).prompts())]
    for step in range(1, 2000):
        living = [name for name, told in engine.told.items() if told.reason is None]
        while waiting and len(living) < 6:
            name, tokens = waiting.pop(0)
            engine.add(name, tokens, 60)
            living.append(name)
        if not living:
            break
        if step in (8, 30, 60):
            engine.corrupt_pool()
        engine.step()
    assert not waiting, f"{len(waiting)} requests still wait after {step} steps"
    assert engine.runner.num_failed_loads > 2
    engine.check_done()
