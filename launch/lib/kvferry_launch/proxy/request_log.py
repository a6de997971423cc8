"""Records the servers of a request and the parts of its time, for the metrics, the trace and one line of the log."""

import time
from collections.abc import Callable

from kvferry_launch.proxy.metrics import Metrics
from kvferry_launch.proxy.nodes import Choice, Node
from kvferry_launch.proxy.request_trace import RequestTrace

_ID_MAX = 80  # limit on a client's request id in the log, in characters


class RequestLog:
    """Divides the time of one request into stages. Each moment belongs to one stage, so the stages' times add up to the
    time of the request.
    """

    def __init__(self, metrics: Metrics, trace: RequestTrace, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics, self._clock = metrics, clock
        self._begin = self._since = clock()
        self._stage = "read"
        self._failure = ""  # why the current stage failed; empty: it did not fail
        self._seconds: dict[str, float] = {}
        self._pairs: list[str] = []
        self.trace = trace
        self.request_id = ""
        self.tenant = ""
        self.num_tokens: int | None = None
        trace.enter(self._stage, None)

    def enter(self, stage: str, node: Node | None = None) -> None:
        """Ends the current stage, and begins another one. `node`: the server to which the new stage's request goes."""
        self._end_stage()
        self._stage = stage
        self.trace.enter(stage, node)

    def failed(self, reason: str) -> None:
        """Marks the current stage as failed. The stage's time counts for the line of the log, but not for the metrics.
        """
        self._failure = reason

    def _end_stage(self) -> None:
        now = self._clock()
        seconds, self._since = now - self._since, now
        self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + seconds
        if not self._failure:
            self._metrics.observe(self._stage, seconds)
        self.trace.leave(self._failure)
        self._failure = ""

    def tries(self, choice: Choice) -> None:
        prefill = choice.prefill.engine_id if choice.prefill is not None else f"no prefill ({choice.reason})"
        self._pairs.append(f"{prefill}, {choice.decode.engine_id}")

    def end(self, status: str, is_shutting_down: bool = False) -> None:
        """Ends the request. `status`: the HTTP status, or "cancelled" if the client closed its connection or the proxy
        is shutting down.
        """
        if status == "cancelled":
            self.failed("the proxy was shutting down" if is_shutting_down else "the client closed its connection")
        self._end_stage()
        if status != "cancelled":
            self._metrics.observe("total", self._since - self._begin)
        self.trace.end(status, self.request_id[:_ID_MAX], self.num_tokens)

    def line(self, path: str, status: str) -> str:
        """Returns a line like "POST /v1/completions 200 in 253.1 ms, request 7f3a, trace 0af7: 9 tokens; p0, d0;
        read 0.1 ms, prefill 253.0 ms". It must be called after end().
        """
        parts = [f"POST {path} {status} in {(self._since - self._begin) * 1e3:.1f} ms"
                 + (f", request {self.request_id[:_ID_MAX]}" if self.request_id else "")
                 + f", trace {self.trace.trace_id}"
                 + (f", tenant {self.tenant}" if self.tenant else "")
                 + (f": {self.num_tokens} tokens" if self.num_tokens is not None else "")]
        if self._pairs:
            parts.append(" then ".join(self._pairs))
        parts.append(", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in self._seconds.items()))
        return "; ".join(parts)
