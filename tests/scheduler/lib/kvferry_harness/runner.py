"""A model runner without a model. It calls the connector in vLLM's order (v1 and v2 runner), and writes stamps as KV.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
from kvferry import worker_connector
from numpy.typing import NDArray
from vllm import _custom_ops as ops
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput

from kvferry_harness.stamps import BrokenError, StampedMemory, Text

GARBAGE_TOKEN = 399


def _element_strides(spec: Any, plane: int) -> tuple[int, int, int]:
    """Returns the first element, the token stride and the dim stride inside a block and head, as vLLM's CPU kernel uses
    them.
    """
    block, dim = spec.block_size, spec.head_size
    page = torch.zeros((1, 1, 2 * block, dim))
    keys, values = page.chunk(2, dim=2)
    numbers = torch.arange(1.0, block * dim + 1).reshape(block, 1, dim)
    zeros = torch.zeros_like(numbers)
    ops.cpu_attn_reshape_and_cache(zeros if plane else numbers, numbers if plane else zeros, keys, values,
                                   torch.arange(block, dtype=torch.int64),
                                   _get_attn_isa(torch.float32, block, dim, "auto"),
                                   k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto")
    flat = page.reshape(-1)
    where = torch.argsort(torch.where(flat == 0, torch.inf, flat))[:block * dim].reshape(block, dim)
    start, per_token, per_dim = int(where[0, 0]), int(where[1, 0] - where[0, 0]), int(where[0, 1] - where[0, 0])
    expected = start + torch.arange(block)[:, None] * per_token + torch.arange(dim)[None] * per_dim
    assert torch.equal(where, expected), "the CPU kernel's order of elements has no strides"
    return start, per_token, per_dim


def allocate(config: KVCacheConfig, num_blocks: int) -> tuple[dict[str, torch.Tensor], list[NDArray[np.float32]]]:
    """Returns each layer's tensor in the shape of the CPU backend, and views of all K and of all V for StampedMemory.
    """
    group = config.kv_cache_groups[0]
    spec: Any = group.kv_cache_spec
    memory = torch.full((len(group.layer_names), num_blocks, spec.num_kv_heads, spec.block_size,
                         2 * spec.head_size), -1.0)
    array = memory.numpy()
    planes = []
    for plane in range(2):
        start, per_token, per_dim = _element_strides(spec, plane)
        planes.append(np.lib.stride_tricks.as_strided(
            array.reshape(-1)[start:], (*array.shape[:3], spec.block_size, spec.head_size),
            (*array.strides[:3], per_token * array.itemsize, per_dim * array.itemsize)))
    return {name: memory[index] for index, name in enumerate(group.layer_names)}, planes


@dataclass
class _Held:
    """The state of a request that a model runner keeps between steps."""

    text: Text
    num_prompt: int
    table: list[int]


@dataclass
class _Share:
    """The part of a forward pass for one request: tokens [computed, end) are computed, and all tokens before `end` are
    attended to.

    The last `num_drafts` of the computed tokens are drafts.
    """

    request_id: str
    held: _Held
    computed: int
    end: int
    num_drafts: int
    garbage: bool = False


class LateLoads:
    """Wraps the C++ worker node of a rank. The node gets each load some steps late: until then its blocks have wrong
    KV, and it is not reported, as if a device had not ended it.
    """

    def __init__(self, node: Any, num_steps: int) -> None:
        self._node = node
        self._num_steps = num_steps
        self._held: list[list[Any]] = [[] for _ in range(num_steps)]  # the loads of the last steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def begin_step(self, payload: bytes, stream: int) -> None:
        plan = msgspec.msgpack.decode(payload)
        self._held.append(plan[2])
        plan[2] = self._held.pop(0)
        self._node.begin_step(msgspec.msgpack.encode(plan), stream)


class StampRunner:
    """Keeps requests as GPUModelRunner does (v1 and v2 alike), and executes steps with a worker connector.

    The engine calls heard() when vLLM has processed the outputs of a step. From then on, no request may attend to the
    blocks whose load failed in this step.
    """

    def __init__(self, config: VllmConfig, kv_config: KVCacheConfig, salts: dict[str, str]) -> None:
        ranks = config.parallel_config.decode_context_parallel_size
        # one of each rank; the ranks have their parts of one memory
        self.connectors: list[Any] = [
            KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv_config) for _ in range(ranks)]
        self.connector = self.connectors[0]
        self._aggregator = KVOutputAggregator(ranks)
        num_blocks = kv_config.num_blocks
        tensors, planes = allocate(kv_config, num_blocks * ranks)
        for rank, connector in enumerate(self.connectors):
            group = SimpleNamespace(rank_in_group=rank, world_size=ranks)
            with mock.patch.object(worker_connector, "get_tp_group", lambda group=group: group):
                connector.register_kv_caches({
                    name: tensor[rank * num_blocks : (rank + 1) * num_blocks] for name, tensor in tensors.items()})
        self.memory = StampedMemory(planes, kv_config.kv_cache_groups[0].kv_cache_spec.block_size, ranks,
                                    config.parallel_config.cp_kv_cache_interleave_size)
        self._salts = salts
        self._held: dict[str, _Held] = {}
        # for each executed step whose outputs vLLM has not processed yet: whether a load failed
        self._unheard: list[bool] = []
        self._rng = np.random.default_rng(1)
        speculative = config.speculative_config
        self._num_drafts = speculative.num_speculative_tokens if speculative else 0
        self._has_draft_layer = speculative is not None and speculative.uses_draft_kv_cache()
        self._saves_last = speculative is not None and not config.use_v2_model_runner
        self.drafts = DraftTokenIds([], [])  # the drafts for the requests of the last step
        self.num_failed_loads = 0
        self.steps = 0

    def end_loads_late(self, num_steps: int) -> None:
        self.connector._worker._node = LateLoads(self.connector._worker._node, num_steps)

    def heard(self) -> None:
        self._unheard.pop(0)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        metadata = output.kv_connector_metadata
        assert metadata is not None
        assert output.kv_connector_block_state is None
        self.steps += 1
        for connector in self.connectors:
            connector.handle_preemptions(metadata)
        shares = self._update(output)
        for connector in self.connectors:
            connector.bind_connector_metadata(metadata)
            if output.has_sync_kv_loads:
                connector.start_load_kv(None)
        complaint = self._forward(shares)
        saves_last = self._saves_last and bool(shares)
        for connector in self.connectors:
            connector.finish_forward()
            if not output.has_sync_kv_loads:
                connector.start_load_kv(None)
        if not saves_last:
            self._forward_of_drafter(shares)
        done = self._told_by_all([self._end_step(connector, output, saves_last) for connector in self.connectors])
        if saves_last:
            self._forward_of_drafter(shares)
        for connector in self.connectors:
            if saves_last:
                connector.wait_for_save()
            connector.clear_connector_metadata()
        self.num_failed_loads += bool(done.invalid_block_ids or done.failed_recving)
        if complaint and not done.invalid_block_ids and not any(self._unheard):
            raise BrokenError(f"step {self.steps}: {complaint}")
        self._unheard.append(bool(done.invalid_block_ids))
        self.drafts = DraftTokenIds([], [])
        if not shares:
            return ModelRunnerOutput.with_kv_conn_output_only(done)
        request_ids = [share.request_id for share in shares]
        sampled = [self._sample(share) for share in shares]
        self.drafts = DraftTokenIds(request_ids, [self._draft(share.held.text) for share in shares])
        return ModelRunnerOutput(req_ids=request_ids,
                                 req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
                                 sampled_token_ids=sampled, kv_connector_output=done)

    @staticmethod
    def _end_step(connector: Any, output: SchedulerOutput, saves_last: bool) -> KVConnectorOutput:
        if not saves_last:
            connector.wait_for_save()
        done = KVConnectorOutput()
        transfers = connector.get_transfer_results(output.finished_req_ids)
        done.finished_sending = transfers.finished_sending
        done.finished_recving = transfers.finished_recving
        done.failed_recving = transfers.failed_recving
        done.invalid_block_ids = connector.get_block_ids_with_load_errors()
        done.kv_connector_stats = connector.get_kv_connector_stats()
        done.kv_cache_events = connector.get_kv_connector_kv_cache_events()
        done.kv_connector_worker_meta = connector.build_connector_worker_meta()
        return done

    def _told_by_all(self, told: list[KVConnectorOutput]) -> KVConnectorOutput:
        """Returns what vLLM's executor makes of the ranks' outputs."""
        if len(told) == 1:
            return told[0]
        found = self._aggregator.aggregate([ModelRunnerOutput.with_kv_conn_output_only(one) for one in told])
        assert found is not None
        assert found.kv_connector_output is not None
        return found.kv_connector_output

    def recompute_cells(self) -> None:
        """Computes the cells of all requests anew, after their salts or the weights have changed."""
        for request_id, held in self._held.items():
            held.text = Text(held.text.tokens, self._salts[request_id], self.memory.cell_factors)

    def _update(self, output: SchedulerOutput) -> list[_Share]:
        """Updates the requests, and returns each request's share of the step."""
        for request_id in output.finished_req_ids:
            self._held.pop(request_id, None)
        shares = []

        def add(request_id: str, computed: int) -> None:
            end = computed + output.num_scheduled_tokens[request_id]
            drafts = output.scheduled_spec_decode_tokens.get(request_id, ())
            self._held[request_id].text.extend(drafts)
            shares.append(_Share(request_id, self._held[request_id], computed, end, len(drafts)))

        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids
            assert tokens is not None
            text = Text(list(tokens), self._salts.get(new.req_id, ""), self.memory.cell_factors)
            self._held[new.req_id] = _Held(text, len(new.prompt_token_ids or ()), list(new.block_ids[0]))
            add(new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            held = self._held[request_id]
            tokens, blocks = cached.all_token_ids.get(request_id), cached.new_block_ids[index]
            if tokens is not None and list(tokens) != held.text.tokens[:len(tokens)]:
                raise BrokenError(f"request {request_id} has other tokens than were sampled")
            held.text.truncate(held.num_prompt + cached.num_output_tokens[index])
            if request_id in cached.resumed_req_ids:
                assert blocks is not None
                held.table = list(blocks[0])
            elif blocks is not None:
                held.table += blocks[0]
            add(request_id, cached.num_computed_tokens[index])
        return shares

    def _forward(self, shares: list[_Share]) -> str:
        """In each layer, all requests write their KV before any request attends to it, so the requests of a step can
        share a prefix.

        A request that attends to a wrong cell computes garbage, and so does a request that attends to this garbage.
        """
        for share in shares:
            if share.end > len(share.held.text):
                raise BrokenError(f"request {share.request_id} has no token at {len(share.held.text)}, of {share.end}")
            self.memory.write(share.held.table, share.computed, share.held.text.cells(share.computed, share.end))
        complaint = ""
        changed = True
        while changed:
            changed = False
            for share in shares:
                if share.garbage:
                    continue
                wrong = self.memory.first_wrong(share.held.table, share.held.text.cells(0, share.end))
                if wrong is None:
                    continue
                complaint = complaint or (f"request {share.request_id} attends to wrong KV at position {wrong} in "
                                          f"block {share.held.table[wrong // self.memory.block_tokens]}")
                share.garbage = changed = True
                self.memory.write(share.held.table, share.computed, self._noise(share))
        for share in shares:
            if self._has_draft_layer and not share.garbage:  # the drafter's layer holds noise until the drafter has run
                self.memory.write(share.held.table, share.computed, self._noise(share), first_layer=-1)
        return complaint

    def _noise(self, share: _Share) -> NDArray[np.float32]:
        return self._rng.integers(1, 1 << 20, (share.end - share.computed, self.memory.cell_factors.size)).astype(
            np.float32)

    def _forward_of_drafter(self, shares: list[_Share]) -> None:
        for share in shares:
            if self._has_draft_layer and not share.garbage:
                cells = share.held.text.cells(share.computed, share.end)
                self.memory.write(share.held.table, share.computed, cells, first_layer=-1)

    def _sample(self, share: _Share) -> list[int]:
        """Returns the drafts that are equal to the model's own tokens, and the model's token after them."""
        text = share.held.text
        if share.end < len(text):
            return []  # this is only a chunk of a prefill
        first = share.end - share.num_drafts
        drafts, said = text.tokens[first:], []
        for end in range(first, share.end + 1):
            said.append(GARBAGE_TOKEN if share.garbage else text.says(end))
            if said != drafts[:len(said)]:
                break
        text.truncate(first)
        text.extend(said)
        return said

    def _draft(self, text: Text) -> list[int]:
        """Returns drafts: first some tokens that the model will generate, then wrong ones."""
        start, num_right = len(text), int(self._rng.integers(0, self._num_drafts + 1))
        for number in range(self._num_drafts):
            text.extend([text.says(len(text)) + int(number >= num_right)])
        drafts = text.tokens[start:]
        text.truncate(start)
        return drafts
