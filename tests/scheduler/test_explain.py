"""Tests `kvferry explain` on engines with vLLM's own scheduler."""

import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from kvferry_harness.prompts import prompt
from kvferry_harness.waiting import wait_until
from kvferry_launch.paths import LOGS
from kvferry_launch.testbed.servers import Controller, running_controller

if TYPE_CHECKING:
    from kvferry_harness.engine import Engine

MakeEngine = Callable[..., "Engine"]
DEADLINE_S = 20.0


def finish(engine: "Engine") -> None:
    """Runs steps until all requests have ended."""
    deadline = time.monotonic() + DEADLINE_S
    while engine.scheduler.has_requests() or engine.busy:
        engine.step()
        time.sleep(0.002)
        assert time.monotonic() < deadline, f"hangs: {list(engine.scheduler.requests)}"


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
    told = controller.explain("second")
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
    ({"kvferry_fingerprint": "chunk_tokens=128 weights_epoch=0"}, "different models: "),
    ({"kvferry_fingerprint": " weights_epoch=7"}, "is '0' here and '7' there"),
    ({"remote_port": "nonsense"}, "remote_port is 'nonsense', not a number from 1 to 65535"),
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
    finish(decode)
    told = controller.explain("d")
    again, = told["recomputed"]
    assert again["tokens"] == 199
    assert again["cause"].startswith("the prefill node's hand-off in kv_transfer_params could not be used (")
    assert cause in again["cause"]


class Bed:
    """A prefill and a decode engine, and three requests on which a cause is injected."""

    def __init__(self, make_engine: MakeEngine, controller: Controller, waiting: ExitStack) -> None:
        self.make_engine, self.controller, self.waiting = make_engine, controller, waiting
        self.prefill = make_engine(controller.address, role="kv_producer")
        self.decode = make_engine(controller.address, role="kv_consumer", patience_s=0,
                                  extra={"load_timeout_ms": 600})
        self.prompts = {f"request{number}": prompt(100 + number, 200) for number in range(3)}

    def hand_over(self) -> dict[str, dict[str, Any]]:
        """Computes the prompts on the prefill engine. Returns each request's kv_transfer_params."""
        for request, tokens in self.prompts.items():
            self.prefill.add(f"p-{request}", tokens, 1, params={"do_remote_decode": True, "do_remote_prefill": False})
        self.prefill.run()
        return {request: dict(self.prefill.told[f"p-{request}"].params or {}) for request in self.prompts}

    def decode_all(self, params: dict[str, dict[str, Any]]) -> None:
        for request, tokens in self.prompts.items():
            self.decode.add(request, tokens, 5, params=params.get(request))
            finish(self.decode)

    def take_other_prompts(self) -> None:
        """Takes prompts for which the controller knows no holder, to which the decode engine would turn."""
        self.prompts = {request: prompt(200 + number, 200) for number, request in enumerate(self.prompts)}

    def no_holder(self) -> None:
        self.decode_all({})

    def evicted(self) -> None:
        params = self.hand_over()
        self.controller.run("clear")
        wait_until(lambda: all(node["chunks"] == 0 for node in self.controller.nodes()))
        self.decode_all(params)

    def cleared(self) -> None:
        engine = self.make_engine(self.controller.address, num_blocks=12, prefix_caching=False)
        for request, tokens in self.prompts.items():
            engine.add(request.replace("request", "rival"), tokens[:100], 120)
            engine.add(request, tokens[100:], 120)
            while engine.request(request).status.name != "PREEMPTED":
                engine.step()
            engine.step()  # saves what the request has computed
            self.controller.run("clear")
            wait_until(lambda: engine.metrics()["pool_chunks"] == 0)
            finish(engine)

    def lost_link(self) -> None:
        params = self.hand_over()
        self.prefill.runner.connector.shutdown()  # the scheduler connector goes on, and grants leases
        self.decode_all(params)

    def frozen_holder(self) -> None:
        params = self.hand_over()
        for request in self.prompts:
            frozen = self.waiting.enter_context(socket.create_server(("127.0.0.1", 0)))  # it never answers
            params[request]["remote_port"] = frozen.getsockname()[1]
        self.take_other_prompts()
        self.decode_all(params)

    def damaged_chunk(self) -> None:
        params = self.hand_over()
        self.prefill.corrupt_pool()
        self.decode_all(params)

    def other_fingerprint(self) -> None:
        params = self.hand_over()
        for of_request in params.values():
            of_request["kvferry_fingerprint"] += " weights=other"
        self.take_other_prompts()
        self.decode_all(params)

    def frozen_controller(self) -> None:
        for request, tokens in self.prompts.items():
            self.controller.process.signal(signal.SIGSTOP)
            try:
                self.decode.add(request, tokens, 5)
                finish(self.decode)
            finally:
                self.controller.process.signal(signal.SIGCONT)


@pytest.fixture
def bed(make_engine: MakeEngine) -> Iterator[Bed]:
    with running_controller("scheduler-tests-explained", LOGS / "tests") as own, ExitStack() as waiting:
        yield Bed(make_engine, own, waiting)


@pytest.mark.parametrize(("inject", "cause"), [
    (Bed.no_holder, "no node held these chunks"),
    (Bed.evicted, "the node that was asked had evicted the chunks"),
    (Bed.cleared, "this node's pool was cleared"),
    (Bed.lost_link, "the connection to the other node broke during the transfer"),
    (Bed.frozen_holder, "the other node did not answer in time: it is dead or frozen, or its port is not reached"),
    (Bed.damaged_chunk, "a chunk was damaged: its bytes did not match its checksum"),
    (Bed.other_fingerprint, "the prefill node's hand-off in kv_transfer_params could not be used"),
    (Bed.frozen_controller, "the controller did not answer in time"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_the_cause_that_was_injected_is_named(bed: Bed, inject: Callable[[Bed], None], cause: str) -> None:
    inject(bed)
    for request in bed.prompts:
        events = [event for life in bed.controller.explain(request)["lives"] if not life["request"].startswith("p-")
                  for event in life["events"] if event["event"] == "admitted"]
        assert events[-1]["cause"] == cause, events
