"""Tests a prefill and a decode engine: the hand-over over real sockets and a real transport, as vLLM's routers use it.
"""

import re
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kvferry._core import KvFerryError
from kvferry.tickets import PUSH_TARGET, signer_of
from kvferry_harness.handing_over import REMOTE_DECODE, hand_over, run_patiently
from kvferry_harness.prompts import prompt
from kvferry_harness.waiting import wait_until
from kvferry_launch.node.cluster_key import ensure_key
from kvferry_launch.paths import LOGS
from kvferry_launch.testbed.servers import Controller

if TYPE_CHECKING:
    from kvferry_harness.engine import Engine

MakeEngine = Callable[..., "Engine"]
WAIT_S = 10.0
BOTH = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])


@BOTH
def test_remote_decode_frees_the_blocks_and_keeps_the_chunks(make_engine: MakeEngine, async_scheduling: bool) -> None:
    engine = make_engine(role="kv_producer", async_scheduling=async_scheduling)
    params = hand_over(engine, "p", prompt(1, 200))

    finished, = engine.log.of("vllm_finished", "p")
    assert finished["status"] == "FINISHED_LENGTH_CAPPED"
    assert finished["holds"] is False  # the request's blocks are free at once
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    # The id has a random number, which no client can guess.
    assert re.fullmatch(r"p\.[0-9a-f]{16}", params["remote_request_id"])
    assert params["remote_num_tokens"] == 200
    assert isinstance(params["remote_port"], int)
    # Three chunks and a tail are kept until the decode worker has read them, or until a minute has passed.
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
    wait_until(lambda: prefill.metrics()["pool_pinned_chunks"] == (0 if length > 1 else 1), WAIT_S)


NGRAM, DRAFT_MODEL = {"num_drafts": 3}, {"num_drafts": 3, "draft_model": True}


@pytest.mark.parametrize("v2_runner", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize(("on_prefill", "on_decode"), [
    ({}, {}), (NGRAM, NGRAM), (NGRAM, {}), ({}, NGRAM), (DRAFT_MODEL, DRAFT_MODEL)],
    ids=["none", "n-gram", "n-gram on prefill", "n-gram on decode", "draft model"])  # fmt: skip
def test_the_decode_engine_finds_the_prompt_while_the_next_step_is_executed(
        make_engine: MakeEngine, on_prefill: dict[str, Any], on_decode: dict[str, Any], v2_runner: bool) -> None:
    prefill = make_engine(role="kv_producer", v2_runner=v2_runner, **on_prefill)
    decode = make_engine(role="kv_consumer", v2_runner=v2_runner, **on_decode)
    prefill.add("p", prompt(1, 200), 1, params=REMOTE_DECODE)
    prefill.step()
    decode.add("d", prompt(1, 200), 100, params=prefill.told["p"].params)
    run_patiently(decode)

    assert decode.log.of("lookup", "d")[-1]["answer"] == 199
    decode.check_done()
    prefill.check_done(held_chunks=None)


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
    """requires_kv_delivery: vLLM drops the output of a producer's request that is preempted in the request's last step.
    """
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


@pytest.fixture
def key(tmp_path: Path) -> dict[str, Any]:
    """Returns the keys of kv_connector_extra_config with which nodes sign addresses."""
    return {"cluster_key_file": str(ensure_key(tmp_path / "cluster.key"))}


@pytest.fixture
def make_member(make_engine: MakeEngine, key: dict[str, Any]) -> Iterator[MakeEngine]:
    """Makes engines that have the cluster key, with a controller that has it too."""
    key_file = Path(key["cluster_key_file"])
    controller = Controller("scheduler-tests-members", log_folder=LOGS / "tests", key_file=key_file)
    controller.start()
    controller.wait_ready()
    yield partial(make_engine, controller_address=controller.address, extra=key)
    controller.stop()


def num_refused(engine: "Engine") -> int:
    assert engine.connector._scheduler is not None
    return engine.connector._scheduler._router_params.num_refused


def test_a_signed_hand_over_is_loaded(make_member: MakeEngine) -> None:
    prefill = make_member(role="kv_producer")
    decode = make_member(role="kv_consumer")
    decode.add("d", prompt(1, 200), 30, params=hand_over(prefill, "p", prompt(1, 200)))
    run_patiently(decode)
    assert decode.log.of("lookup", "d")[-1]["answer"] == 199
    assert num_refused(decode) == 0
    decode.check_done()


def test_nobody_connects_to_an_address_without_a_ticket(make_member: MakeEngine) -> None:
    prefill = make_member(role="kv_producer")
    decode = make_member(role="kv_consumer")
    params = hand_over(prefill, "p", prompt(1, 100))
    with socket.create_server(("127.0.0.1", 0)) as unknown_peer:
        unknown_peer.setblocking(False)
        forged = [params | {"remote_port": unknown_peer.getsockname()[1]},
                  {name: value for name, value in params.items() if name != "kvferry_ticket"} |
                  {"remote_port": unknown_peer.getsockname()[1]}]
        for index, given in enumerate(forged):
            decode.add(f"d{index}", prompt(10 + index, 100), 5, params=given)
        run_patiently(decode)
        time.sleep(0.2)
        with pytest.raises(BlockingIOError):
            unknown_peer.accept()
    assert num_refused(decode) == 2
    decode.check_done()


def test_a_push_needs_a_ticket_too(make_member: MakeEngine, key: dict[str, Any]) -> None:
    prefill = make_member(role="kv_producer")
    decode = make_member(role="kv_consumer")
    node = decode.connector._scheduler._node
    target = {"engine_id": "d", "endpoint": f"tcp://{node.host}:{node.port}"}
    signed = signer_of(key["cluster_key_file"]).signed(PUSH_TARGET, target)
    for index, push_to in enumerate((target, target["endpoint"], signed | {"endpoint": "tcp://127.0.0.1:9"}, signed)):
        prefill.add(f"p{index}", prompt(index, 100), 1, params=REMOTE_DECODE | {"kvferry_push_to": push_to})
        run_patiently(prefill)
        wait_until(lambda: prefill.metrics()["open_pushes"] == 0, WAIT_S)
    assert num_refused(prefill) == 3
    # The decode node learns of the end of a push by a message, which the prefill node does not wait for.
    wait_until(lambda: decode.metrics()["received_chunks_total"] >= 2, WAIT_S)
    assert decode.metrics()["received_chunks_total"] == 2, "those of the last, which was signed"
    prefill.check_done(held_chunks=None)


def test_a_key_that_others_can_read_ends_the_start(make_engine: MakeEngine, key: dict[str, Any]) -> None:
    Path(key["cluster_key_file"]).chmod(0o644)
    with pytest.raises(KvFerryError, match=r"^kvferry: cluster_key_file .* has mode 0644; allowed: 0600 and 0400"):
        make_engine(extra=key)


def test_a_node_without_a_key_warns(
        make_engine: MakeEngine, make_member: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    def warned() -> bool:
        return any("hand-offs are not signed" in record.getMessage() for record in caplog.records)

    make_member()
    assert not warned()
    make_engine()
    assert warned()


def test_another_model_is_refused_with_the_fields_that_differ(
        make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode = make_engine(role="kv_producer"), make_engine(role="kv_consumer")
    params = hand_over(prefill, "p", prompt(8, 200))
    params["kvferry_fingerprint"] = params["kvferry_fingerprint"].replace("chunk_tokens=64", "chunk_tokens=128")
    decode.add("d", prompt(8, 200), 5, params=params)
    run_patiently(decode)
    said, = (record.getMessage() for record in caplog.records if "different models" in record.getMessage())
    assert "is '64' here and '128' there" in said
    assert "model=" not in said  # fields with equal values are not mentioned
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
        second.add("b", prompt(1, 128), 5)  # there is no other node to ask
        run_patiently(second)
        own.start()
        own.wait_ready()

        def found() -> bool:
            number = len(second.told) + 1
            first.add(f"c{number}", prompt(number, 128), 5)
            first.run()
            second.add(f"d{number}", prompt(number, 128), 5)
            run_patiently(second)
            return bool(second.log.of("lookup", f"d{number}")[-1]["answer"])

        wait_until(found, WAIT_S)
        wait_until(lambda: first.metrics()["pool_pinned_chunks"] == 0, WAIT_S)  # until the leases have been returned
        first.check_done()
        second.check_done()
    finally:
        own.stop()
