"""Measures how others copy KV between blocks and chunks, in the shapes of `gpu_paths_bench blocks`, which runs first.

4096 tokens of Llama-3.1-8B (512 MiB) in blocks of 16 tokens in random order, to and from memory of the GPU and pinned
host memory: torch's index_select and index_copy_ for each layer, one torch copy for each block, and LMCache's kernel if
its module can be loaded (the folder `peers` beside this file, or LMCACHE_OPS). vLLM's own swap_blocks() is a
cudaMemcpyAsync for each block, which gpu_paths_bench measures without Python. Needs torch with a GPU. Exit 77: there is
none.
"""

import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
LAYERS, HEADS, HEAD_DIM, BLOCK_TOKENS, CHUNK_TOKENS, TOKENS = 32, 8, 128, 16, 256, 4096
BLOCKS, CHUNKS = TOKENS // BLOCK_TOKENS, TOKENS // CHUNK_TOKENS
BYTES = LAYERS * 2 * HEADS * HEAD_DIM * 2 * TOKENS
ROUNDS = 5


def lmcache_ops() -> tuple[ModuleType | None, str]:
    """Returns LMCache's module of kernels and its name, or None and why it can't be used."""
    named = os.environ.get("LMCACHE_OPS")
    found = [Path(named)] if named else sorted((HERE / "peers").glob("*/c*_ops*.so"))
    why = "its module was not brought along"
    for path in found:
        spec = importlib.util.spec_from_file_location(f"lmcache.{path.name.partition('.')[0]}", path)
        assert spec is not None and spec.loader is not None
        try:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except ImportError as error:
            why = f"{path.parent.name}: {str(error).splitlines()[0]}"
            continue
        return module, path.parent.name
    return None, why


class Bench:
    """The cache, the chunks in one kind of memory, and the clock."""

    def __init__(self, torch: Any, is_pinned: bool) -> None:
        self.torch = torch
        generator = torch.Generator().manual_seed(1)
        self.blocks = torch.randperm(2 * BLOCKS, generator=generator)[:BLOCKS]
        self.cache = [torch.randn((2 * BLOCKS, 2, BLOCK_TOKENS, HEADS, HEAD_DIM), device="cuda").to(torch.bfloat16)
                      for _ in range(LAYERS)]
        self.is_pinned = is_pinned
        shape = (LAYERS, BLOCKS, 2, BLOCK_TOKENS, HEADS, HEAD_DIM)
        self.staging = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        self.chunks = torch.empty(shape, dtype=torch.bfloat16, pin_memory=True) if is_pinned else self.staging
        # LMCache's chunks: [k or v][layer][token][head and dim]
        self.tokens = [torch.empty((2, LAYERS, CHUNK_TOKENS, HEADS * HEAD_DIM), dtype=torch.bfloat16,
                                   **({"pin_memory": True} if is_pinned else {"device": "cuda"}))
                       for _ in range(CHUNKS)]
        self.index = self.blocks.cuda()
        rows = torch.arange(BLOCK_TOKENS)
        self.slots = (self.blocks[:, None] * BLOCK_TOKENS + rows[None, :]).flatten().cuda()
        self.pointers = torch.tensor([layer.data_ptr() for layer in self.cache], dtype=torch.int64, device="cuda")

    def measure(self, name: str, call: Callable[[], None]) -> None:
        """Prints the GB/s and the milliseconds until the host is free and until the end."""
        free, whole = [], []
        for turn in range(ROUNDS + 1):
            self.torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            called = time.perf_counter()
            self.torch.cuda.synchronize()
            if turn > 0:  # the first one warms up
                free.append(1000 * (called - began))
                whole.append(1000 * (time.perf_counter() - began))
        ms = statistics.median(whole)
        print(f"{name:<44} {BYTES / ms / 1e6:>8.1f} {statistics.median(free):>9.3f} {ms:>9.3f}", flush=True)

    def select(self) -> None:
        for layer, selected in zip(self.cache, self.staging, strict=True):
            self.torch.index_select(layer, 0, self.index, out=selected)
        if self.is_pinned:
            self.chunks.copy_(self.staging, non_blocking=True)

    def insert(self) -> None:
        if self.is_pinned:
            self.staging.copy_(self.chunks, non_blocking=True)
        for layer, selected in zip(self.cache, self.staging, strict=True):
            layer.index_copy_(0, self.index, selected)

    def copy_blocks(self) -> None:
        blocks = self.blocks.tolist()
        for layer, chunk in zip(self.cache, self.chunks, strict=True):
            for number, block in enumerate(blocks):
                chunk[number].copy_(layer[block], non_blocking=True)

    def lmcache(self, ops: ModuleType, gathers: bool) -> None:
        formats = getattr(ops, "GPUKVFormat", None) or ops.EngineKVFormat
        direction = ops.TransferDirection.D2H if gathers else ops.TransferDirection.H2D
        for number, chunk in enumerate(self.tokens):
            slots = self.slots[number * CHUNK_TOKENS:(number + 1) * CHUNK_TOKENS]
            ops.multi_layer_kv_transfer(chunk, self.pointers, slots, self.cache[0].device, 2 * BLOCKS * BLOCK_TOKENS,
                                        direction, formats.NL_X_NB_TWO_BS_NH_HS, block_size=BLOCK_TOKENS,
                                        head_size=HEAD_DIM)

    def lmcache_is_right(self) -> bool:
        """Returns whether LMCache's chunks have what index_select() finds."""
        torch = self.torch
        self.select()
        torch.cuda.synchronize()
        for number, chunk in enumerate(self.tokens):
            per_chunk = CHUNK_TOKENS // BLOCK_TOKENS
            blocks = self.staging[:, number * per_chunk:(number + 1) * per_chunk]
            expected = blocks.permute(2, 0, 1, 3, 4, 5).reshape(2, LAYERS, CHUNK_TOKENS, HEADS * HEAD_DIM)
            if not torch.equal(chunk.cuda(), expected):
                return False
        return True


def main() -> int:
    try:
        import torch
    except ImportError as error:
        print(f"peers_bench: needs torch: {error}")
        return 77
    if not torch.cuda.is_available():
        print("peers_bench: needs a GPU: torch has no CUDA")
        return 77
    program = HERE / "bin" / "gpu_paths_bench"
    if program.exists():
        own = os.environ | {"LD_LIBRARY_PATH": str(HERE / "lib")}
        subprocess.run([str(program), "dma", "blocks"], env=own, check=False)
    ops, name = lmcache_ops()
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, LMCache: {name}\n"
          f"{'':<44} {'GB/s':>8} {'host ms':>9} {'ms':>9}")
    for is_pinned in (False, True):
        bench = Bench(torch, is_pinned)
        where = "pinned memory" if is_pinned else "GPU memory"
        bench.measure(f"torch index_select a layer, to {where}", bench.select)
        bench.measure(f"torch index_copy_ a layer, from {where}", bench.insert)
        bench.measure(f"torch copy_ a block, to {where}", bench.copy_blocks)
        if ops is not None:
            try:
                bench.measure(f"LMCache's kernel, to {where}", lambda to=bench: to.lmcache(ops, True))
                print(f"LMCache's chunks are {'right' if bench.lmcache_is_right() else 'WRONG'}")
                bench.measure(f"LMCache's kernel, from {where}", lambda to=bench: to.lmcache(ops, False))
            except (RuntimeError, TypeError, AttributeError) as error:
                print(f"LMCache's kernel failed: {str(error).splitlines()[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
