"""Spans of loads, pulls and pushes, in the trace of vLLM's request; see lookup_spans.py. They are made of what the
flight recorder has when a transfer has ended, so nothing is measured for them.
"""

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.tracing import extract_trace_context, instrument_manual

from kvferry.ended_transfers import EndedTransfer, EndedTransfers
from kvferry.spans.lookup_spans import trace_headers

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from kvferry._core import SchedulerNode

REQUESTS_MAX = 4096  # number of requests that the flight recorder keeps
# Spans are exported once more, without a step, this long after the last traced request has finished: the request's
# push may end when no further step follows.
FLUSH_AFTER_S = 1.0


class TransferSpans:
    """Exports the spans of ended transfers in each step, and once more, without a step, FLUSH_AFTER_S after the last
    traced request has finished.
    """

    def __init__(self, node: "SchedulerNode") -> None:
        self._transfers = EndedTransfers(node)
        self._headers: dict[str, Mapping[str, Any]] = {}  # [request id] headers of traced requests, oldest first
        self._pulled_over: dict[str, str] = {}  # [request id] path of the last pull whose chunks were not loaded yet
        self._lock = threading.Lock()
        self._flush_at = 0.0
        self._flusher: threading.Thread | None = None
        self._is_shut_down = threading.Event()

    def begin(self, request: "Request") -> None:
        headers = trace_headers(request)
        if headers is None:
            return
        self._headers.pop(request.request_id, None)
        self._headers[request.request_id] = headers
        if len(self._headers) > REQUESTS_MAX:
            oldest = next(iter(self._headers))
            del self._headers[oldest]
            self._pulled_over.pop(oldest, None)

    def finished(self, request: "Request") -> None:
        """Makes a thread export the spans of transfers that end within FLUSH_AFTER_S, even if no step follows."""
        if request.request_id not in self._headers:
            return
        self._flush_at = time.monotonic() + FLUSH_AFTER_S
        if self._flusher is None or not self._flusher.is_alive():
            self._flusher = threading.Thread(target=self._flush, name="kvferry-spans", daemon=True)
            self._flusher.start()

    def _flush(self) -> None:
        while (left := self._flush_at - time.monotonic()) > 0:  # requests that finish later postpone _flush_at
            if self._is_shut_down.wait(left):
                return
        self.export()

    def export(self) -> None:
        """Makes a span of each transfer of traced requests that has ended since the last call."""
        with self._lock:
            now = time.time_ns()
            for transfer in self._transfers.take():
                if (headers := self._headers.get(transfer.request_id)) is not None:
                    self._export(transfer, headers, now - transfer.ended_ago)

    def _export(self, transfer: EndedTransfer, headers: Mapping[str, Any], end: int) -> None:
        path = transfer.path
        if transfer.kind == "pull":
            self._pulled_over[transfer.request_id] = path
        elif transfer.kind == "load":  # without a pull, the path is "pool", however the chunks got there
            path = self._pulled_over.pop(transfer.request_id, "pool")
        attributes = {
            "gen_ai.request.id": transfer.request_id, "kvferry.tokens": transfer.tokens,
            "kvferry.chunks": transfer.chunks, "kvferry.bytes": transfer.bytes, "kvferry.path": path,
            "kvferry.outcome": transfer.outcome,
        }  # fmt: skip
        instrument_manual(f"kvferry.{transfer.kind}", end - transfer.duration, end, attributes,
                          extract_trace_context(headers))

    def shutdown(self) -> None:
        self._is_shut_down.set()
        if self._flusher is not None:
            self._flusher.join()
        self.export()


def make_transfer_spans(vllm_config: "VllmConfig", node: "SchedulerNode") -> TransferSpans | None:
    """Returns None if vLLM exports no spans."""
    return TransferSpans(node) if vllm_config.observability_config.otlp_traces_endpoint else None
