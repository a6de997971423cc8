"""vLLM's own hashes of a request's tokens, which spare the node to hash the same tokens again."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

# Values of vLLM's prefix_caching_hash_algo with which no client can make other tokens that have the same hash.
_CRYPTOGRAPHIC = ("sha256", "sha256_cbor")


class BlockHashes:
    def __init__(self, vllm_config: "VllmConfig", hashed_tokens: int | None, chunk_tokens: int) -> None:
        """`hashed_tokens`: number of tokens of each hash; None if unknown."""
        is_safe = vllm_config.cache_config.prefix_caching_hash_algo in _CRYPTOGRAPHIC
        # Number of vLLM's hashes in a chunk; 0 if the hashes can't be used.
        self._per_chunk = 0
        if is_safe and hashed_tokens and chunk_tokens % hashed_tokens == 0:
            self._per_chunk = chunk_tokens // hashed_tokens

    def of(self, request: "Request") -> list[bytes]:
        """Returns vLLM's hash of the request's tokens up to the end of each chunk, as far as vLLM has hashed them.

        The list is empty if the hashes can't stand for the tokens. For a request with images the hash of a block does
        not cover all that a chunk's key covers.
        """
        if self._per_chunk == 0 or request.mm_features:
            return []
        hashes: list[bytes] = request.block_hashes[self._per_chunk - 1 :: self._per_chunk]
        return hashes
