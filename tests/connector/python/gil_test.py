"""Other Python threads run while a worker node packs, hashes and loads megabytes."""

import ctypes
import json
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

core = pytest.importorskip("kvferry._core", reason="the Python module is not built")

CHUNK_TOKENS, BLOCK_TOKENS, HEADS, HEAD_DIM, LAYERS = 4096, 16, 8, 128, 2
NUM_BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
TOKEN_BYTES = HEADS * HEAD_DIM * 4
PLANE_BYTES = CHUNK_TOKENS * TOKEN_BYTES


def packed(value: object) -> bytes:
    """msgpack, as far as a step's plan needs it."""
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        return struct.pack(">BQ", 0xCF, value)
    if isinstance(value, str):
        return struct.pack(">BB", 0xD9, len(value)) + value.encode()
    assert isinstance(value, list)
    return struct.pack(">BH", 0xDC, len(value)) + b"".join(packed(item) for item in value)


def save(slot: int) -> list[object]:
    """A SaveJob of one full chunk."""
    return ["request", [list(range(NUM_BLOCKS))], [[[slot, 1], 0, CHUNK_TOKENS, 0, 0]]]


def load(slot: int) -> list[object]:
    """A LoadJob of that chunk with a checksum that does not match."""
    return ["request", 1, [list(range(NUM_BLOCKS))], [[[slot, 1], [7], CHUNK_TOKENS, 0, 0, CHUNK_TOKENS]], False]


@pytest.fixture
def worker() -> Iterator[object]:
    memory = ctypes.create_string_buffer(2 * LAYERS * PLANE_BYTES)
    base = ctypes.addressof(memory)
    strides = (BLOCK_TOKENS * TOKEN_BYTES, HEAD_DIM * 4, HEADS * HEAD_DIM * 4, 4)
    layers = [(f"layer{i}", 0, (base + 2 * i * PLANE_BYTES, *strides), (base + (2 * i + 1) * PLANE_BYTES, *strides))
              for i in range(LAYERS)]
    layout = core.KvLayout(layers=layers, num_kv_heads=HEADS, head_dim=HEAD_DIM, element_bytes=4, planes=2,
                           block_tokens=BLOCK_TOKENS, num_blocks=NUM_BLOCKS)
    config = {"chunk_tokens": CHUNK_TOKENS, "pool_bytes": 5 * LAYERS * PLANE_BYTES, "path": "shm",
              "advertise_host": "127.0.0.1"}
    node = core.WorkerNode(extra_json=json.dumps(config), rank=0, label=f"gil_test_{os.getpid()}", layout=layout)
    yield node
    node.shutdown()
    del memory


def ticks_during(call: Callable[[], None]) -> tuple[int, float]:
    """How often another thread runs during the call, and how many seconds the call takes."""
    stamps: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            stamps.append(time.perf_counter())
            time.sleep(0.0005)

    thread = threading.Thread(target=tick)
    thread.start()
    time.sleep(0.01)
    began = time.perf_counter()
    call()
    ended = time.perf_counter()
    done.set()
    thread.join()
    return sum(began < stamp < ended for stamp in stamps), ended - began


def test_another_thread_runs_while_a_step_is_packed_hashed_and_loaded(worker: object) -> None:
    # With the lock held the other thread could not run at all until the call returns.
    for name, call in (
        ("begin_step", lambda: worker.begin_step(packed([1, [save(0)], [], [save(1)]]))),
        ("save", lambda: worker.save()),
    ):
        ticks, seconds = ticks_during(call)
        assert seconds > 0.005, f"{name} took {seconds} s: too little work to see the lock"
        assert ticks >= 2, f"{name} kept the interpreter's lock for {seconds:.3f} s"
    assert worker.take_report() is not None
    worker.begin_step(packed([2, [], [load(0)], []]))
    ticks, seconds = ticks_during(lambda: worker.load())
    assert ticks >= 2, f"load kept the interpreter's lock for {seconds:.3f} s"
    assert worker.take_report() is not None
