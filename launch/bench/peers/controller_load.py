"""The load of `kvferry bench controller`: launch/bench/harness/controller_load.h in Python, with keys of 64 bits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scramble import scramble, scramble_all

NUM_WORKERS = 64
PREFIX_KEYS = 1024
BATCH_KEYS = 32
LOOKUP_KEYS = 128

Batch = tuple[int, int, int]  # worker, prefix, position of the first key in the prefix


def keys_at(prefix: int, position: int, count: int) -> np.ndarray:
    first = prefix * PREFIX_KEYS + position + 1
    return scramble_all(np.arange(first, first + count, dtype=np.uint64))


def workers_of(prefix: int) -> list[int]:
    first = (scramble(prefix) & 0xFFFFFFFF) % NUM_WORKERS
    if prefix % 2 == 0:
        return [first]
    return [first, (first + 1 + (prefix // 2 & 0xFFFFFFFF) % (NUM_WORKERS - 1)) % NUM_WORKERS]


def batches(begin: int, end: int, batch_keys: int = BATCH_KEYS) -> Iterator[Batch]:
    """Yields each batch of the prefixes [begin, end), once for each worker that holds it. Takes 64 prefixes at a time:
    first the first batch of each prefix, then the second batch of each prefix, and so on.
    """
    for some in range(begin, end, NUM_WORKERS):
        for position in range(0, PREFIX_KEYS, batch_keys):
            for prefix in range(some, min(some + NUM_WORKERS, end)):
                for worker in workers_of(prefix):
                    yield worker, prefix, position
