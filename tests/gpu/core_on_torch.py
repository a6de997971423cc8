"""Runs the Python module on torch's tensors: a worker node saves and loads KV that CUDA graphs have written.

It checks bit by bit that a save has what the stream computed before it, although the blocks are overwritten right after
it, and that a load is complete for what the stream runs after it. It measures how long another Python thread stands
still meanwhile. Needs torch with a GPU, and kvferry in the Python path. Exit 77: something of that is missing.
"""

import itertools
import json
import os
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

LAYERS, HEADS, HEAD_DIM, BLOCK_TOKENS, CHUNK_TOKENS, TOKENS = 32, 8, 128, 16, 256, 8192
CHUNKS, BLOCKS = TOKENS // CHUNK_TOKENS, TOKENS // BLOCK_TOKENS
CHUNK_BYTES = LAYERS * 2 * HEADS * HEAD_DIM * 2 * CHUNK_TOKENS
ROUNDS = 5


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


def unpacked(data: bytes, at: int = 0) -> tuple[Any, int]:
    """Decodes the MessagePack value at this position. Supports only the types in a worker's report."""
    tag = data[at]
    at += 1
    if tag < 0x80:
        return tag, at
    if tag in (0xC2, 0xC3):
        return tag == 0xC3, at
    for first, size in ((0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8)):
        if tag == first:
            return int.from_bytes(data[at:at + size], "big"), at + size
    if 0xA0 <= tag < 0xC0 or tag in (0xD9, 0xDA):
        width = {0xD9: 1, 0xDA: 2}.get(tag, 0)
        size = int.from_bytes(data[at:at + width], "big") if width else tag - 0xA0
        return data[at + width:at + width + size].decode(), at + width + size
    if 0x90 <= tag < 0xA0 or tag in (0xDC, 0xDD):
        width = {0xDC: 2, 0xDD: 4}.get(tag, 0)
        size = int.from_bytes(data[at:at + width], "big") if width else tag - 0x90
        at += width
        items = []
        for _ in range(size):
            item, at = unpacked(data, at)
            items.append(item)
        return items, at
    raise ValueError(f"tag {tag:#x} at {at}")


class Engine:
    """An engine's cache in torch tensors, and a worker node for it."""

    def __init__(self, torch: Any, core: Any, settings: Mapping[str, object]) -> None:
        self.torch = torch
        shape = (LAYERS, 2 * BLOCKS + 1, 2, BLOCK_TOKENS, HEADS, HEAD_DIM)
        self.cache = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
        order = torch.randperm(2 * BLOCKS, generator=torch.Generator().manual_seed(1)) + 1
        self.saved, self.loaded = order[:BLOCKS].tolist(), order[BLOCKS:].tolist()
        self.content = torch.randint(-2**15, 2**15, (LAYERS, BLOCKS, 2, BLOCK_TOKENS, HEADS, HEAD_DIM),
                                     dtype=torch.int16, device="cuda").view(torch.bfloat16)
        planes = []
        for number, layer in enumerate(self.cache):
            block, plane, token, head, dim = (stride * 2 for stride in layer.stride())
            strides = (block, head, token, dim)
            planes.append((f"layers.{number}", 0, (layer.data_ptr(), *strides), (layer.data_ptr() + plane, *strides)))
        layout = core.KvLayout(layers=planes, num_kv_heads=HEADS, head_dim=HEAD_DIM, element_bytes=2, planes=2,
                               block_tokens=BLOCK_TOKENS, num_blocks=2 * BLOCKS + 1)
        config = {"chunk_tokens": CHUNK_TOKENS, "pool_bytes": CHUNKS * CHUNK_BYTES, "path": "shm",
                  "advertise_host": "127.0.0.1", **settings}
        self.node = core.WorkerNode(extra_json=json.dumps(config), rank=0, label=f"core_on_torch_{os.getpid()}",
                                    layouts=[layout], gpu=0)
        self.stream = torch.cuda.Stream()
        self.step_number = self.generation = 0
        self.where = torch.tensor(self.saved, device="cuda")  # a member, because each replay of the graph reads it
        self.write = self.graph(lambda: self.cache.index_copy_(1, self.where, self.content))
        self.wipe = self.graph(lambda: self.cache.zero_())

    def graph(self, call: Callable[[], object]) -> Any:
        """Captures a call as a CUDA graph."""
        with self.torch.cuda.stream(self.stream):
            call()
        self.stream.synchronize()
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, stream=self.stream):
            call()
        return graph

    def step(self, before: list[object], loads: list[object], after: list[object]) -> None:
        self.step_number += 1
        self.node.begin_step(packed([self.step_number, before, loads, after]), self.stream.cuda_stream)

    def save(self) -> tuple[list[int], float]:
        """Computes and saves all tokens, and overwrites the blocks at once. Returns the checksums, and the milliseconds
        that the host was blocked.
        """
        self.generation += 1
        items = [[[slot, self.generation], slot * CHUNK_TOKENS, CHUNK_TOKENS, 0, 0] for slot in range(CHUNKS)]
        with self.torch.cuda.stream(self.stream):
            self.write.replay()
            self.step([], [], [["saved", [self.saved], items]])
            self.node.load(self.stream.cuda_stream)
            began = time.perf_counter()
            self.node.save(self.stream.cuda_stream)
            blocked = 1000 * (time.perf_counter() - began)
            self.wipe.replay()
        checksums: dict[int, int] = {}
        deadline = time.monotonic() + 20
        while len(checksums) < CHUNKS and time.monotonic() < deadline:
            report = self.node.take_report()
            for (slot, _), ok, checksum in unpacked(report)[0][2] if report else []:
                assert ok, f"the save of slot {slot} failed"
                checksums[slot] = checksum
            time.sleep(0.0005)
        return [checksums[slot] for slot in range(CHUNKS)], blocked

    def load(self, checksums: list[int]) -> tuple[float, float]:
        """Loads all tokens, asynchronously as every load on a GPU. Returns the milliseconds of the two calls, and the
        milliseconds until the load had ended.
        """
        items = [[[slot, self.generation], [checksum], CHUNK_TOKENS, 0, slot * CHUNK_TOKENS, CHUNK_TOKENS]
                 for slot, checksum in enumerate(checksums)]
        with self.torch.cuda.stream(self.stream):
            began = time.perf_counter()
            self.step([], [["loaded", 1, [self.loaded], items, True]], [])
            self.node.load(self.stream.cuda_stream)
            blocked = 1000 * (time.perf_counter() - began)
            while not (ended := self.node.take_finished_loads()):
                time.sleep(0.0002)
                if self.node.take_report() is None and time.perf_counter() - began > 20:
                    raise TimeoutError("the load did not end")
            assert ended == [("loaded", True)], ended
            self.stream.synchronize()
        return blocked, 1000 * (time.perf_counter() - began)

    def is_right(self) -> bool:
        loaded = self.cache.index_select(1, self.torch.tensor(self.loaded, device="cuda")).view(self.torch.int16)
        return bool(self.torch.equal(loaded, self.content.view(self.torch.int16)))


def longest_silence(call: Callable[[], Any]) -> tuple[Any, float]:
    """Returns the call's result, and the longest time in milliseconds for which another Python thread stood still."""
    stamps: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            stamps.append(time.perf_counter())
            time.sleep(0.0001)

    thread = threading.Thread(target=tick, daemon=True)  # does not outlive a call that fails
    thread.start()
    time.sleep(0.01)
    result = call()
    done.set()
    thread.join()
    return result, 1000 * max(after - before for before, after in itertools.pairwise(stamps))


def main() -> int:
    try:
        import torch
        from kvferry import _core as core
    except ImportError as error:
        print(f"core_on_torch: needs torch and kvferry: {error}")
        return 77
    if not torch.cuda.is_available():
        print("core_on_torch: needs a GPU: torch has no CUDA")
        return 77
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, kvferry {core.version()}: {TOKENS} tokens of "
          "Llama-3.1-8B, ms")
    print(f"{'':<34} {'save':>8} {'load':>8} {'loaded':>8} {'other thread silent':>20}  right")
    wrong = 0
    for name, settings in (("without frames", {"gpu_pool_bytes": 0}),
                           ("with frames", {"gpu_pool_bytes": CHUNKS * CHUNK_BYTES})):
        engine = Engine(torch, core, settings)
        times, is_right = [], True
        for _ in range(ROUNDS):
            checksums, saved = engine.save()
            (blocked, ended), silent = longest_silence(partial(engine.load, checksums))
            is_right = is_right and engine.is_right()
            times.append((saved, blocked, ended, silent))
        saved, blocked, ended, silent = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"{name:<34} {saved:>8.3f} {blocked:>8.3f} {ended:>8.3f} {silent:>20.3f}  {'yes' if is_right else 'NO'}")
        wrong += not is_right
        engine.node.shutdown()
        del engine
        torch.cuda.empty_cache()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
