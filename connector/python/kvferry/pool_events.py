"""The KV events of the node's pool, which vLLM publishes together with those of its own cache (--kv-events-config).

An event lists blocks with vLLM's own hashes, so that routers can merge it with vLLM's events. The medium is CPU, as in
vLLM's own offloading. A block is held if a chunk of the pool has all of it and the pool holds all blocks before it: a
lookup finds no others. Routers therefore never get a block whose parent they do not know.
"""

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import MEDIUM_CPU, AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash, to_event_extra_keys
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from kvferry._core import SchedulerNode

# The kinds of KV groups that keep the KV of every token. If a model has such groups, its other groups have no events.
_KEEP_ALL_TOKENS = ("full_attention", "mla_attention")


@dataclass(slots=True)
class _Chunk:
    """The blocks of vLLM whose tokens are all in one chunk."""

    hashes: list[Any]
    parent: Any  # the hash of the block before the chunk; None if the chunk is the prompt's first
    tokens: "array[int]"
    lora_id: int | None
    lora_name: str | None
    extra_keys: list[Any]  # one entry for each block, as in vLLM's events
    is_ready: bool = False  # True if the pool has the chunk
    is_told: bool = False  # True if routers were told of the chunk's blocks


class PoolEvents:
    def __init__(self, specs: "list[Any]", hashed_tokens: int | None) -> None:
        """`specs`: of the KV cache groups, with the scheduler's block sizes. `hashed_tokens`: the number of tokens in a
        block that vLLM hashes; None if each block of the group is hashed.
        """
        groups = [{"group_idx": index, "kv_cache_spec_kind": get_kv_cache_spec_kind(spec).value,
                   "kv_cache_spec_sliding_window": get_kv_cache_spec_sliding_window(spec)}
                  for index, spec in enumerate(specs)]  # fmt: skip
        keep = [group for group in groups if group["kv_cache_spec_kind"] in _KEEP_ALL_TOKENS] or groups[:1]
        self._block_tokens: int = specs[keep[0]["group_idx"]].block_size
        # A group with another block size than the first group in `keep` has other hashes, so it gets no events.
        self._groups = [group for group in keep if specs[group["group_idx"]].block_size == self._block_tokens]
        self._hashes_per_block: int = self._block_tokens // (hashed_tokens or self._block_tokens)
        self._chunks: dict[bytes, _Chunk] = {}  # the chunks whose tokens are known, by key
        self._unknown: set[bytes] = set()  # keys of chunks that the pool has and whose tokens are not known
        self._new: list[_Chunk] = []  # chunks that routers may have to be told about
        self._told: dict[Any, int] = {}  # [hash of a block that routers know] number of reported chunks with it
        self._following: dict[Any, dict[bytes, None]] = {}  # [hash of a block] keys of known chunks that follow it

    def name(self, key: bytes, request: "Request", first_token: int, num_tokens: int) -> None:
        """Takes the hashes and tokens of a chunk from a request that has them."""
        size, per_block = self._block_tokens, self._hashes_per_block
        first, end = first_token // size, (first_token + num_tokens) // size
        if key in self._chunks or first == end or end * per_block > len(request.block_hashes):
            return
        hashes = [maybe_convert_block_hash(request.block_hashes[(block + 1) * per_block - 1])
                  for block in range(max(first - 1, 0), end)]  # fmt: skip
        parent = hashes.pop(0) if first > 0 else None
        extra_keys, item = [], 0
        for block in range(first, end):
            keys, item = generate_block_hash_extra_keys(request, block * size, (block + 1) * size, item)
            extra_keys.append(keys)
        lora = request.lora_request
        self._chunks[key] = chunk = _Chunk(
            hashes, parent, array("q", request.all_token_ids[first * size : end * size]),
            lora.adapter_id if lora else None, lora.name if lora else None, to_event_extra_keys(extra_keys),
        )  # fmt: skip
        if parent is not None:
            self._following.setdefault(parent, {})[key] = None
        if key in self._unknown:
            self._unknown.discard(key)
            chunk.is_ready = True
            self._new.append(chunk)

    def take(
        self, is_all: bool, changes: Iterable[tuple[bytes, bool, bool]], were_cleared: bool = False
    ) -> "list[KVCacheEvent]":
        """Returns the events that bring routers up to date.

        `changes`: for each chunk its key, whether the pool has it, and whether it is being written; with `is_all` the
        pool has no others. `were_cleared`: True if vLLM tells routers to drop all blocks.
        """
        if were_cleared:
            self._told.clear()
            for chunk in self._chunks.values():
                chunk.is_told = False
        states = {key: (is_ready, is_writing) for key, is_ready, is_writing in changes}
        if is_all:
            for key in (*self._chunks, *self._unknown):
                states.setdefault(key, (False, False))
        gone: list[Any] = []
        for key, (is_ready, is_writing) in states.items():
            known = self._chunks.get(key)
            if known is None:
                if is_ready:
                    self._unknown.add(key)
                else:
                    self._unknown.discard(key)
                continue
            known.is_ready = is_ready
            if is_ready:
                self._new.append(known)
                continue
            self._withdraw(known, gone)
            if not is_writing:
                self._drop(key, known)
        events: list[KVCacheEvent] = []
        if gone:
            gone.reverse()  # so the blocks of each chunk are reported from last to first
            events += [BlockRemoved(block_hashes=gone, medium=MEDIUM_CPU, group_idx=group["group_idx"])
                       for group in self._groups]  # fmt: skip
        for chunk in list(self._chunks.values()) if were_cleared else self._new:
            self._tell(chunk, events)
        self._new.clear()
        return events

    def _drop(self, key: bytes, chunk: _Chunk) -> None:
        del self._chunks[key]
        if chunk.parent is not None:
            following = self._following[chunk.parent]
            del following[key]
            if not following:
                del self._following[chunk.parent]

    def _withdraw(self, chunk: _Chunk, gone: list[Any]) -> None:
        """Appends to `gone` the blocks that routers have to drop: the chunk's, then those that follow them."""
        left = [chunk]
        while left:
            chunk = left.pop()
            if not chunk.is_told:
                continue
            chunk.is_told = False
            for block in chunk.hashes:
                self._told[block] -= 1  # the tail of one prompt and a chunk of another may have the same blocks
                if self._told[block] == 0:
                    del self._told[block]
                    gone.append(block)
                    left += self._after(block)

    def _tell(self, chunk: _Chunk, events: "list[KVCacheEvent]") -> None:
        """Appends events for the chunk, and for chunks that follow it, as far as the pool holds them."""
        left = [chunk]
        while left:
            chunk = left.pop()
            if chunk.is_told or not chunk.is_ready or (chunk.parent is not None and chunk.parent not in self._told):
                continue
            chunk.is_told = True
            old = sum(block in self._told for block in chunk.hashes)  # routers know the chunk's first blocks, if any
            for block in chunk.hashes:
                self._told[block] = self._told.get(block, 0) + 1
            if old == len(chunk.hashes):
                continue
            new = chunk.hashes[old:]
            events += [BlockStored(
                block_hashes=new, parent_block_hash=chunk.hashes[old - 1] if old else chunk.parent,
                token_ids=chunk.tokens[old * self._block_tokens :].tolist(), block_size=self._block_tokens,
                lora_id=chunk.lora_id, medium=MEDIUM_CPU, lora_name=chunk.lora_name, extra_keys=chunk.extra_keys[old:],
                **group) for group in self._groups]  # fmt: skip
            for block in new:
                left += self._after(block)

    def _after(self, block: Any) -> list[_Chunk]:
        return [self._chunks[key] for key in self._following.get(block, ())]


class EventSource:
    """Feeds PoolEvents with the changes of a node's pool."""

    def __init__(
        self, specs: "list[Any]", hashed_tokens: int | None, node: "SchedulerNode", requests: "Mapping[str, Request]"
    ) -> None:
        self._events = PoolEvents(specs, hashed_tokens)
        self._node = node
        self._requests = requests
        self._manager: KVCacheManager | None = None
        self._were_cleared = False

    def begin(self) -> None:
        self._node.track_pool()

    def bind(self, manager: "KVCacheManager") -> None:
        """Puts AllBlocksCleared first into vLLM's event queue: routers may still list blocks of an earlier process at
        this address. Sent with the connector's own events, it would come after the events of vLLM's first blocks.
        """
        self._manager = manager
        manager.block_pool.kv_event_queue.append(AllBlocksCleared())

    def name_chunks(self, finished: "Request | None" = None) -> None:
        """Takes hashes and tokens of the chunks for which the node has named a request. Called in each step and for
        each finished request.
        """
        for request_id, key, first_token, num_tokens in self._node.take_named_chunks():
            request = self._requests.get(request_id, finished)
            if request is not None and request.request_id == request_id:
                self._events.name(key, request, first_token, num_tokens)

    def look_at_vllms_events(self) -> None:
        """Checks whether vLLM is about to tell routers to drop all blocks, those of the pool too. Must be called
        before vLLM takes the events of its own cache.
        """
        if self._manager is not None:
            queue = self._manager.block_pool.kv_event_queue
            self._were_cleared |= any(isinstance(event, AllBlocksCleared) for event in queue)

    def take(self) -> "list[KVCacheEvent]":
        is_all, changes = self._node.take_pool_changes()
        were_cleared, self._were_cleared = self._were_cleared, False
        return self._events.take(is_all, changes, were_cleared)
