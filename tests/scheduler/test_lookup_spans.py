"""Tests the connector's spans of lookups and transfers with OpenTelemetry's SDK: in the trace of vLLM's request, and of
no other.
"""

import json
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from kvferry.spans.lookup_spans import LookupSpans
from kvferry_harness.prompts import prompt
from kvferry_harness.waiting import wait_until
from kvferry_launch.testbed.servers import Controller
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

if TYPE_CHECKING:
    from kvferry_harness.engine import Engine

MakeEngine = Callable[..., "Engine"]
TRACE, PREFILL, DECODE = "0af7651916cd43dd8448eb211c80319c", "00000000000000aa", "00000000000000bb"
_exported = InMemorySpanExporter()


@pytest.fixture
def exported() -> Iterator[InMemorySpanExporter]:
    if not isinstance(trace.get_tracer_provider(), TracerProvider):  # a process has one provider, which vLLM uses
        trace.set_tracer_provider(TracerProvider())
    provider = trace.get_tracer_provider()
    if not getattr(provider, "exports_to_test", False):
        provider.add_span_processor(SimpleSpanProcessor(_exported))  # type: ignore[attr-defined]
        provider.exports_to_test = True  # type: ignore[attr-defined]
    _exported.clear()
    yield _exported


def add(engine: "Engine", request_id: str, params: dict[str, Any] | None, headers: dict[str, str] | None) -> None:
    engine.add(request_id, prompt(1, 200), 3, params=params, headers=headers)


def finish(engine: "Engine") -> None:
    deadline = time.monotonic() + 20.0
    while engine.scheduler.has_requests() or engine.busy:
        engine.step()
        time.sleep(0.002)
        assert time.monotonic() < deadline


def traceparent(span_id: str) -> dict[str, str]:
    return {"traceparent": f"00-{TRACE}-{span_id}-01"}


@pytest.mark.parametrize("passes_headers", [True, False])
def test_both_lookups_of_a_hand_over_are_in_one_trace(make_engine: MakeEngine, exported: InMemorySpanExporter,
                                                       controller: Controller, passes_headers: bool) -> None:
    prefill, decode = (make_engine(role=f"kv_{role}", traced=True) for role in ("producer", "consumer"))
    add(prefill, "p", {"do_remote_decode": True, "do_remote_prefill": False}, traceparent(PREFILL))
    finish(prefill)
    params = prefill.told["p"].params
    assert params is not None
    assert params["kvferry_traceparent"] == traceparent(PREFILL)["traceparent"]
    add(decode, "d", params, traceparent(DECODE) if passes_headers else None)
    finish(decode)

    first, second = named(exported, "kvferry.lookup")
    for span, parent in ((first, PREFILL), (second, DECODE if passes_headers else PREFILL)):
        assert f"{span.context.trace_id:032x}" == TRACE
        assert span.parent is not None
        assert f"{span.parent.span_id:016x}" == parent
    assert dict(first.attributes or {}) == {"gen_ai.request.id": "p", "kvferry.local_tokens": 0,
                                            "kvferry.found_tokens": 0}
    assert (second.attributes or {})["kvferry.found_tokens"] == 199
    told = json.loads(controller.run("explain", "--trace", TRACE, "--json"))
    assert [[life["request"] for life in one["lives"]] for one in told["requests"]] == [["p", "d"]]


@pytest.mark.parametrize("sent", [None, 7, "", "00-x", f"00-{TRACE}-{DECODE}-01" + "x" * 9999, {"a": 1}])
def test_a_request_without_a_trace_has_no_span(make_engine: MakeEngine, exported: InMemorySpanExporter,
                                               controller: Controller, sent: Any) -> None:
    engine = make_engine(role="kv_both", traced=True)
    add(engine, "a", {"do_remote_decode": True, "kvferry_traceparent": sent}, None)
    add(engine, "b", None, {"tracestate": "a=1"})
    finish(engine)
    assert exported.get_finished_spans() == ()
    params = engine.told["a"].params
    assert params is not None
    assert "kvferry_traceparent" not in params
    assert [life["trace"] for life in controller.explain("a")["lives"]] == [""]


def test_explain_knows_a_trace_that_no_server_exports(make_engine: MakeEngine, exported: InMemorySpanExporter,
                                                      controller: Controller) -> None:
    prefill, decode = make_engine(role="kv_producer"), make_engine(role="kv_consumer")
    add(prefill, "p", {"do_remote_decode": True, "kvferry_traceparent": traceparent(PREFILL)["traceparent"]}, None)
    finish(prefill)
    add(decode, "d", prefill.told["p"].params, None)
    finish(decode)
    told = json.loads(controller.run("explain", "--trace", TRACE, "--json"))
    assert [[life["request"] for life in one["lives"]] for one in told["requests"]] == [["p", "d"]]
    assert exported.get_finished_spans() == ()


@pytest.mark.parametrize("pushes", [True, False])
def test_transfers_of_a_traced_request_have_spans_in_its_trace(make_engine: MakeEngine, exported: InMemorySpanExporter,
                                                                pushes: bool) -> None:
    prefill, decode = (make_engine(role=f"kv_{role}", traced=True) for role in ("producer", "consumer"))
    params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
    if pushes:
        node = decode.connector._scheduler._node
        params["kvferry_push_to"] = f"tcp://{node.host}:{node.port}"
    add(prefill, "p", params, traceparent(PREFILL))
    add(prefill, "other", None, None)
    finish(prefill)
    kind, parent = ("push", PREFILL) if pushes else ("pull", DECODE)
    if pushes:  # no step follows
        wait_until(lambda: named(exported, "kvferry.push") != [])
    add(decode, "d", prefill.told["p"].params, traceparent(DECODE))
    finish(decode)

    wait_until(lambda: named(exported, f"kvferry.{kind}") != [] and named(exported, "kvferry.load") != [])
    (moved,), (loaded,), (found,) = (named(exported, f"kvferry.{name}", of) for name, of in (
        (kind, parent), ("load", DECODE), ("lookup", DECODE)))
    for span in (moved, loaded):
        assert f"{span.context.trace_id:032x}" == TRACE
        assert span.attributes["kvferry.outcome"] == "ok"
        assert span.attributes["kvferry.bytes"] > 0
        assert span.attributes["kvferry.chunks"] > 1
        assert 0 < span.end_time - span.start_time < 60e9
    assert moved.attributes["kvferry.tokens"] >= loaded.attributes["kvferry.tokens"] == 199
    assert moved.attributes["kvferry.path"] in ("shm", "cma", "tcp", "ucx")
    assert loaded.attributes["kvferry.path"] == ("pool" if pushes else moved.attributes["kvferry.path"])
    assert loaded.start_time >= found.start_time
    assert not [span for span in named(exported) if span.attributes["gen_ai.request.id"] == "other"]
    assert not named(exported, "kvferry.pull" if pushes else "kvferry.push")


def named(exported: InMemorySpanExporter, name: str = "", parent: str = "") -> list[Any]:
    spans: list[Any] = list(exported.get_finished_spans())
    return [span for span in spans if name in ("", span.name) and parent in ("", f"{span.parent.span_id:016x}")]


def request(request_id: str) -> Any:
    return SimpleNamespace(request_id=request_id, trace_headers=traceparent(DECODE), kv_transfer_params=None)


def test_a_lookup_that_waits_is_one_span_from_its_begin(exported: InMemorySpanExporter) -> None:
    spans, times = LookupSpans(exports=True), []
    for found in (None, None, 64):
        times.append(time.time_ns())
        assert spans.lookup(request("d"), 32, lambda _, __, found=found: (found, True)) == (found, True)
    (span,) = exported.get_finished_spans()
    assert span.start_time is not None and span.end_time is not None
    assert times[0] <= span.start_time <= times[1]
    assert span.end_time >= times[2]
    assert (span.attributes or {})["kvferry.local_tokens"] == 32


def test_a_request_that_ends_while_it_waits_leaves_nothing(exported: InMemorySpanExporter) -> None:
    spans = LookupSpans(exports=True)
    spans.lookup(request("d"), 0, lambda *_: (None, False))
    assert spans.finished(request("d"), None) is None
    before = time.time_ns()
    spans.lookup(request("d"), 0, lambda *_: (0, False))  # another request with the same id
    (span,) = exported.get_finished_spans()
    assert span.start_time is not None
    assert span.start_time >= before
