"""A prefill and a decode engine: the hand-over over real sockets and real transport, as vLLM's routers use it."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from kvferry_harness.prompts import prompt
from kvferry_launch.paths import LOGS
from kvferry_launch.testbed.servers import Controller

if TYPE_CHECKING:
    from kvferry_harness.engine import Engine

MakeEngine = Callable[..., "Engine"]
REMOTE_DECODE: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
BOTH = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])


def hand_over(engine: "Engine", request_id: str, tokens: list[int]) -> dict[str, Any]:
    engine.add(request_id, tokens, 1, params=REMOTE_DECODE)
    engine.run()
    params = engine.told[request_id].params
    assert params is not None
    return params


def run_patiently(engine: "Engine", seconds: float = 20.0) -> None:
    """As run(), for lookups that wait for other nodes."""
    deadline = time.monotonic() + seconds
    while engine.scheduler.has_requests() or engine.busy:
        engine.step()
        if engine.log.of("lookup") and engine.log.of("lookup")[-1]["answer"] is None:
            time.sleep(0.002)
        assert time.monotonic() < deadline, f"hangs: {list(engine.scheduler.requests)}"


@BOTH
def test_remote_decode_frees_the_blocks_and_keeps_the_chunks(make_engine: MakeEngine, async_scheduling: bool) -> None:
    engine = make_engine(role="kv_producer", async_scheduling=async_scheduling)
    params = hand_over(engine, "p", prompt(1, 200))

    finished, = engine.log.of("vllm_finished", "p")
    assert finished["status"] == "FINISHED_LENGTH_CAPPED"
    assert finished["holds"] is False  # its blocks are free at once
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert params["remote_request_id"] == "p"
    assert params["remote_num_tokens"] == 200
    assert isinstance(params["remote_port"], int)
    # Three chunks and a tail wait for the decode worker, until it has read them or a minute has passed.
    assert engine.metrics()["pool_pinned_chunks"] == 4
    engine.check_done(held_chunks=4)


@pytest.mark.parametrize("length", [1, 20, 64, 65, 200, 256])
@BOTH
def test_remote_prefill_is_loaded(make_engine: MakeEngine, async_scheduling: bool, length: int) -> None:
    prefill = make_engine(role="kv_producer", async_scheduling=async_scheduling)
    decode = make_engine(role="kv_consumer", async_scheduling=async_scheduling)
    params = hand_over(prefill, "p", prompt(1, length))
    decode.add("d", prompt(1, length), 30, params=params)
    run_patiently(decode)

    assert decode.log.of("lookup", "d")[-1]["answer"] == length - 1
    assert decode.metrics()["pulled_chunks_total"] == -(-(length - 1) // 64)
    decode.check_done()
    wait_until(lambda: prefill.metrics()["pool_pinned_chunks"] == (0 if length > 1 else 1))


@BOTH
def test_the_decode_engine_preempts_and_gets_its_kv_back(make_engine: MakeEngine, async_scheduling: bool) -> None:
    prefill = make_engine(role="kv_producer", async_scheduling=async_scheduling)
    decode = make_engine(role="kv_consumer", async_scheduling=async_scheduling, num_blocks=20)
    for index in range(8):
        params = hand_over(prefill, f"p{index}", prompt(index, 90 + 10 * index))
        decode.add(f"d{index}", prompt(index, 90 + 10 * index), 100, params=params)
    run_patiently(decode)
    assert decode.metrics()["resumed_hit_tokens_total"] > 0
    decode.check_done()


def test_a_preempted_prefill_computes_again_what_it_hands_over(make_engine: MakeEngine) -> None:
    """requires_kv_delivery: vLLM drops the output of a producer's request that is preempted in its last step."""
    prefill = make_engine(role="kv_producer", async_scheduling=True)
    assert prefill.scheduler.requires_kv_delivery
    prefill.add("p", prompt(1, 200), 1, params=REMOTE_DECODE)
    prefill.step()
    assert prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    prefill.run()
    assert prefill.told["p"].tokens == prefill.told["p"].expected
    params = prefill.told["p"].params
    assert params is not None
    decode = make_engine(role="kv_consumer")
    decode.add("d", prompt(1, 200), 10, params=params)
    run_patiently(decode)
    assert decode.log.of("lookup", "d")[-1]["answer"] == 199
    decode.check_done()


def test_chunks_are_found_through_the_controller(make_engine: MakeEngine) -> None:
    first = make_engine()
    first.add("a", prompt(1, 256), 1)
    first.run()
    second = make_engine()
    second.add("b", prompt(1, 256), 10)
    run_patiently(second)
    assert second.log.of("lookup", "b")[-1]["answer"] == 255
    second.check_done()


def test_a_prefill_engine_that_is_gone_costs_a_recompute(make_engine: MakeEngine) -> None:
    prefill = make_engine(role="kv_producer")
    params = hand_over(prefill, "p", prompt(4, 200))
    prefill.shutdown()
    decode = make_engine(role="kv_consumer", extra={"load_timeout_ms": 600}, patience_s=0)
    began = time.monotonic()
    decode.add("d", prompt(4, 200), 10, params=params)
    decode.add("other", prompt(5, 200), 10)
    run_patiently(decode)
    assert time.monotonic() - began < 5
    assert decode.log.of("lookup", "d")[-1]["answer"] == 0
    assert decode.told["other"].tokens == decode.told["other"].expected
    decode.check_done()


def test_bytes_damaged_before_they_are_pulled_are_recomputed(make_engine: MakeEngine) -> None:
    prefill = make_engine(role="kv_producer")
    params = hand_over(prefill, "p", prompt(6, 256))
    prefill.corrupt_chunk(2)
    decode = make_engine(role="kv_consumer")
    decode.add("d", prompt(6, 256), 10, params=params)
    run_patiently(decode)
    assert decode.metrics()["pull_failures_total"] >= 1
    assert decode.log.of("lookup", "d")[-1]["answer"] == 128
    decode.check_done()


@pytest.mark.parametrize("params", [
    {"do_remote_prefill": True},
    {"do_remote_prefill": True, "remote_host": 7, "remote_port": "x"},
    {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 99999, "remote_num_tokens": 5},
    {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 9, "remote_num_tokens": -1},
    {"do_remote_prefill": True, "kvferry_fingerprint": "another model"},
    {"do_remote_decode": "yes", "unknown": [1, 2]},
], ids=["empty", "types", "port", "tokens", "fingerprint", "unknown"])
def test_params_that_make_no_sense(make_engine: MakeEngine, params: dict[str, Any]) -> None:
    engine = make_engine()
    engine.add("a", prompt(7, 100), 5, params=params)
    run_patiently(engine)
    engine.check_done(held_chunks=2 if "do_remote_decode" in params else 0)


def test_another_model_is_refused_with_the_fields_that_differ(
        make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode = make_engine(role="kv_producer"), make_engine(role="kv_consumer")
    params = hand_over(prefill, "p", prompt(8, 200))
    params["kvferry_fingerprint"] = params["kvferry_fingerprint"].replace("chunk_tokens=64", "chunk_tokens=128")
    decode.add("d", prompt(8, 200), 5, params=params)
    run_patiently(decode)
    said, = (record.getMessage() for record in caplog.records if "different models" in record.getMessage())
    assert "is '64' here and '128' there" in said
    assert "model=" not in said  # what is equal is not told
    decode.check_done()


def test_a_controller_that_goes_and_returns(make_engine: MakeEngine) -> None:
    own = Controller("scheduler-tests-mortal", log_folder=LOGS / "tests")
    own.start()
    own.wait_ready()
    try:
        first, second = make_engine(own.address), make_engine(own.address)
        first.add("a", prompt(1, 128), 5)
        first.run()
        own.process.kill()
        second.add("b", prompt(1, 128), 5)  # nobody can be asked
        run_patiently(second)
        own.start()
        own.wait_ready()
        first.add("c", prompt(2, 128), 5)
        first.run()

        def found() -> bool:
            name = f"d{len(second.told)}"
            second.scheduler.reset_prefix_cache(reset_connector=True)
            second.add(name, prompt(2, 128), 5)
            run_patiently(second)
            return bool(second.log.of("lookup", name)[-1]["answer"])

        wait_until(found)
        wait_until(lambda: first.metrics()["pool_pinned_chunks"] == 0)  # the leases are given back
        first.check_done()
        second.check_done()
    finally:
        own.stop()


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
