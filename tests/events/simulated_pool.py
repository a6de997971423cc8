"""Chunk pools that are filled and emptied at random, the real code that makes KV events of that, and the truth."""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

BLOCK_TOKENS, CHUNK_BLOCKS, DEPTH_MAX, VOCABULARY = 4, 4, 12, 50_000
CHUNK_TOKENS = BLOCK_TOKENS * CHUNK_BLOCKS


@dataclass(frozen=True)
class Node:
    """A chunk that prompts may have: full, or a tail. `request` has the tokens up to its end."""

    key: bytes
    path: tuple["Node", ...]  # the full chunks before it
    request: Any
    num_tokens: int
    prompt_blocks: list[int]  # the hashes in events of the whole blocks up to the chunk's end

    @property
    def first_token(self) -> int:
        return len(self.path) * CHUNK_TOKENS

    @property
    def blocks(self) -> list[int]:
        return self.prompt_blocks[len(self.path) * CHUNK_BLOCKS :]


def make_nodes(dice: random.Random, count: int) -> list[Node]:
    """Returns chunks of prompts that share beginnings; a third are tails, many of which begin as a full chunk does."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, maybe_convert_block_hash
    from vllm.v1.request import Request

    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    hasher = get_request_block_hasher(BLOCK_TOKENS, hash_fn)
    nodes: list[Node] = []
    full: list[Node] = []
    while len(nodes) < count:
        before = dice.choice(full) if full and dice.random() < 0.95 else None
        path = (*before.path, before) if before else ()
        if len(path) >= DEPTH_MAX:
            continue
        tokens = list(before.request.all_token_ids) if before else []
        own = [dice.randrange(VOCABULARY) for _ in range(CHUNK_TOKENS)]
        is_tail = dice.random() < 1 / 3
        if is_tail:
            if full and dice.random() < 0.7:  # the beginning of a full chunk
                twin = dice.choice(full)
                path, own = twin.path, list(twin.request.all_token_ids[twin.first_token :])
                tokens = list(twin.request.all_token_ids[: twin.first_token])
            own = own[: dice.randrange(1, CHUNK_TOKENS)]
        number = str(len(nodes))
        request = Request(number, tokens + own, SamplingParams(max_tokens=1), None, block_hasher=hasher)
        blocks = [maybe_convert_block_hash(block) for block in request.block_hashes]
        node = Node(number.encode(), path, request, len(own), blocks)
        nodes.append(node)
        if not is_tail:
            full.append(node)
    return nodes


class SimulatedPool:
    """The pool of one worker. The changes that PoolEvents gets are those that ChunkPool::take_changes() would return.
    """

    def __init__(self, dice: random.Random, nodes: list[Node], capacity: int) -> None:
        import torch
        from kvferry.pool_events import PoolEvents
        from vllm.distributed.kv_events import AllBlocksCleared
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)
        self._dice, self._nodes, self._capacity = dice, nodes, capacity
        self._events = PoolEvents([spec], BLOCK_TOKENS)
        self._slots: dict[bytes, Node] = {}  # chunks that are ready or being written, least recently used first
        self._writing: set[bytes] = set()
        self._named: set[bytes] = set()
        self._changed: set[bytes] = set()
        self._clear = AllBlocksCleared()
        self._will_clear = True  # a new process tells routers first to drop all
        # [hash] number of chunks with this block that are ready and whose tokens are known: the truth
        self._held: Counter[int] = Counter()

    def num_held(self, blocks: Iterable[int]) -> int:
        """Returns how many of a prompt's blocks can be loaded: those before the first that no chunk has."""
        count = 0
        for block in blocks:
            if not self._held[block]:
                break
            count += 1
        return count

    def step(self) -> list[Any]:
        """Takes one step of an engine. Returns the events that vLLM would publish after it."""
        self._end_writes()
        for _ in range(self._dice.randrange(1, 4)):
            self._take_request(self._dice.choice(self._nodes))
        chance = self._dice.random()
        if chance < 0.03 and self._slots:  # the controller's order, or a chunk that was damaged
            self._evict(self._dice.choice(list(self._slots)))
        elif chance < 0.031:  # vLLM's cache is reset, and the pool, or only vLLM's cache
            self._will_clear = True
            if self._dice.random() < 0.5:
                for key in list(self._slots):
                    self._evict(key)
        is_all = self._dice.random() < 0.005  # too much has changed since the last step
        told = list(self._slots) if is_all else sorted(self._changed)
        self._changed.clear()
        changes = [(key, key in self._slots and key not in self._writing, key in self._writing) for key in told]
        were_cleared, self._will_clear = self._will_clear, False
        return [*[self._clear] * were_cleared, *self._events.take(is_all, changes, were_cleared)]

    def _take_request(self, node: Node) -> None:
        for chunk in (*node.path, node):
            if chunk.key in self._slots:
                if chunk.key not in self._writing:
                    self._name(chunk)
                    self._slots[chunk.key] = self._slots.pop(chunk.key)
            elif len(self._slots) < self._capacity or self._make_room():
                self._slots[chunk.key] = chunk
                self._writing.add(chunk.key)
                # What another node pushes before its request comes has no name; a former chunk's name is still known.
                if chunk.key in self._changed or self._dice.random() < 0.9:
                    self._name(chunk)

    def _name(self, chunk: Node) -> None:
        if chunk.key in self._named:
            return
        self._named.add(chunk.key)
        self._events.name(chunk.key, chunk.request, chunk.first_token, chunk.num_tokens)
        if chunk.key not in self._writing:
            self._held.update(chunk.blocks)

    def _end_writes(self) -> None:
        for key in sorted(self._writing):
            if self._dice.random() < 0.2:
                continue  # the write takes longer than this step
            self._writing.discard(key)
            self._changed.add(key)
            if self._dice.random() < 0.05:  # the write has failed
                del self._slots[key]
                self._named.discard(key)
            elif key in self._named:
                self._held.update(self._slots[key].blocks)

    def _make_room(self) -> bool:
        ready = self._ready()
        victim = next(ready, None)
        if victim is not None and self._dice.random() < 0.1:
            victim = self._dice.choice([victim, *ready])  # the others are pinned
        if victim is not None:
            self._evict(victim)
        return victim is not None

    def _ready(self) -> Iterator[bytes]:
        return (key for key in self._slots if key not in self._writing)

    def _evict(self, key: bytes) -> None:
        if key in self._writing:
            return
        chunk = self._slots.pop(key)
        self._changed.add(key)
        if key in self._named:
            self._named.discard(key)
            self._held.subtract(chunk.blocks)
