"""kvferry's metrics on vLLM's own /metrics."""

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvferry.ended_transfers import EndedTransfers, sample

if TYPE_CHECKING:
    from kvferry._core import SchedulerNode

COUNTERS = {
    "lookups_total": "Lookups of requests before their admission.",
    "lookup_hits_total": "Lookups that found KV that the engine's own prefix cache lacks.",
    "hit_tokens_total": "Tokens admitted with KV from kvferry.",
    "loads_total": "Loads from the chunk pool into engine blocks.",
    "loaded_tokens_total": "Tokens loaded and verified.",
    "load_failures_total": "Chunks not loaded because their checksum did not match or their slot had another chunk, "
                           "counted by each rank.",
    "resumed_total": "Admissions of requests that had been preempted.",
    "resumed_hit_tokens_total": "Tokens of preempted requests that were admitted again with KV from kvferry.",
    "saved_chunks_total": "Chunks saved from engine blocks into the pool.",
    "saved_tokens_total": "Tokens saved from engine blocks into the pool.",
    "save_failures_total": "Saves that failed.",
    "pool_full_total": "Chunks not saved or fetched because every slot was pinned, being written or within another "
                       "tenant's share.",
    "pulls_total": "Pulls from other nodes' pools.",
    "pulled_chunks_total": "Chunks pulled and verified.",
    "pulled_in_frames_total": "Chunks pulled from GPU memory to GPU memory, counted by each rank.",
    "pulled_past_frames_total": "Chunks that the other node had in GPU memory, but that were pulled through host "
                                "memory or, if it had them in GPU memory only, not at all; counted by each rank.",
    "prepared_total": "Prompts that were loaded into engine blocks while they were pushed here.",
    "preparations_refused_total": "Preparations (requests that a router sends ahead) that did not begin: all chunks of "
                                  "the prompt were here, or a limit on preparations would be exceeded.",
    "preparations_abandoned_total": "Preparations that ended without use: chunks or the request did not come, or "
                                    "others needed the blocks.",
    "slot_copies_failed_total": "Copies of pulled chunks from GPU memory to host memory that failed, counted by each "
                                "rank; such a chunk is dropped.",
    "pull_failures_total": "Chunks whose pull failed, or whose bytes did not match their checksum, counted by each "
                           "rank.",
    "fetch_timeouts_total": "Waits for KV, the controller or another node that ended at their deadline.",
    "leases_granted_total": "Leases given to other nodes.",
    "pins_expired_total": "Pins that ended at their deadline.",
    "evicted_chunks_total": "Chunks evicted from the pool.",
    "evicted_for_tenants_total": "Chunks evicted from a tenant above its share of the pool, for one of another tenant.",
    "purged_chunks_total": "Chunks dropped on a purge: the purged node had computed them or passed them on, or they "
                           "were computed from such KV.",
    "pins_refused_total": "Chunks not pinned for the controller because it had already pinned half of the pool.",
    "pushed_chunks_total": "Chunks pushed to decode nodes while their prompt was computed.",
    "announced_chunks_total": "Chunks announced to decode nodes, which pull them from GPU memory to GPU memory.",
    "push_failures_total": "Chunks for which a decode node reserved a slot but whose push failed.",
    "tickets_refused_total": "Addresses in kv_transfer_params that were ignored for lack of a valid ticket.",
    "accesses_refused_total": "Reads and writes of this node's memory refused because the peer had no grant for them "
                              "or none any more, counted by each rank.",
    "mislabeled_chunks_total": "Chunks dropped because another node reported a wrong number of tokens for them.",
    "unasked_answers_total": "Answers ignored because they came from a node that was not asked.",
    "leases_refused_total": "Lease requests refused because other nodes already held leases on too many chunks.",
    "holders_suspected_total": "Times that fetching from a node was paused because nothing arrived from it in time.",
    "writes_abandoned_total": "Chunks given up because the node that pushed them stopped in the middle of a copy.",
    "unknown_releases_total": "Messages ignored because they end a lease or a push that this node does not have.",
    "unknown_handoffs_total": "Hand-offs named by other nodes that this node has not made, or does not pin any more.",
    "received_chunks_total": "Chunks received by push from prefill nodes.",
}
# Counters with the label `reason`. In a report the reason is a part of the name: recomputed_tokens_total{evicted}.
COUNTERS_BY_REASON = {
    "recomputed_tokens_total": "Tokens computed again although they had been computed before, here or by the node that "
                               "handed them over, by cause.",
}
GAUGES = {
    "pool_chunks": "Chunks in the pool.",
    "pool_slots": "Slots of the pool.",
    "pool_tenants": "Tenants, told apart by cache_salt, that have chunks in the pool.",
    "pool_pinned_chunks": "Chunks pinned by lookups, loads, leases and handoffs.",
    "pool_controller_pinned_chunks": "Chunks pinned by order of the controller.",
    "fetching_requests": "Requests that wait for KV from other nodes.",
    "open_pushes": "Prompts that are being pushed.",
    "open_push_reservations": "Pushes from other nodes for which slots are reserved or announcements are expected.",
}
# Histograms with the labels `direction`, push or pull, and `path`, the name of a transport. They leave out transfers by
# which no chunk arrived: see pull_failures_total and push_failures_total.
HISTOGRAMS = {
    "transfer_seconds": "Time of transfers. A pull: from its order until its last chunk has arrived. A push: from when "
                        "its last chunk was saved, or was ordered to be pushed if the pool had it, until its end.",
    "transfer_bytes": "Bytes of a transfer, of all ranks together.",
    "transfer_chunks": "Chunks of a transfer.",
}
# Histograms with the labels `path` and `stage`.
HISTOGRAMS_BY_STAGE = {"pull_stage_seconds": "Time of pulls by stage: queue, post, wire and unpack."}
BUCKETS = {
    "transfer_seconds": [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10],
    "transfer_bytes": [1e5, 3e5, 1e6, 3e6, 1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10],
    "transfer_chunks": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512],
    "pull_stage_seconds": [0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5],
}
TRANSFERS = "transfers"  # in a report: the samples (see sample()) of transfers since the last report


class KvFerryStats(KVConnectorStats):
    """The connector's values for /metrics. `data` maps a name to its value: the growth of a counter since the last
    report, the value of a gauge, or the list of samples of transfers.
    """

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> "KvFerryStats":
        for name, value in other.data.items():
            grows = name not in GAUGES and name in self.data
            self.data[name] = self.data[name] + value if grows else value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: int(value) for name, value in self.data.items()
                if name != TRANSFERS and (value or name in GAUGES)}


class StatsSource:
    """Computes the growth of the node's counters, and collects its transfers, since the last report."""

    def __init__(self, node: "SchedulerNode") -> None:
        self._transfers = EndedTransfers(node)
        self._last: dict[str, float] = {}

    def take(self, metrics: dict[str, float]) -> KvFerryStats:
        data: dict[str, Any] = {name: metrics[name] for name in GAUGES}
        for name in [*COUNTERS, *(name for name in metrics if name.endswith("}"))]:
            growth = metrics[name] - self._last.get(name, 0.0)
            if growth > 0:
                data[name] = growth
        self._last = metrics
        if samples := [one for transfer in self._transfers.take() if (one := sample(transfer)) is not None]:
            data[TRANSFERS] = samples
        return KvFerryStats(data=data)


class KvFerryPromMetrics(KVConnectorPromMetrics):
    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._by_reason = {
            name: self._counter_cls(name=f"kvferry_{name.removesuffix('_total')}", documentation=text,
                                    labelnames=[*labelnames, "reason"])
            for name, text in COUNTERS_BY_REASON.items()
        }  # fmt: skip
        self._histograms = {
            name: self._histogram_cls(name=f"kvferry_{name}", documentation=text, buckets=BUCKETS[name],
                                      labelnames=[*labelnames, *more])
            for table, more in ((HISTOGRAMS, ["direction", "path"]), (HISTOGRAMS_BY_STAGE, ["path", "stage"]))
            for name, text in table.items()
        }  # fmt: skip
        self._metrics: dict[str, dict[int, Any]] = {}
        for name, text in (COUNTERS | GAUGES).items():
            make = self._gauge_cls if name in GAUGES else self._counter_cls
            metric = make(name=f"kvferry_{name.removesuffix('_total')}", documentation=text, labelnames=labelnames)
            self._metrics[name] = {i: metric.labels(*values) for i, values in per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in COUNTERS:
                self._metrics[name][engine_idx].inc(max(0, value))
            elif name in GAUGES:
                self._metrics[name][engine_idx].set(value)
            elif (counter := self._by_reason.get(name.partition("{")[0])) is not None:
                reason = name.partition("{")[2].removesuffix("}")
                counter.labels(*self.per_engine_labelvalues[engine_idx], reason).inc(max(0, value))
        for one in transfer_stats_data.get(TRANSFERS, []):
            self._observe_transfer(one, engine_idx)

    def _observe_transfer(self, one: list[Any], engine_idx: int) -> None:
        direction, path, *values, stages = one
        engine = self.per_engine_labelvalues[engine_idx]
        for name, value in zip(HISTOGRAMS, values, strict=True):
            self._histograms[name].labels(*engine, direction, path).observe(value)
        for stage, seconds in stages.items():
            self._histograms["pull_stage_seconds"].labels(*engine, path, stage).observe(seconds)
