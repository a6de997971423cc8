"""Tests which of vLLM's block hashes the node gets: one for each chunk, and none that could stand for other tokens."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("kvferry._core", reason="the Python module is not built")
from kvferry.prefix_cache import BlockHashes


def hashes(num_hashes: int, *, algorithm: str = "sha256", hashed_tokens: int | None = 16, images: int = 0) -> list[Any]:
    config: Any = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm))
    request: Any = SimpleNamespace(block_hashes=list(range(num_hashes)), mm_features=[None] * images)
    return BlockHashes(config, hashed_tokens, chunk_tokens=64).of(request)


def test_each_full_chunk_has_the_hash_of_its_last_block() -> None:
    assert hashes(11) == [3, 7]
    assert hashes(12, algorithm="sha256_cbor") == [3, 7, 11]
    assert hashes(3) == []
    assert hashes(2, hashed_tokens=64) == [0, 1]


def test_hashes_that_do_not_stand_for_the_tokens_are_not_used() -> None:
    assert hashes(12, algorithm="xxhash") == []
    assert hashes(12, images=1) == []
    assert hashes(12, hashed_tokens=None) == []
    assert hashes(12, hashed_tokens=48) == []
    assert hashes(12, hashed_tokens=128) == []
