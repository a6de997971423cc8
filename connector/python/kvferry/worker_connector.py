"""The worker connector, in each rank: registers the KV tensors, and calls C++ for each step's copies."""

import re
from typing import TYPE_CHECKING

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvferry._core import KvFerryError, KvLayout, WorkerNode, check_config
from kvferry.blocks.order import block_order, has_own_pages
from kvferry.conversion import element_types, other_chunk_dtype
from kvferry.errors import refuse_to_start
from kvferry.handshake import StepPlan, StepReport, WorkerHello
from kvferry.layout import cache_layout, draft_layers, has_draft_kv, layer_specs, shard_of
from kvferry.served import divided_shapes, keeps_state, served_specs, settings_json
from kvferry.states.parts import chunk_parts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class WorkerConnector:
    def __init__(self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
        self._vllm_config = vllm_config
        specs = served_specs(kv_cache_config, vllm_config)
        # True if vLLM calls save_kv_layer() in all layers; without these calls, KV can't be pushed layer by layer. With
        # full CUDA graphs it does not, which push_layers excludes (requires_piecewise_for_cudagraph()).
        # False for models that have layers with state.
        self._has_layer_hooks = not keeps_state(specs)
        self._kv_cache_config = kv_cache_config
        self._node: WorkerNode | None = None
        self._device = torch.device("cpu")
        self._layers: dict[str, int] = {}  # [layer name] index of the layer among those of all layouts
        self._wants_layers = False  # True if the current step has saves that are pushed layer by layer
        # A report that vLLM has already taken and to which save() adds the step's saves; None if there is none.
        self._open_report: StepReport | None = None
        self._extra_json = settings_json(vllm_config, specs)
        self._whole_shapes = divided_shapes(specs, vllm_config)
        try:
            config = check_config(self._extra_json)
        except KvFerryError as error:
            refuse_to_start(str(error))
        self._saves_draft_kv: bool = config["save_draft_kv"]
        self._chunk_dtype = other_chunk_dtype(vllm_config, config["chunk_dtype"])
        self._order = block_order(kv_cache_config, vllm_config, config["whole_blocks"], self._chunk_dtype)
        # True if this rank runs a draft model whose KV is in the chunks: vLLM runs it in the last pipeline stage.
        self._saves_drafts = self._saves_draft_kv and has_draft_kv(vllm_config) and get_pp_group().is_last_rank

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._kv_caches = kv_caches  # keeps the tensors alive: the node reads and writes their memory
        if not self._saves_draft_kv and get_pp_group().is_last_rank:
            drafts = draft_layers(kv_caches, self._vllm_config)
            kv_caches = {name: tensor for name, tensor in kv_caches.items() if name not in drafts}
        layouts = cache_layout(kv_caches, self._kv_cache_config, self._vllm_config, whole_blocks=bool(self._order))
        names = [name for layout in layouts for name, *_ in layout.layers]
        self._layers = {name: place for place, name in enumerate(names)}
        engine_id = self._vllm_config.kv_transfer_config.engine_id
        pp_rank, tp_rank = get_pp_group().rank_in_group, self._rank_in_stage()
        tensor = next(iter(kv_caches.values()))
        self._device = tensor.device
        shard = shard_of(layouts, self._vllm_config, pp_rank, tp_rank,
                         has_own_pages=bool(self._order) and has_own_pages(self._vllm_config))
        whole = self._whole_shapes
        parts = None if whole is None else chunk_parts(
            layouts[0], layer_specs(kv_caches, self._kv_cache_config), whole, self._vllm_config, shard, tp_rank)
        try:
            self._node = WorkerNode(
                extra_json=self._extra_json,
                # The scheduler sorts the handshakes in the same order.
                rank=pp_rank * self._num_ranks_in_stage() + tp_rank,
                # The last 40 characters, in which the ids of data parallel ranks differ.
                label=re.sub(r"[^A-Za-z0-9_.]", "_", engine_id)[-40:],
                layouts=[KvLayout(**layout._asdict()) for layout in layouts],
                gpu=tensor.device.index or 0 if tensor.is_cuda else -1,
                shard=shard,
                parts=parts,
                types=element_types(layouts, self._kv_cache_config, self._vllm_config, self._chunk_dtype),
            )
        except KvFerryError as error:
            refuse_to_start(str(error))

    def handshake(self) -> WorkerHello | None:
        if self._node is None:
            return None
        return WorkerHello(self._node.handshake(), has_parts=self._whole_shapes is not None, order=self._order)

    def _rank_in_stage(self) -> int:
        """Returns the number of the rank in its pipeline stage, by which vLLM sorts the handshakes."""
        rank: int = get_tp_group().rank_in_group
        if self._vllm_config.parallel_config.prefill_context_parallel_size == 1:
            return rank
        from vllm.distributed.parallel_state import get_pcp_group

        rank += get_pcp_group().rank_in_group * get_tp_group().world_size
        return rank

    def _num_ranks_in_stage(self) -> int:
        ranks: int = get_tp_group().world_size * self._vllm_config.parallel_config.prefill_context_parallel_size
        return ranks

    def _stream(self) -> int:
        """Returns the CUDA stream in which the model reads and writes the blocks; 0 for host memory."""
        return torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0

    def begin_step(self, plan: StepPlan) -> None:
        self._open_report = None
        if self._node is not None:
            self._node.begin_step(plan.payload, self._stream())
            self._wants_layers = self._has_layer_hooks and self._node.wants_layers()

    def load(self) -> None:
        if self._node is not None:
            self._node.load(self._stream())

    def save_layer(self, name: str) -> None:
        """Packs the layer's KV, which is in the blocks now, for the chunks that are pushed to decode nodes."""
        if self._wants_layers and self._node is not None and name in self._layers:
            self._node.save_layer(self._layers[name], self._stream())

    def save(self) -> None:
        self._wants_layers = False  # vLLM also runs the layers outside of steps, for example to capture CUDA graphs
        if self._node is not None:
            self._node.save(self._stream())
        if self._open_report is not None:
            self._open_report.payloads += self._take_payloads()

    def take_report(self) -> StepReport | None:
        """Returns what this rank has to report to the scheduler.

        With speculative decoding, vLLM's v1 model runner calls this before wait_for_save(). It calls wait_for_save()
        after the draft model, in the last pipeline stage only. If this rank runs a draft model whose KV is in the
        chunks, save() completes the report later. Otherwise the save runs here: the next step's report would be too
        late, because the decode node asks for the prompt during that step. The save also runs here in steps without a
        forward pass, in which vLLM 0.30 does not call wait_for_save().
        """
        if self._saves_drafts:
            self._open_report = StepReport(self._take_payloads())
            return self._open_report
        self.save()  # does nothing if wait_for_save() was called before
        payloads = self._take_payloads()
        return StepReport(payloads) if payloads else None

    def _take_payloads(self) -> list[bytes]:
        payload = None if self._node is None else self._node.take_report()
        return [] if payload is None else [payload]

    def finish_device_work(self) -> None:
        """Waits until no load and no save on a GPU accesses the KV tensors. Called before the server sleeps."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def take_failed_blocks(self) -> set[int]:
        return set() if self._node is None else set(self._node.take_failed_blocks())

    def take_finished_loads(self) -> list[tuple[str, bool]]:
        """Returns (request id, success) of the asynchronous loads that ended since the last call."""
        return [] if self._node is None else self._node.take_finished_loads()

    def shutdown(self) -> None:
        if self._node is not None:
            self._node.shutdown()
