"""Tests that other Python threads run while a worker node packs, hashes and loads megabytes."""

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
    """Encodes a value as MessagePack. Supports only the types in a step's plan."""
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        return struct.pack(">BQ", 0xCF, value)
    if isinstance(value, str):
        return struct.pack(">BB", 0xD9, len(value)) + value.encode()
    assert isinstance(value, list)
    return struct.pack(">BH", 0xDC, len(value)) + b"".join(packed(item) for item in value)


def save(slot: int, generation: int) -> list[object]:
    """Returns a SaveJob of one full chunk."""
    return ["request", [list(range(NUM_BLOCKS))], [[[slot, generation], 0, CHUNK_TOKENS, 0, 0]]]


def load(slot: int, generation: int) -> list[object]:
    """Returns a LoadJob of the same chunk, with a checksum that does not match."""
    item = [[slot, generation], [7], CHUNK_TOKENS, 0, 0, CHUNK_TOKENS]
    return ["request", 1, [list(range(NUM_BLOCKS))], [item], False]


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
    node = core.WorkerNode(extra_json=json.dumps(config), rank=0, label=f"gil_test_{os.getpid()}", layouts=[layout])
    yield node
    node.shutdown()
    del memory


def ticks_during(call: Callable[[], None]) -> int:
    """Returns how often another thread runs during the call."""
    stamps: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            stamps.append(time.perf_counter())
            time.sleep(0.0005)

    thread = threading.Thread(target=tick)
    thread.start()
    time.sleep(0.005)
    began = time.perf_counter()
    call()
    ended = time.perf_counter()
    done.set()
    thread.join()
    return sum(began < stamp < ended for stamp in stamps)


def test_another_thread_runs_while_steps_are_packed_hashed_and_loaded(worker: object) -> None:
    ticks = {"begin_step": 0, "load": 0, "save": 0}
    for step in range(1, 16):
        loads = [load(1, step - 1)] if step > 1 else []
        plan = packed([step, [save(0, step)], loads, [save(1, step)]])
        for name, call in (("begin_step", lambda plan=plan: worker.begin_step(plan)), ("load", worker.load),
                           ("save", worker.save)):
            ticks[name] += ticks_during(call)
        assert worker.take_report() is not None
    # A call that holds Python's lock lets no other thread run before it returns.
    assert min(ticks.values()) >= 3, ticks
