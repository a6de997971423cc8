"""Spans of lookups, in the trace of vLLM's request. vLLM exports them if it has `--otlp-traces-endpoint`.

The traceparent may also be in kv_transfer_params. launch/proxy puts it there, since a vLLM that exports no spans drops
the header. A prefill node puts it into its hand-off, for routers that don't pass the header on.
"""

import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.tracing import extract_trace_context, instrument_manual

if TYPE_CHECKING:
    from vllm.v1.request import Request

Answer = tuple[int | None, bool]

TRACEPARENT = "kvferry_traceparent"
_FORM = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class LookupSpans:
    """`exports`: True if vLLM exports spans; otherwise none are made."""

    def __init__(self, *, exports: bool) -> None:
        self._exports = exports
        self._begun: dict[str, int] = {}  # [request id] start time of a lookup that is pending

    def lookup(self, request: "Request", num_computed: int, ask: Callable[["Request", int], Answer]) -> Answer:
        """Returns the answer of `ask`. If the request is traced, exports a span that ends with the first
        answer that is not pending.
        """
        headers = trace_headers(request) if self._exports else None
        if headers is None:
            return ask(request, num_computed)
        begin = self._begun.pop(request.request_id, None) or time.time_ns()
        found, is_async = ask(request, num_computed)
        if found is None:
            self._begun[request.request_id] = begin
        else:
            attributes = {"gen_ai.request.id": request.request_id, "kvferry.local_tokens": num_computed,
                          "kvferry.found_tokens": found}
            instrument_manual("kvferry.lookup", begin, time.time_ns(), attributes, extract_trace_context(headers))
        return found, is_async

    def finished(self, request: "Request", params: dict[str, Any] | None) -> dict[str, Any] | None:
        """Returns the request's kv_transfer_params, with its traceparent if they are a hand-off to a decode node."""
        self._begun.pop(request.request_id, None)
        if params is not None and params.get("do_remote_prefill") and (headers := trace_headers(request)) is not None:
            params[TRACEPARENT] = headers["traceparent"]
        return params


def trace_headers(request: "Request") -> Mapping[str, Any] | None:
    """Returns the headers with the request's trace; None if the request is not traced."""
    headers: Mapping[str, Any] | None = request.trace_headers
    if headers is None:
        params = request.kv_transfer_params
        headers = {"traceparent": params.get(TRACEPARENT)} if isinstance(params, dict) else {}
    sent = headers.get("traceparent")
    return headers if isinstance(sent, str) and _FORM.fullmatch(sent) else None


def trace_id(request: "Request") -> str:
    """Returns the request's W3C trace id, 32 hexadecimal digits; an empty text if the request has none."""
    headers = trace_headers(request)
    return str(headers["traceparent"])[3:35] if headers is not None else ""
