"""OpenTelemetry spans of requests, exported over OTLP/HTTP. This module is imported only if an endpoint is configured.

Each stage (see RequestLog) has a span. The spans of stages that wait for the decode server are children of the span
`decode`; this span and those of all other stages are children of the request's span.
"""

import threading
import time

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    set_span_in_context,
)

from kvferry_launch.proxy.nodes import Node
from kvferry_launch.proxy.request_trace import RequestTrace
from kvferry_launch.proxy.trace_context import Headers, TraceContext, of_client

_OF_DECODE = ("hand_over", "first_byte", "rest")
_OF_SERVERS = ("prefill", "decode")
_FAILURE_MAX = 300  # limit on the text of a failure, in characters
SHUTDOWN_S = 5.0


class Spans:
    """Makes the traces of requests, and exports their spans. `endpoint`: the URL to which `/v1/traces` is appended; if
    it is empty, the variables of OpenTelemetry name the endpoint.
    """

    def __init__(self, endpoint: str, name_space: str) -> None:
        exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None)
        resource = Resource.create({SERVICE_NAME: "kvferry-proxy", "service.namespace": name_space})
        self._provider = TracerProvider(resource=resource.merge(OTELResourceDetector().detect()),
                                        shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kvferry.proxy")

    def trace(self, path: str, headers: Headers) -> "SpannedTrace":
        return SpannedTrace(self._tracer, path, headers)

    def shutdown(self) -> None:
        """Exports the spans that are left. Spans that are not exported within SHUTDOWN_S are lost."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(SHUTDOWN_S)


class SpannedTrace(RequestTrace):
    def __init__(self, tracer: Tracer, path: str, headers: Headers) -> None:
        client = of_client(headers)
        self._tracer = tracer
        # The difference of the two clocks is taken once, so that setting the host's clock changes no duration.
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._at_ns = self._now_ns()  # end of one span and start of the next one, so that durations add up
        self._request = self._span(f"POST {path}", None if client is None else _remote(client), SpanKind.SERVER,
                                   {"http.request.method": "POST", "url.path": path})
        made = self._request.get_span_context()
        self._context = TraceContext(f"{made.trace_id:032x}", f"{made.span_id:016x}", made.trace_flags,
                                     client.state if client is not None else "")
        self._decode: Span | None = None
        self._stage: Span | None = None

    def _span(self, name: str, parent: Span | None, kind: SpanKind, attributes: dict[str, str]) -> Span:
        context = set_span_in_context(parent) if parent is not None else None
        return self._tracer.start_span(name, context, kind, attributes, start_time=self._at_ns)

    def _now_ns(self) -> int:
        return self._epoch_ns + time.monotonic_ns()

    def headers(self) -> dict[str, str]:
        current = (self._decode or self._stage or self._request).get_span_context()
        return self._context.below(f"{current.span_id:016x}", current.trace_flags).headers()

    def enter(self, stage: str, node: Node | None) -> None:
        server = {} if node is None else {"kvferry.engine_id": _text(node.engine_id), "url.full": _text(node.serves)}
        if stage not in _OF_DECODE:
            self._end_decode()
        elif self._decode is None:
            self._decode = self._span("decode", self._request, SpanKind.CLIENT, server)
        kind = SpanKind.CLIENT if stage in _OF_SERVERS else SpanKind.INTERNAL
        self._stage = self._span(stage, self._decode or self._request, kind, server)

    def leave(self, failure: str) -> None:
        self._at_ns = self._now_ns()
        for span in (self._stage, self._decode):
            if span is not None and failure:
                span.set_status(Status(StatusCode.ERROR, _text(failure[:_FAILURE_MAX])))
        if self._stage is not None:
            self._stage.end(self._at_ns)

    def _end_decode(self) -> None:
        if self._decode is not None:
            self._decode.end(self._at_ns)
            self._decode = None

    def end(self, status: str, request_id: str, num_tokens: int | None) -> None:
        self._end_decode()
        self._request.set_attribute("kvferry.request_id", _text(request_id))
        if num_tokens is not None:
            self._request.set_attribute("kvferry.prompt_tokens", num_tokens)
        if status.isdigit():
            self._request.set_attribute("http.response.status_code", int(status))
        if not status.isdigit() or int(status) >= 500:
            self._request.set_status(Status(StatusCode.ERROR, status))
        self._request.end(self._at_ns)


def _text(value: str) -> str:
    """Returns the text without surrogates, because a span with a surrogate can't be exported."""
    return value.encode(errors="replace").decode()


def _remote(context: TraceContext) -> Span:
    return NonRecordingSpan(SpanContext(int(context.trace_id, 16), int(context.span_id, 16), is_remote=True,
                                        trace_flags=TraceFlags(context.flags)))
