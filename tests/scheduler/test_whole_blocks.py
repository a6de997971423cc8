"""Tests chunks of whole blocks (the setting whole_blocks) on vLLM's own scheduler: what is saved, found and refused."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from kvferry._core import KvFerryError
from kvferry_harness.handing_over import REMOTE_DECODE, hand_over, run_patiently
from kvferry_harness.prompts import prompt

if TYPE_CHECKING:
    from kvferry_harness.engine import Engine

MakeEngine = Callable[..., "Engine"]
WHOLE: dict[str, Any] = {"extra": {"whole_blocks": True, "namespace": "whole-blocks"}}
BOTH = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
BLOCK = 32


@pytest.mark.parametrize("length", [20, 32, 33, 64, 65, 100, 200, 256])
@BOTH
def test_a_prompt_is_handed_over_up_to_the_last_end_of_a_block(
        make_engine: MakeEngine, async_scheduling: bool, length: int) -> None:
    prefill = make_engine(role="kv_producer", async_scheduling=async_scheduling, **WHOLE)
    decode = make_engine(role="kv_consumer", async_scheduling=async_scheduling, **WHOLE)
    params = hand_over(prefill, "p", prompt(length, length))
    decode.add("d", prompt(length, length), 30, params=params)
    run_patiently(decode)
    assert decode.log.of("lookup", "d")[-1]["answer"] == (length - 1) // BLOCK * BLOCK
    decode.check_done()
    prefill.check_done(held_chunks=None)


@BOTH
def test_a_preempted_request_goes_on_from_whole_blocks(make_engine: MakeEngine, async_scheduling: bool) -> None:
    engine = make_engine(async_scheduling=async_scheduling, num_blocks=20, prefix_caching=False, **WHOLE)
    for index in range(8):
        engine.add(f"r{index}", prompt(1000 + index, 90 + 7 * index), 100)
    engine.run()
    assert engine.metrics()["resumed_hit_tokens_total"] > 0
    assert engine.metrics()["resumed_hit_tokens_total"] % BLOCK == 0
    engine.check_done()


@pytest.mark.parametrize("drafts", [{"num_drafts": 3}, {"num_drafts": 3, "draft_model": True}], ids=["n-gram", "model"])
def test_a_prompt_is_handed_over_with_speculation(make_engine: MakeEngine, drafts: dict[str, Any]) -> None:
    prefill = make_engine(role="kv_producer", **WHOLE | drafts)
    decode = make_engine(role="kv_consumer", **WHOLE | drafts)
    decode.add("d", prompt(1, 200), 100, params=hand_over(prefill, "p", prompt(1, 200)))
    run_patiently(decode)
    assert decode.log.of("lookup", "d")[-1]["answer"] == 192
    decode.check_done()


@pytest.mark.parametrize(("setup", "length", "hit"), [
    (WHOLE, 180, 160), ({"context_ranks": 2, "chunk_tokens": 128}, 200, 192)], ids=["whole", "context"])
def test_a_prompt_is_pushed_up_to_its_last_full_block(
        make_engine: MakeEngine, setup: dict[str, Any], length: int, hit: int) -> None:
    setup = {"extra": {"namespace": "pushed-context"}} | setup
    prefill, decode = make_engine(role="kv_producer", **setup), make_engine(role="kv_consumer", **setup)
    node = decode.connector._scheduler._node
    prefill.add("p", prompt(7, length), 1, params=REMOTE_DECODE | {"kvferry_push_to": f"tcp://{node.host}:{node.port}"})
    run_patiently(prefill)
    deadline = time.monotonic() + 20
    while decode.metrics()["received_chunks_total"] < -(-hit // setup.get("chunk_tokens", 64)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    decode.add("d", prompt(7, length), 30, params=prefill.told["p"].params)
    run_patiently(decode)
    assert decode.log.of("lookup", "d")[-1]["answer"] == hit
    assert decode.metrics()["pulled_chunks_total"] == 0
    decode.check_done()


def test_a_node_of_another_order_is_refused(make_engine: MakeEngine) -> None:
    make_engine(**WHOLE)
    with pytest.raises(KvFerryError, match=r"order is 'vec\w*:[0-9a-f]{8},blocks:32' here and missing there"):
        make_engine(extra={"namespace": "whole-blocks"})


# ---- decode context parallelism: the tokens of a block are on two ranks in turns ----


def context(interleave: int = 1, **more: Any) -> dict[str, Any]:
    """Returns the setup of an engine with two ranks. A block of vLLM's scheduler has 64 tokens, 32 on each rank."""
    return {"context_ranks": 2, "interleave": interleave, "chunk_tokens": 128,
            "extra": {"namespace": f"context-{interleave}"}} | more


@pytest.mark.parametrize("interleave", [1, 16, 32])
@pytest.mark.parametrize("length", [50, 64, 65, 200, 300])
@BOTH
def test_a_prompt_is_handed_over_between_context_parallel_engines(
        make_engine: MakeEngine, async_scheduling: bool, length: int, interleave: int) -> None:
    prefill = make_engine(role="kv_producer", async_scheduling=async_scheduling, **context(interleave))
    decode = make_engine(role="kv_consumer", async_scheduling=async_scheduling, **context(interleave))
    params = hand_over(prefill, "p", prompt(length, length))
    decode.add("d", prompt(length, length), 30, params=params)
    run_patiently(decode)
    assert decode.log.of("lookup", "d")[-1]["answer"] == (length - 1) // 64 * 64
    decode.check_done()
    prefill.check_done(held_chunks=None)


@BOTH
def test_a_context_parallel_engine_preempts_and_gets_its_kv_back(
        make_engine: MakeEngine, async_scheduling: bool) -> None:
    engine = make_engine(async_scheduling=async_scheduling, num_blocks=12, prefix_caching=False, **context())
    for index in range(8):
        engine.add(f"r{index}", prompt(2000 + index, 90 + 7 * index), 150)
    engine.run()
    assert engine.metrics()["resumed_hit_tokens_total"] > 0
    engine.check_done()


def test_engines_with_other_turns_are_refused(make_engine: MakeEngine) -> None:
    make_engine(**context(1))
    with pytest.raises(KvFerryError, match=r"context is 'decode:2,prefill:1,interleave:1,tensor_parallel:2' here and "
                                           r"'decode:2,prefill:1,interleave:16,tensor_parallel:2' there"):
        make_engine(**context(16, extra={"namespace": "context-1"}))


def test_routers_are_told_of_the_blocks_of_all_context_parallel_ranks(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_events=True, **context())
    engine.add("a", prompt(5, 300), 1)
    engine.run()
    engine.step()
    stored = [event for batch in engine.event_batches for event in batch.events
              if getattr(event, "medium", None) == "CPU" and hasattr(event, "token_ids")]
    assert [block for event in stored for block in event.block_hashes] == engine.block_hashes(prompt(5, 300))
    assert {event.block_size for event in stored} == {64}
