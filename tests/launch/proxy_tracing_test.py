"""Tests the traces of launch/proxy: one trace id for a request, whatever the client sends, and spans at a collector."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from typing import Any

import pytest
from aiohttp import web
from kvferry_launch.paths import REPO
from kvferry_launch.proxy import bodies, main
from kvferry_launch.proxy.trace_context import TraceContext, of_client
from proxy_stand_ins import Cluster, run

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"
MALFORMED = [
    "", "x", GOOD[:-1], GOOD + "0", GOOD + "-more", GOOD.upper(), f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01",
    f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE}-{SPAN}-zz", f"00-{TRACE}-{SPAN}", GOOD.replace("-", "_"),
    f"01-{TRACE}-{SPAN}-01-" + "x" * 300, f"00-{TRACE}-{SPAN}-01-" + "x" * 7000, "\u0660" * 55]


class Sent(dict[str, list[str]]):
    """Headers of a client: the values for each name."""

    def getall(self, name: str, default: list[str], /) -> list[str]:
        return self.get(name) or default


def context(traceparent: str | list[str], *tracestates: str) -> TraceContext | None:
    sent = [traceparent] if isinstance(traceparent, str) else traceparent
    return of_client(Sent({"traceparent": sent, "tracestate": list(tracestates)}))


# ---- the trace context ----
@pytest.mark.parametrize("traceparent", MALFORMED)
def test_a_malformed_traceparent_is_none(traceparent: str) -> None:
    assert context(traceparent, "vendor=1") is None


def test_a_traceparent_counts_once_and_of_later_versions_what_is_known() -> None:
    assert context([]) is None
    assert context([GOOD, GOOD]) is None
    assert context(GOOD) == TraceContext(TRACE, SPAN, 1, "")
    assert context(f"01-{TRACE}-{SPAN}-ff-more") == TraceContext(TRACE, SPAN, 3, "")
    made = context(f"cc-{TRACE}-{SPAN}-00")
    assert made is not None
    assert made.headers() == {"traceparent": f"00-{TRACE}-{SPAN}-00"}


@pytest.mark.parametrize(("sent", "passed_on"), [
    (["a=1"], "a=1"), (["a=1 , b@x=2,", "c=3"], "a=1,b@x=2,c=3"), (["a=1", "b"], ""), (["a=1,a=2"], ""), (["A=1"], ""),
    (["a=1\x7f"], ""), (["a=\u00e9"], ""), (["a=" + "1" * 256], "a=" + "1" * 256), (["a=" + "1" * 257], ""),
    (["a=" + "1" * 256 + ",b=" + "1" * 251], "a=" + "1" * 256 + ",b=" + "1" * 251),
    (["a=" + "1" * 256 + ",b=" + "1" * 252], ""),
    ([",".join(f"k{number}=1" for number in range(32))], ",".join(f"k{number}=1" for number in range(32))),
    ([",".join(f"k{number}=1" for number in range(33))], ""), (["a=1=2"], "")])
def test_a_tracestate_goes_on_whole_or_not_at_all(sent: list[str], passed_on: str) -> None:
    made = context(GOOD, *sent)
    assert made is not None
    assert made.state == passed_on


# ---- what servers get ----
def trace_headers(c: Cluster) -> list[tuple[str | None, str | None]]:
    return [(got.get("traceparent"), got.get("tracestate"))
            for server in c.controller.servers for got in server.headers]


def test_without_spans_both_servers_get_the_clients_context_or_one_that_is_made() -> None:
    async def test(c: Cluster) -> None:
        assert (await c.post({"prompt": "a"}, traceparent=GOOD, tracestate="a=1,b=2"))[0] == 200
        assert trace_headers(c) == [(GOOD, "a=1,b=2")] * 2
        assert (await c.post({"prompt": "a"}, tracestate="a=1,b=2"))[0] == 200
        made = {headers for headers in trace_headers(c) if headers[0] != GOOD}
        assert len(made) == 1
        ((traceparent, tracestate),) = made
        assert re.fullmatch(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-01", str(traceparent))
        assert tracestate is None, "it belongs to no trace"
        params = [got["kv_transfer_params"]["kvferry_traceparent"] for got in c.prefills[0].got]
        assert params == [GOOD, traceparent], "vLLM drops the header if it exports no spans"

    run(test)


def test_malformed_and_long_headers_reach_no_server(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvferry.proxy")

    async def test(c: Cluster) -> None:
        for traceparent in MALFORMED:
            assert (await c.post({"prompt": "a"}, traceparent=traceparent, tracestate="vendor=1" * 99))[0] == 200
        got = trace_headers(c)
        assert len(got) == 2 * len(MALFORMED)
        assert all(re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", str(traceparent)) for traceparent, _ in got)
        assert {tracestate for _, tracestate in got} == {None}
        assert len({str(traceparent)[3:35] for traceparent, _ in got}) == len(MALFORMED), "one trace a request"

    run(test)
    assert {line[3:35] for line in caplog.messages if line.startswith("POST ")}.isdisjoint({TRACE})


# ---- spans ----
def spanned(collector: Any) -> Any:
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed; vLLM brings it")
    from kvferry_launch.proxy.spans import Spans

    return Spans(collector.url, "default")


@pytest.fixture
def collector() -> Any:
    pytest.importorskip("opentelemetry.proto", reason="opentelemetry-proto is not installed; vLLM brings it")
    from otlp_collector import Collector

    with Collector() as made:
        yield made


def attributes(span: Any) -> dict[str, str]:
    from otlp_collector import text_attributes

    return text_attributes(span)


@pytest.mark.parametrize("sent", [GOOD, None])
def test_a_stream_is_one_trace_whose_spans_add_up(collector: Any, sent: str | None,
                                                  caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvferry.proxy")
    spans = spanned(collector)

    async def test(c: Cluster) -> None:
        more = {"traceparent": sent, "tracestate": "a=1"} if sent else {}
        await c.post({"prompt": "a", "stream": True}, **{"X-Request-Id": "r1"}, **more)
        prefill, decode = c.prefills[0].headers[0], c.decodes[0].headers[0]
        assert prefill.get("tracestate") == ("a=1" if sent else None)
        given.update(prefill=prefill["traceparent"], decode=decode["traceparent"])

    given: dict[str, str] = {}
    run(test, make_trace=spans.trace)
    spans.shutdown()
    (request,) = collector.named(f"POST {bodies.COMPLETIONS}")
    assert (collector.services, collector.paths) == ({"kvferry-proxy"}, {"/v1/traces"})
    assert {span.trace_id for span in collector.spans} == {request.trace_id}
    assert request.parent_span_id.hex() == (SPAN if sent else "")
    if sent:
        assert request.trace_id.hex() == TRACE
    (line,) = [line for line in caplog.messages if line.startswith("POST ")]
    assert f", trace {request.trace_id.hex()}: " in line
    of_request = [span for span in collector.spans if span.parent_span_id == request.span_id]
    assert [span.name for span in sorted(of_request, key=lambda span: span.start_time_unix_nano)] == [
        "read", "tokenize", "pair", "prefill", "decode"]
    (decode,) = collector.named("decode")
    of_decode = [span for span in collector.spans if span.parent_span_id == decode.span_id]
    assert [span.name for span in sorted(of_decode, key=lambda span: span.start_time_unix_nano)] == [
        "hand_over", "first_byte", "rest"]
    for whole, parts in ((request, of_request), (decode, of_decode)):
        assert sum(length(part) for part in parts) == length(whole)
    for name, got in given.items():
        (span,) = collector.named(name)
        assert got[:-2] == f"00-{request.trace_id.hex()}-{span.span_id.hex()}-", "a server's spans belong to its call"
        assert int(got[-2:], 16) & 1, "sampled"
        assert attributes(span)["kvferry.engine_id"] == name[0] + "0"
    assert attributes(request)["http.response.status_code"] == "200"
    assert attributes(request)["kvferry.request_id"] == "r1"
    assert attributes(request)["kvferry.prompt_tokens"] == "3"


def length(span: Any) -> int:
    return int(span.end_time_unix_nano - span.start_time_unix_nano)


def test_failures_and_clients_that_go_away_are_seen_in_spans(collector: Any) -> None:
    spans = spanned(collector)

    async def test(c: Cluster) -> None:
        async def fail(_: web.Request) -> web.Response:
            return web.Response(status=500)

        c.prefills[0].on_request = fail
        assert (await c.post({"prompt": "a"}, **{"X-Request-Id": "caf\u00e9"}))[0] == 200
        c.decodes[0].hold.clear()
        asking = asyncio.create_task(c.post({"prompt": "a", "stream": True}))
        while not c.decodes[0].got[1:]:
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        while not c.decodes[0].cancelled:
            await asyncio.sleep(0.01)

    run(test, make_trace=spans.trace)
    spans.shutdown()
    first, second, *_ = sorted(collector.named("prefill"), key=lambda span: span.start_time_unix_nano)
    assert "prefill server p0" in first.status.message
    assert (attributes(first)["kvferry.engine_id"], first.status.code) == ("p0", 2)
    assert (attributes(second)["kvferry.engine_id"], second.status.code) == ("p1", 0)
    answered, cancelled = sorted(collector.named(f"POST {bodies.COMPLETIONS}"),
                                 key=lambda span: span.start_time_unix_nano)
    assert (answered.status.code, cancelled.status.code, cancelled.status.message) == (0, 2, "cancelled")
    assert collector.named("decode")[-1].status.message == "the client closed its connection"


def test_a_request_that_the_proxys_end_cuts_off_is_not_ascribed_to_its_client(collector: Any) -> None:
    spans = spanned(collector)

    async def test(c: Cluster) -> None:
        c.decodes[0].hold.clear()
        asking = asyncio.create_task(c.post({"prompt": "a"}))
        while not c.decodes[0].got:
            await asyncio.sleep(0.01)
        await c.runner.cleanup()
        await asyncio.gather(asking, return_exceptions=True)

    run(test, make_trace=spans.trace)
    spans.shutdown()
    assert collector.named("decode")[-1].status.message == "the proxy was shutting down"


def test_a_request_id_that_is_no_text_loses_no_spans(collector: Any) -> None:
    spans = spanned(collector)
    trace = spans.trace(bodies.CHAT, Sent())
    trace.enter("read", None)
    trace.leave("\udcff")
    trace.end("200", "\udcff", None)
    spans.shutdown()
    (request,) = collector.named(f"POST {bodies.CHAT}")
    assert attributes(request)["kvferry.request_id"] == "?"


# ---- the program ----
def proxy(arguments: list[str], **more: Any) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, str(REPO / "launch" / "proxy"), "--port", "0", *arguments], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)


@pytest.mark.parametrize("by_option", [True, False])
def test_the_program_sends_its_spans_when_it_ends(collector: Any, by_option: bool) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed; vLLM brings it")

    async def test(c: Cluster) -> None:
        process = proxy(["--controller", c.controller.url, *(["--otlp-endpoint", collector.url] if by_option else [])],
                        env=dict(os.environ) | ({} if by_option else {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
                                                                      "OTEL_SERVICE_NAME": "my-proxy"}))
        assert process.stdout is not None
        c.url = (await asyncio.to_thread(process.stdout.readline)).split()[-1]
        while (await c.get("/health"))[0] != 200:
            await asyncio.sleep(0.05)
        assert (await c.post({"prompt": "a"}))[0] == 200
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.communicate)

    run(test)
    assert len(collector.named(f"POST {bodies.COMPLETIONS}")) == 1
    assert collector.services == {"kvferry-proxy" if by_option else "my-proxy"}


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported() -> None:
    code = ("import sys; from kvferry_launch.proxy import main; assert main.spans_to('', 'default') is None; "
            "print([name for name in sys.modules if name.startswith('opentelemetry')])")
    env = {name: value for name, value in os.environ.items() if name not in main.OTLP_VARIABLES}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          env=env | {"PYTHONPATH": str(REPO / "launch" / "lib")})
    assert done.stdout == "[]\n"


def test_spans_can_be_forbidden_or_not_sampled(monkeypatch: pytest.MonkeyPatch, collector: Any) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    spans = spanned(collector)
    trace = spans.trace(bodies.CHAT, Sent({"traceparent": [GOOD]}))
    trace.enter("prefill", None)
    assert re.fullmatch(rf"00-{TRACE}-[0-9a-f]{{16}}-00", trace.headers()["traceparent"])
    trace.leave("")
    trace.end("200", "r1", None)
    spans.shutdown()
    assert collector.spans == []
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert main.spans_to(collector.url, "default") is None


def test_an_address_that_can_not_be_used_or_a_missing_package_ends_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"^proxy: --otlp-endpoint is 'collector:4318', not http\[s\]://HOST:PORT$"):
        main.spans_to("collector:4318", "default")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "localhost")
    with pytest.raises(SystemExit, match=r"^proxy: OTEL_EXPORTER_OTLP_ENDPOINT is 'localhost', not "
                                         r"http\[s\]://HOST:PORT$"):
        main.spans_to("", "default")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    monkeypatch.delitem(sys.modules, "kvferry_launch.proxy.spans", raising=False)
    with pytest.raises(SystemExit, match=r"^proxy: spans can't be sent to http://x:1 \(--otlp-endpoint\): .*; "
                                         r"install opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http, "):
        main.spans_to("http://x:1", "default")


def test_a_collector_that_is_gone_costs_requests_nothing() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed; vLLM brings it")

    async def test(c: Cluster) -> None:
        process = proxy(["--controller", c.controller.url, "--otlp-endpoint", "http://127.0.0.1:1"])
        assert process.stdout is not None
        c.url = (await asyncio.to_thread(process.stdout.readline)).split()[-1]
        while (await c.get("/health"))[0] != 200:
            await asyncio.sleep(0.05)
        for _ in range(3):
            assert (await c.post({"prompt": "a"}))[0] == 200
        process.send_signal(signal.SIGTERM)
        _, said = await asyncio.to_thread(process.communicate)
        assert "Traceback" not in said
        assert process.returncode == 0

    run(test)
