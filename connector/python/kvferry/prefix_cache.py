"""vLLM's own prefix cache: the node uses its hashes instead of hashing tokens again, and removes wrong KV from it."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from kvferry._core import SchedulerNode

# Values of vLLM's prefix_caching_hash_algo for which no client can find different tokens with the same hash.
_CRYPTOGRAPHIC = ("sha256", "sha256_cbor")


class BlockHashes:
    def __init__(self, vllm_config: "VllmConfig", hashed_tokens: int | None, chunk_tokens: int) -> None:
        """`hashed_tokens` is the number of tokens in a block that vLLM hashes; None if unknown."""
        is_safe = vllm_config.cache_config.prefix_caching_hash_algo in _CRYPTOGRAPHIC
        # Number of vLLM's hashes in a chunk; 0 if the hashes can't be used.
        self._per_chunk = 0
        if is_safe and hashed_tokens and chunk_tokens % hashed_tokens == 0:
            self._per_chunk = chunk_tokens // hashed_tokens

    def of(self, request: "Request") -> list[bytes]:
        """Returns vLLM's hash of the request's tokens up to the end of each chunk, as far as vLLM has hashed them.

        The list is empty if the hashes can't be used. It is also empty for a request with images, because there the
        hash of a block does not cover all that a chunk's key covers.
        """
        if self._per_chunk == 0 or request.mm_features:
            return []
        hashes: list[bytes] = request.block_hashes[self._per_chunk - 1 :: self._per_chunk]
        return hashes


class PrefixCache:
    """Empties vLLM's prefix cache after a purge of this node, or of another node whose KV the engine had loaded.

    Requests that have blocks go on, and vLLM caches what they compute on top of purged KV. So requests that wait when
    the purge comes, or arrive before all requests from before the purge have ended, compute all of their prompt.
    """

    def __init__(self, node: "SchedulerNode") -> None:
        self._node = node
        self._num_seen = 0  # number of the node's purges after which the cache was emptied
        self._requests: dict[str, Request] = {}  # [id] all requests that vLLM has
        self._from_before: set[str] = set()  # ids of requests that vLLM had at the last purge and still has
        self._asking: Request | None = None
        self.manager: KVCacheManager | None = None  # None until vLLM passes it to the connector

    def empty_after_purge(self, asking: "Request | None" = None) -> bool:
        """Empties vLLM's prefix cache if a new purge came before the node's last answer or plan. Returns True if so.

        `asking`: the request that vLLM is looking up right now. If its skip_reading_prefix_cache were set at once, vLLM
        would load nothing for it, but use the local blocks found so far. So the flag is set in the next call without
        `asking`, which follows the step's lookups.
        """
        if asking is None and self._asking is not None:
            self._asking.skip_reading_prefix_cache = True
            self._asking = None
        num_purges = self._node.num_engine_purges()
        if num_purges == self._num_seen:
            return False
        self._num_seen = num_purges
        self._from_before.update(self._requests)
        for request in self._requests.values():
            if request is asking:
                self._asking = request
            else:
                request.skip_reading_prefix_cache = True
        self._evict_all()
        return True

    def arrived(self, request: "Request") -> None:
        self._requests[request.request_id] = request
        if self._from_before:
            request.skip_reading_prefix_cache = True

    def ended(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        if request_id in self._from_before:
            self._from_before.remove(request_id)
            if not self._from_before:
                self._evict_all()

    def _evict_all(self) -> None:
        if self.manager is not None:
            self.manager.evict_blocks(set(range(self.manager.block_pool.num_gpu_blocks)))

    def evict_failed(self, bad_blocks: set[int], tables: Iterable[list[int]]) -> None:
        """Removes blocks whose load failed, and blocks computed from them, from vLLM's prefix cache.

        With kv_load_failure_policy `recompute` vLLM leaves such blocks in the cache, since the request computes them
        again. But the request may be aborted or preempted before that. `tables`: the blocks of recently admitted
        requests. Only requests that were admitted in the step of the failed load can have such blocks.
        """
        bad, tables = set(bad_blocks), list(tables)
        known = 0
        while known != len(bad):
            known = len(bad)
            for table in tables:
                first = next((i for i, block in enumerate(table) if block in bad), len(table))
                bad.update(table[first:])
        if self.manager is not None:
            self.manager.evict_blocks(bad)
