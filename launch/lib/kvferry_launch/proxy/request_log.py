"""Records the servers of a request and the time of each stage, for the metrics and for one line of the log."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvferry_launch.proxy.metrics import Metrics
from kvferry_launch.proxy.nodes import Choice

_ID_MAX = 80  # limit on a client's request id in the log, in characters


class RequestLog:
    """Collects servers and times while one request is served."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._begin = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._pairs: list[str] = []
        self.request_id = ""
        self.num_tokens: int | None = None

    def elapsed_s(self) -> float:
        return time.monotonic() - self._begin

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Records the duration of the `with` block as the time of stage `name`, unless the block raises an error."""
        begin = time.monotonic()
        yield
        self.observe(name, time.monotonic() - begin)

    def observe(self, stage: str, seconds: float) -> None:
        self._metrics.observe(stage, seconds)
        self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds

    def tries(self, choice: Choice) -> None:
        prefill = choice.prefill.engine_id if choice.prefill is not None else f"no prefill ({choice.reason})"
        self._pairs.append(f"{prefill}, {choice.decode.engine_id}")

    def line(self, path: str, status: str) -> str:
        """Returns a line like "POST /v1/completions 200 in 253.1 ms, request 7f3a: 9 tokens; p0, d0; prefill 1.0 ms".
        """
        parts = [f"POST {path} {status} in {self.elapsed_s() * 1e3:.1f} ms"
                 + (f", request {self.request_id[:_ID_MAX]}" if self.request_id else "")
                 + (f": {self.num_tokens} tokens" if self.num_tokens is not None else "")]
        if self._pairs:
            parts.append(" then ".join(self._pairs))
        if self._seconds:
            parts.append(", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in self._seconds.items()))
        return "; ".join(parts)
