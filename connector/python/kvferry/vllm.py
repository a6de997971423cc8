"""KvFerryConnector: plugs kvferry into unmodified vLLM, of the versions in compat.py.

    --kv-transfer-config '{"kv_connector": "KvFerryConnector", "kv_connector_module_path": "kvferry.vllm",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

The class has one instance in EngineCore (SCHEDULER) and one in each rank (WORKER). What is loaded, saved, fetched and
pushed is decided in C++, in connector/core.
"""

import contextlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvferry.compat import check_version

check_version()  # first, because versions that are too old lack what is imported below

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvferry._core import KvFerryError, check_config
from kvferry.handshake import StepPlan, StepReport
from kvferry.scheduler_connector import SchedulerConnector
from kvferry.spans.lookup_spans import LookupSpans
from kvferry.stats import KvFerryPromMetrics, KvFerryStats
from kvferry.worker_connector import WorkerConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class KvFerryConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerConnector(vllm_config, kv_cache_config)
            self._spans = LookupSpans(exports=vllm_config.observability_config.otlp_traces_endpoint is not None)
        else:
            self._worker = WorkerConnector(vllm_config, kv_cache_config)

    # ---- scheduler side ----
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._scheduler.attach_workers(metadata)
        if self._scheduler.events is not None:
            self._scheduler.events.begin()

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        self._scheduler.bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler.events is not None:
            self._scheduler.events.bind(kv_cache_manager)

    def on_new_request(self, request: "Request") -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler.spans is not None:
            self._scheduler.spans.begin(request)
        return self._spans.lookup(request, num_computed_tokens, self._scheduler.get_num_new_matched_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        plan = self._scheduler.build_connector_meta(scheduler_output)
        if self._scheduler.events is not None:
            self._scheduler.events.name_chunks()
        return plan

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        holds, params = self._scheduler.request_finished(request, block_ids)
        if self._scheduler.events is not None:
            self._scheduler.events.name_chunks(request)
        if self._scheduler.spans is not None:
            self._scheduler.spans.finished(request)
        return holds, self._spans.finished(request, params)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        self._scheduler.update_connector_output(connector_output)
        if self._scheduler.spans is not None:
            self._scheduler.spans.export()

    def has_pending_push_work(self) -> bool:
        return self._scheduler.needs_step_for_reports()

    def take_events(self) -> "Iterable[KVCacheEvent]":
        return () if self._scheduler.events is None else self._scheduler.events.take()

    def reset_cache(self) -> bool | None:
        return self._scheduler.reset_cache()

    # ---- worker side ----
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register_kv_caches(kv_caches)

    def unregister_kv_caches(self) -> None:
        self._worker.finish_device_work()

    def restore_kv_caches(self) -> None:
        """Does nothing: vLLM maps its KV tensors at the addresses that they had before the server slept."""

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._worker.handshake()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        # vLLM calls this first in every step, so blocks that are reassigned in this step still contain their old KV.
        assert isinstance(kv_connector_metadata, StepPlan)
        self._worker.begin_step(kv_connector_metadata)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        del forward_context, kwargs
        self._worker.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: a load ends before vLLM computes the request that waits for it."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        del kv_layer, attn_metadata, kwargs
        self._worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        self._worker.save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        del finished_req_ids  # kvferry sends chunks from its own pool, so no request's blocks wait for a send
        loads = self._worker.take_finished_loads()
        return KVConnectorTransferResults(
            finished_sending=set(),
            finished_recving={req_id for req_id, _ in loads},
            failed_recving={req_id for req_id, ok in loads if not ok},
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> StepReport | None:
        return self._worker.take_report()

    # ---- both sides ----
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self.role != KVConnectorRole.SCHEDULER:
            return None
        if self._scheduler.events is not None:  # vLLM asks for statistics just before it takes its own events
            self._scheduler.events.look_at_vllms_events()
        return self._scheduler.take_stats()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Returns True if push_layers is set: full CUDA graphs run the layers without calling save_kv_layer()."""
        try:
            settings = check_config(json.dumps(extra_config))
        except KvFerryError:
            return False  # the connector refuses to start, and says why
        return bool(settings["push_layers"] > 0)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Returns True: between unregister_kv_caches() and restore_kv_caches() nothing accesses vLLM's KV tensors."""
        del kv_transfer_config
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return KvFerryStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return KvFerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self.role == KVConnectorRole.SCHEDULER:
            if self._scheduler.spans is not None:
                self._scheduler.spans.shutdown()
            self._scheduler.shutdown()
        else:
            self._worker.shutdown()


# vLLM's MultiConnector looks up the class for its metrics by the class's name alone, without the module's path. The
# name must therefore be registered.
with contextlib.suppress(ValueError):  # raised if the class is registered already
    KVConnectorFactory.register_connector(KvFerryConnector.__name__, __name__, KvFerryConnector.__name__)
