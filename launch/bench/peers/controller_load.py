"""The load of `kvferry bench controller`: launch/bench/controller/controller_load.h in Python, with keys of 64 bits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

NUM_WORKERS = 64
PREFIX_KEYS = 1024
BATCH_KEYS = 32
LOOKUP_KEYS = 128
MASK = (1 << 64) - 1

Batch = tuple[int, int, int]  # worker, prefix, position


def scramble(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def keys_at(prefix: int, position: int, count: int) -> np.ndarray:
    first = prefix * PREFIX_KEYS + position + 1
    with np.errstate(over="ignore"):
        x = np.arange(first, first + count, dtype=np.uint64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def workers_of(prefix: int) -> list[int]:
    first = (scramble(prefix) & 0xFFFFFFFF) % NUM_WORKERS
    if prefix % 2 == 0:
        return [first]
    return [first, (first + 1 + (prefix // 2 & 0xFFFFFFFF) % (NUM_WORKERS - 1)) % NUM_WORKERS]


def batches(begin: int, end: int, batch_keys: int = BATCH_KEYS) -> Iterator[Batch]:
    """Prefixes [begin, end), 64 at a time in turns."""
    for some in range(begin, end, NUM_WORKERS):
        for position in range(0, PREFIX_KEYS, batch_keys):
            for prefix in range(some, min(some + NUM_WORKERS, end)):
                for worker in workers_of(prefix):
                    yield worker, prefix, position
