"""The scheduler connector, in EngineCore: translates vLLM's scheduler calls for the C++ scheduler node."""

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from kvferry._core import KvFerryError, SchedulerNode, check_config
from kvferry.blocks.order import block_order, scheduler_specs
from kvferry.compat import hash_block_size, start_line
from kvferry.conversion import conversion, other_chunk_dtype, tell_conversion
from kvferry.errors import refuse_to_start
from kvferry.handshake import StepPlan, StepReport, WorkerHello, checked_payloads
from kvferry.identity import fingerprint
from kvferry.layout import count_chunk_layers
from kvferry.prefix_cache import BlockHashes, PrefixCache
from kvferry.preparations import Preparations, prepared_tokens_max
from kvferry.request_extras import make_extras
from kvferry.router_params import RouterParams
from kvferry.served import checkpoint_alignment, chunk_format, keeps_state, kv_groups, served_specs, settings_json
from kvferry.spans.lookup_spans import trace_id
from kvferry.spans.transfer_spans import make_transfer_spans
from kvferry.stats import KvFerryStats, StatsSource
from kvferry.tickets import KeyFileError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvferry.pool_events import EventSource

logger = init_logger(__name__)

START_TIMEOUT_MS = 10_000
# When a request ends with one of these outcomes, its remaining KV is not saved.
_ABORTED = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_IGNORED, RequestStatus.FINISHED_ERROR)


class SchedulerConnector:
    def __init__(self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        self._is_on_device = vllm_config.device_config.device_type != "cpu"
        specs = served_specs(kv_cache_config, vllm_config)
        extra_json = settings_json(vllm_config, specs)
        try:
            config = check_config(extra_json)
            self._router_params = RouterParams(config["cluster_key_file"])
            saves_drafts = config["save_draft_kv"]
            chunk_dtype = other_chunk_dtype(vllm_config, config["chunk_dtype"])
            converts = conversion(vllm_config, specs, chunk_dtype, saves_draft_kv=saves_drafts)
            self._order = block_order(kv_cache_config, vllm_config, config["whole_blocks"], chunk_dtype)
            own = fingerprint(vllm_config, count_chunk_layers(kv_cache_config, vllm_config, saves_drafts),
                              config["chunk_tokens"], saves_draft_kv=saves_drafts, chunk_dtype=chunk_dtype)
            formats = chunk_format(kv_cache_config, specs, vllm_config, saves_draft_kv=saves_drafts)
            self._fingerprint, told = self._order + formats + own, scheduler_specs(specs, vllm_config)
            self._node = SchedulerNode(
                extra_json=extra_json,
                engine_id=transfer.engine_id,
                role=transfer.kv_role,
                fingerprint=self._fingerprint,
                groups=kv_groups(told),
                whole_blocks=bool(self._order),
                keeps_state=keeps_state(specs),
                checkpoint_alignment=checkpoint_alignment(specs),
                # With asynchronous scheduling or pipeline stages, vLLM plans a step while an earlier step still runs.
                runs_ahead=vllm_config.scheduler_config.async_scheduling or parallel.pipeline_parallel_size > 1,
                start_timeout_ms=START_TIMEOUT_MS,
                on_device=self._is_on_device,
                prepared_tokens_max=0 if self._order else prepared_tokens_max(vllm_config, kv_cache_config),
                conversion=converts,
            )
        except (KvFerryError, KeyFileError) as error:
            refuse_to_start(str(error))
        self._block_hashes = BlockHashes(vllm_config, hash_block_size(kv_cache_config), config["chunk_tokens"])
        self._engine_id, self._tp_size = transfer.engine_id, parallel.tensor_parallel_size
        self._known_tokens: dict[str, int] = {}  # [request id] number of the request's tokens that the node has
        self._requests: dict[str, Request] = {}
        self._extras = make_extras(vllm_config, config)
        # [request id] the extras that go into the request's chunk keys (adapter, weights epoch, cache_salt; see
        # RequestExtras); None: the request's KV is not shared.
        self._extras_of: dict[str, str | None] = {}
        self._wants_report: set[str] = set()
        self._preparations = Preparations()
        # [id of a request admitted since the last update_connector_output()] the request's blocks in KV group 0.
        self._admitted: dict[str, list[int]] = {}
        self._prefix_cache = PrefixCache(self._node)
        self._stats = StatsSource(self._node)
        self.spans = make_transfer_spans(vllm_config, self._node)
        init_logger("vllm.kvferry").log(*start_line())  # vLLM shows INFO lines only of loggers named vllm.*
        self.events: EventSource | None = None
        if (wanted := vllm_config.kv_events_config) is not None and wanted.enable_kv_cache_events:
            from kvferry import pool_events

            self.events = pool_events.EventSource(told, hash_block_size(kv_cache_config), self._node, self._requests)
        logger.info("kvferry: engine %s serves the model of fingerprint '%s' as %s; other nodes reach it at %s:%d",
                    self._engine_id, self._fingerprint, transfer.kv_role, self._node.host, self._node.port)
        tell_conversion(chunk_dtype, converts)

    def attach_workers(self, hellos: dict[tuple[int, int], WorkerHello]) -> None:
        self._node.attach_workers(checked_payloads(hellos, self._fingerprint, self._order))

    def bind_kv_cache_manager(self, manager: "KVCacheManager") -> None:
        self._prefix_cache.manager = manager

    def on_new_request(self, request: "Request", num_local_tokens: int = 0) -> None:
        params = request.kv_transfer_params if isinstance(request.kv_transfer_params, dict) else {}
        tokens = request.prompt_token_ids
        if tokens is None or len(tokens) != request.num_tokens:
            tokens = list(request.all_token_ids)
        request.skip_reading_prefix_cache |= self._extras.lacks_salt(request)  # vLLM's own cache would share the KV
        num_reloads = self._extras.num_reloads
        extras = self._extras.of(request, num_local_tokens)
        if self._extras.num_reloads != num_reloads:
            self._drop_changed()
        prepares = self._router_params.prepares(request.request_id, params, self._engine_id)
        self._node.add_request(
            request_id=request.request_id,
            tokens=tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            digests=self._block_hashes.of(request),
            extras=extras or "",
            items=[(f.mm_position.offset, f.mm_position.length, f.identifier) for f in request.mm_features],
            # Prompt embeddings have no token ids to make keys of, and a streamed session rewrites its history.
            cacheable=request.prompt_embeds is None and not request.resumable and extras is not None,
            handoff=bool(params.get("do_remote_decode")),
            source=self._router_params.handoff_source(request.request_id, params, len(tokens), self._identity),
            push_to=self._router_params.push_target(request.request_id, params),
            arrived_ms=int(request.arrival_time * 1e3),
            trace=trace_id(request), cache_salt=request.cache_salt or "",
            prepares=prepares,
        )
        self._known_tokens[request.request_id] = len(tokens)
        self._requests[request.request_id] = request
        self._prefix_cache.arrived(request)
        self._extras_of[request.request_id] = extras
        if prepares:
            self._preparations.add(request.request_id)
        if params.get("kvferry_report"):
            self._wants_report.add(request.request_id)

    def _identity(self) -> str:
        """Returns the text that must be equal on the prefill node and the decode node of a hand-off."""
        return f"{self._fingerprint} weights_epoch={self._extras.epoch_name}"

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        req_id = request.request_id
        if (request.lora_request is not None and req_id in self._requests
                and self._extras_of[req_id] != self._extras.of(request, num_computed_tokens)):  # fmt: skip
            self._drop(req_id)  # the extras have changed, for example because the adapter was reloaded
        if req_id not in self._known_tokens:
            self.on_new_request(request, num_computed_tokens)
        self._sync_tokens(request)
        if request.skip_reading_prefix_cache:  # None: vLLM asks again, so a preparation never computes its prompt
            return None if req_id in self._preparations else 0, False
        # A load copies from this node's own pool, so on a CPU it is a copy inside the step. On a CPU it is asynchronous
        # for vLLM only for a preparation, or if vLLM could not recover from a failed synchronous load.
        answer = self._node.lookup(req_id, num_computed_tokens)
        # After a purge vLLM asks again in the next step: the blocks or chunks that were found may be purged ones.
        return (None, False) if self._prefix_cache.empty_after_purge(request) else answer

    def _sync_tokens(self, request: "Request") -> None:
        known = self._known_tokens[request.request_id]
        if request.num_tokens == known:
            return
        tokens = request.all_token_ids
        keep = min(known, len(tokens))
        self._node.update_tokens(request.request_id, keep, tokens[keep:])
        self._known_tokens[request.request_id] = len(tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external: int) -> None:
        table = list(blocks.get_block_ids())
        self._admitted[request.request_id] = list(table[0])
        self._node.allocated(request.request_id, num_external, table)

    def build_connector_meta(self, output: "SchedulerOutput") -> StepPlan:
        tables = output.kv_connector_block_state
        scheduled = output.num_scheduled_tokens
        admitted = []
        for new in output.scheduled_new_reqs:
            blocks = [list(group) for group in tables.get_block_ids(new.req_id)]
            admitted.append((new.req_id, new.num_computed_tokens, scheduled[new.req_id], blocks))
        cached = output.scheduled_cached_reqs
        preempted = list(output.preempted_req_ids or ())
        for req_id in preempted:
            if req_id in self._requests:
                self._sync_tokens(self._requests[req_id])
        plan = self._node.build_step(
            admitted,
            cached.req_ids,
            cached.num_computed_tokens,
            cached.new_block_ids,
            cached.resumed_req_ids,
            scheduled,
            preempted,
            self._tokens_of,
        )
        self._prefix_cache.empty_after_purge()
        self._preparations.rest(self._node, len(self._requests), len(scheduled))
        return StepPlan(plan)

    def _tokens_of(self, req_id: str, known: int) -> list[int]:
        tokens: list[int] = self._requests[req_id].all_token_ids[known:]
        self._known_tokens[req_id] = known + len(tokens)
        return tokens

    def request_finished(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Lets vLLM free the blocks: KV still to be saved is packed at the start of the next step, before any reuse."""
        req_id = request.request_id
        self._prefix_cache.ended(req_id)
        if req_id not in self._known_tokens:
            return False, None
        self._sync_tokens(request)
        aborted = request.status in _ABORTED
        self._preparations.discard(req_id)
        done = self._node.finished(req_id, request.num_computed_tokens, [list(b) for b in block_ids], aborted)
        del self._known_tokens[req_id], self._requests[req_id], self._extras_of[req_id]
        params: dict[str, Any] = {}
        if done["handoff_tokens"] is not None:
            params = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_block_ids": [list(b) for b in block_ids],
                "remote_engine_id": self._engine_id,
                "remote_request_id": done["handoff_name"],
                "remote_host": self._node.host,
                "remote_port": self._node.port,
                "remote_num_tokens": done["handoff_tokens"],
                "tp_size": self._tp_size,
                "kvferry_fingerprint": self._identity(),
            }
            params = self._router_params.signed(params)
        if req_id in self._wants_report:
            self._wants_report.discard(req_id)
            params["kvferry_report"] = {name: done[name] for name in ("admissions", "preemptions", "transfer_ms")}
        return False, params or None

    def update_connector_output(self, output: "KVConnectorOutput") -> None:
        if output.invalid_block_ids:
            self._prefix_cache.evict_failed(output.invalid_block_ids, self._admitted.values())
        self._admitted.clear()
        report = output.kv_connector_worker_meta
        if type(report) is StepReport:  # no isinstance(), which takes microseconds for a class derived from an ABC
            for payload in report.payloads:
                self._node.worker_report(payload)

    def needs_step_for_reports(self) -> bool:
        """Returns True while a worker with a GPU has not reported all its saves and loads. A later step must report
        them: until then even a request that was aborted keeps the blocks of its load."""
        return self._is_on_device and (self._node.has_unreported_saves() or self._node.has_unreported_loads())

    def _drop_changed(self) -> None:
        for req_id, request in list(self._requests.items()):
            if self._extras_of[req_id] != self._extras.of(request):
                self._drop(req_id)

    def _drop(self, req_id: str) -> None:
        """Ends the saving of the request's KV. A waiting request gets new keys at its next lookup."""
        self._node.finished(req_id, 0, [], True)
        del self._known_tokens[req_id], self._requests[req_id], self._extras_of[req_id]
        self._wants_report.discard(req_id)
        self._preparations.discard(req_id)

    def reset_cache(self) -> bool:
        """Empties the pool and begins a weights epoch, in which KV has other keys: the weights may have changed.

        Nodes of one update group share KV again once they have been reset equally often since they started. If requests
        still use blocks, vLLM has kept its own prefix cache and tells the caller to try again. The weights epoch then
        stays, and this node shares no KV until a reset that finds no block in use.
        """
        self._node.reset_cache()
        self._extras.is_reset_due = (manager := self._prefix_cache.manager) is not None and manager.usage > 0
        if self._extras.is_reset_due:
            logger.warning(
                "kvferry: no KV is shared until the next reset, because this reset did not empty vLLM's own prefix "
                "cache: reset again with reset_running_requests=true"
            )
        else:
            self._extras.weights_epoch += 1
            self._node.set_weights_epoch(self._extras.epoch_name)
            logger.warning(
                "kvferry: the connector's cache was reset, which starts weights epoch %s: KV is exchanged only with "
                "nodes of the same update_group whose cache was also reset %d times since they started",
                self._extras.epoch_name, self._extras.weights_epoch,
            )  # fmt: skip
        self._drop_changed()
        return True

    def take_stats(self) -> KvFerryStats | None:
        if (metrics := self._node.take_metrics()) is None:
            return None
        return self._stats.take({**metrics, "tickets_refused_total": self._router_params.num_refused})

    def shutdown(self) -> None:
        self._node.shutdown()
