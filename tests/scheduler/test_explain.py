"""Tests `kvferry explain` on engines with vLLM's own scheduler."""

import json
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from kvferry_harness.prompts import prompt
from kvferry_launch.paths import KVFERRY
from kvferry_launch.testbed.servers import Controller

if TYPE_CHECKING:
    from kvferry_harness.engine import Engine

MakeEngine = Callable[..., "Engine"]


def explain(controller: Controller, request: str) -> dict[str, Any]:
    command = [str(KVFERRY), "explain", request, "--controller", controller.address, "--json"]
    told: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return told


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_the_parts_of_a_preempted_request_add_up_to_its_wall_time(
        make_engine: MakeEngine, controller: Controller, async_scheduling: bool) -> None:
    engine = make_engine(num_blocks=12, prefix_caching=False, async_scheduling=async_scheduling)
    engine.add("cmpl-first-0", prompt(1, 100), 120)
    began = time.monotonic()
    engine.add("cmpl-second-0", prompt(2, 100), 120)
    ended = began
    while engine.scheduler.has_requests() or engine.busy:
        is_running = "cmpl-second-0" in engine.scheduler.requests
        engine.step()
        ended = time.monotonic() if is_running else ended
        time.sleep(0.002)
    told = explain(controller, "second")
    life, = told["lives"]
    kinds = [event["event"] for event in life["events"]]
    assert kinds.count("preempted") >= 1
    assert kinds.count("admitted") == kinds.count("preempted") + 1
    assert told["recomputed"] == [], "every preempted token was in the pool"
    assert told["duration_ms"] == pytest.approx((ended - began) * 1e3, rel=0.05)
    assert sum(part["ms"] for part in told["parts"]) == pytest.approx(told["duration_ms"], rel=0.05)
    assert {"computing", "decoding", "preempted, waiting in the engine's queue"} <= {
        part["what"] for part in told["parts"]}


@pytest.mark.parametrize(("change", "cause"), [
    ({"kvferry_fingerprint": "chunk_tokens=128 weights_epoch=0"}, "other fingerprint: "),
    ({"kvferry_fingerprint": " weights_epoch=7"}, "is '0' here and '7' there"),
    ({"remote_port": "nonsense"}, "kv_transfer_params name no usable remote_host, remote_port"),
])
def test_a_hand_off_that_was_not_used_is_explained(
        make_engine: MakeEngine, controller: Controller, change: dict[str, str], cause: str) -> None:
    prefill, decode = make_engine(role="kv_producer"), make_engine(role="kv_consumer")
    prefill.add("p", prompt(8, 200), 1, params={"do_remote_decode": True, "do_remote_prefill": False})
    prefill.run()
    params = dict(prefill.told["p"].params or {})
    theirs = change.get("kvferry_fingerprint", "")
    if theirs.startswith(" weights"):
        change = {"kvferry_fingerprint": params["kvferry_fingerprint"].replace(" weights_epoch=0", theirs)}
    other = prompt(9, 200)  # the controller knows no holder of these tokens
    decode.add("d", other, 5, params=params | change)
    while decode.scheduler.has_requests() or decode.busy:
        decode.step()
        time.sleep(0.002)
    told = explain(controller, "d")
    again, = told["recomputed"]
    assert again["tokens"] == 199
    assert again["cause"].startswith("the hand-off was not used (")
    assert cause in again["cause"]
