"""The proxy's metrics for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
STAGES = ("read", "tokenize", "pair", "prefill", "hand_over", "first_byte", "rest", "total")


class Metrics:
    """The metrics of one proxy."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests by path and status that the client got", "path", "status")
        self.retries = self._counter("retries", "Tries of requests that ended because a server failed, by the kind of "
                                     "that server", "role")
        self.resent = self._counter("resent", "Requests sent to a server again, because the idle connection that was "
                                    "used had ended")
        self.cancelled = self._counter("cancelled", "Requests whose client closed the connection")
        self.skipped_prefills = self._counter(
            "skipped_prefills", "Requests that only a decode server served, by reason", "reason")
        self.first_tokens = self._counter(
            "first_tokens", "Answers, by the server that sampled their first token (source) and, if that was the "
            "decode server, why (reason)", "source", "reason")
        self.continued_streams = self._counter(
            "continued_streams", "Streamed answers that another decode server continued, because the first one failed")
        self.broken_streams = self._counter("broken_streams", "Streamed answers that ended in an error event")
        self.stripped_params = self._counter("stripped_params",
                                             "Requests from which a client's own KV transfer parameters were removed")
        self.unpaired = self._counter("unpaired", "Requests refused because there was no pair of servers")
        self.controller_errors = self._counter("controller_errors",
                                               "Requests to the controller that got no answer, or neither a list nor a "
                                               "pair of servers")
        self.in_flight = Gauge("kvferry_proxy_in_flight", "Requests under way", registry=self.registry)
        self.nodes = Gauge("kvferry_proxy_nodes", "Servers by role and state", ["role", "state"],
                           registry=self.registry)
        self.controller_up = Gauge("kvferry_proxy_controller_up", "Whether the controller answers",
                                   registry=self.registry)
        self._seconds = Histogram("kvferry_proxy_stage_seconds", "Time of requests by stage", ["stage"],
                                  buckets=_BUCKETS, registry=self.registry)
        # The labelled histograms are made once, because labels() is slow.
        self._seconds_of = {stage: self._seconds.labels(stage) for stage in STAGES}

    def observe(self, stage: str, seconds: float) -> None:
        self._seconds_of[stage].observe(seconds)

    def text(self) -> bytes:
        return bytes(generate_latest(self.registry))

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"kvferry_proxy_{name}", help_text, labels, registry=self.registry)
