"""Tests the layouts of chunks of whole blocks: the order that vLLM's AMX kernel for CPUs writes, context parallelism,
and pages in a GPU's tensors. No server runs; no test needs AMX, whose order a function here writes.
"""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvferry._core import KvFerryError
from kvferry.blocks.order import block_order, scheduler_specs
from kvferry.blocks.pages import page_planes
from kvferry.handshake import WorkerHello, checked_payloads
from kvferry.layout import CacheLayout, cache_layout, shard_of
from kvferry.served import kv_groups, served_specs
from vllm.v1 import kv_cache_interface as kinds
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

BLOCKS, HEADS, TOKENS, DIM = 3, 2, 32, 64
SHAPE: dict[str, Any] = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": DIM, "dtype": torch.bfloat16}


def config(device: str = "cpu", decode: int = 1, prefill: int = 1, tensor: int = 1, interleave: int = 1) -> Any:
    """Returns those parts of a VllmConfig that are read here."""
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16, runner_type="generate"),
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_match_unit=None),
        attention_config=SimpleNamespace(backend=None), device_config=SimpleNamespace(device_type=device),
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=prefill, decode_context_parallel_size=decode, tensor_parallel_size=tensor,
            pipeline_parallel_size=1, cp_kv_cache_interleave_size=interleave))


def groups(*specs: KVCacheSpec) -> KVCacheConfig:
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[
        KVCacheGroupSpec([f"model.layers.{group}.self_attn"], spec) for group, spec in enumerate(specs)])


def full(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**SHAPE | changes)


def places(block: int, dim: int, token: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns where vLLM's AMX kernel puts the elements of a token's K and V in a block of a KV head: groups of 16
    tokens that take turns by two elements of K, and two tokens that take turns in 16 elements of V.
    """
    element = torch.arange(dim)
    keys = token // 16 * 16 * dim + element // 2 * 32 + token % 16 * 2 + element % 2
    values = element // 16 * 16 * block + token // 2 * 32 + element % 16 * 2 + token % 2
    return keys, values


def write_as_amx(keys: torch.Tensor, values: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
                 slots: torch.Tensor, *_: Any, **__: Any) -> None:
    heads, block, dim = key_cache.shape[1:]
    for row, slot in enumerate(slots.tolist()):
        page, token = divmod(slot, block)
        for cache, written, at in zip((key_cache, value_cache), (keys, values), places(block, dim, token), strict=True):
            cache[page].view(heads, block * dim)[:, at] = written[row].to(cache.dtype)


@pytest.fixture
def amx(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import _custom_ops
    from vllm.v1.attention.backends import cpu_attn

    monkeypatch.setattr(_custom_ops, "cpu_attn_reshape_and_cache", write_as_amx)
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: "amx")


def tensor(spec: FullAttentionSpec) -> torch.Tensor:
    return torch.zeros(BLOCKS, spec.num_kv_heads, spec.block_size, 2 * spec.head_size, dtype=spec.dtype)


def page_of(layout: CacheLayout, layer: int, block: int) -> torch.Tensor:
    """Returns a view of the bytes of a block: [head, token, byte], computed only from the layout."""
    base, per_block, *strides = layout.layers[layer][2]
    assert (layout.planes, layout.element_bytes) == (1, 1)
    shape = (layout.num_kv_heads, layout.block_tokens, layout.head_dim)
    memory = (ctypes.c_uint8 * (strides[0] * shape[0])).from_address(base + block * per_block)
    return torch.frombuffer(memory, dtype=torch.uint8).as_strided(shape, strides)


@pytest.mark.usefixtures("amx")
def test_the_order_of_an_amx_kernel_is_recognised_and_named() -> None:
    order = block_order(groups(full()), config(), is_wanted=False)
    assert order.startswith("order=amx:")
    assert order.endswith(",blocks:32 ")
    assert block_order(groups(full(num_kv_heads=1)), config(tensor=2), is_wanted=False) == order  # a share of the heads
    assert block_order(groups(full(block_size=64)), config(), is_wanted=False) != order  # V depends on it
    assert block_order(groups(full(head_size=32)), config(), is_wanted=False) != order


def test_an_order_with_strides_needs_no_whole_blocks_but_may_have_them() -> None:
    spec, settings = full(dtype=torch.float32), config()
    settings.model_config.dtype = torch.float32
    assert block_order(groups(spec), settings, is_wanted=False) == ""
    assert block_order(groups(spec), settings, is_wanted=True).startswith("order=vec:")


@pytest.mark.usefixtures("amx")
def test_a_page_in_the_order_of_an_amx_kernel_is_copied_whole_and_by_heads() -> None:
    """Two heads go to a rank with both of them, and one of them to a rank with this head only."""
    made = groups(full())
    name = made.kv_cache_groups[0].layer_names[0]
    there, here, alone = tensor(full()), tensor(full()), tensor(full(num_kv_heads=1))
    written = torch.randn(2, TOKENS, HEADS, DIM).to(torch.bfloat16)
    write_as_amx(*written, *there.view(BLOCKS, HEADS, 2 * TOKENS, DIM).chunk(2, dim=2), torch.arange(TOKENS) + TOKENS,
                 "amx")
    (source,) = cache_layout({name: there}, made, config(), whole_blocks=True)
    (target,) = cache_layout({name: here}, made, config(), whole_blocks=True)
    (share,) = cache_layout({name: alone}, groups(full(num_kv_heads=1)), config(tensor=2), whole_blocks=True)
    assert (source.num_kv_heads, source.block_tokens, source.head_dim) == (HEADS, TOKENS, 4 * DIM)
    assert (share.num_kv_heads, share.head_dim) == (1, 4 * DIM)
    page_of(target, 0, 2).copy_(page_of(source, 0, 1))
    page_of(share, 0, 0).copy_(page_of(source, 0, 1)[1:])
    for found, heads, block in ((here, range(HEADS), 2), (alone, range(1, HEADS), 0)):
        pages = found[block].view(len(heads), 2, TOKENS * DIM)
        for token in range(TOKENS):
            for plane, at in enumerate(places(TOKENS, DIM, token)):
                assert torch.equal(pages[:, plane, at], written[plane, token, list(heads)])
    assert here[:2].count_nonzero() == 0
    assert alone[1:].count_nonzero() == 0


@pytest.mark.usefixtures("amx")
def test_only_whole_blocks_can_be_packed_from_an_interleaved_order() -> None:
    made = groups(full())
    with pytest.raises(KvFerryError, match=r"\('amx' kernel\) interleaves the elements of K .*; set whole_blocks to"):
        cache_layout({made.kv_cache_groups[0].layer_names[0]: tensor(full())}, made, config())


def test_chunks_of_whole_blocks_are_not_converted() -> None:
    with pytest.raises(KvFerryError, match=r"chunk_dtype is 'float16', but this server's chunks are whole blocks"):
        block_order(groups(full()), config(), is_wanted=True, chunk_dtype="float16")


def test_workers_on_other_processors_than_the_scheduler_are_refused() -> None:
    order = "order=amx:0123abcd,blocks:32 "
    with pytest.raises(KvFerryError, match=r"'' at the worker of rank \(0, 1\) and 'order=amx:0123abcd,blocks:32' at"):
        checked_payloads({(0, 0): WorkerHello(b"", order=order), (0, 1): WorkerHello(b"")}, "", order)


# ---- context parallelism ----


def test_the_scheduler_counts_the_tokens_of_a_block_on_all_context_ranks() -> None:
    specs = served_specs(groups(full(block_size=16)), config("cuda", decode=4, tensor=4))
    assert kv_groups(scheduler_specs(specs, config("cuda", decode=4, tensor=4))) == [(64, 0, False)]
    assert kv_groups(scheduler_specs(specs, config("cuda", tensor=4))) == [(16, 0, False)]


@pytest.mark.parametrize("change", [{"decode": 4}, {"prefill": 2}, {"tensor": 8}, {"interleave": 16}])
def test_the_order_has_the_sizes_of_context_parallelism(change: dict[str, int]) -> None:
    sizes = {"decode": 2, "tensor": 4}
    order = block_order(groups(full()), config("cuda", **sizes), is_wanted=False)
    assert " context=decode:2,prefill:1,interleave:1,tensor_parallel:4 " in order
    assert block_order(groups(full()), config("cuda", **sizes | change), is_wanted=False) != order


def test_context_ranks_with_the_same_heads_are_no_replicas_of_each_other() -> None:
    made, settings = groups(full()), config("cuda", decode=2, tensor=4)
    name = made.kv_cache_groups[0].layer_names[0]
    (layout,) = cache_layout({name: tensor(full())}, made, settings, whole_blocks=True)
    page = 2 * HEADS * TOKENS * DIM * 2
    assert (layout.num_kv_heads, layout.block_tokens, layout.head_dim) == (1, 2 * TOKENS, page // (2 * TOKENS))
    assert [shard_of([layout], settings, 0, rank, has_own_pages=True) for rank in range(4)] == [
        (0, 1, rank, 1) for rank in range(4)]


REFUSED = {
    "prefill context parallelism alone": (
        (full(),), {"prefill": 2}, "serves prefill context parallelism only together with decode context parallelism"),
    "context parallelism and state": (
        (full(), kinds.MambaSpec(block_size=TOKENS, shapes=((2, 64),), dtypes=(torch.float32,),
                                 mamba_cache_mode="align")), {"decode": 2, "tensor": 2},
        "layers with state, which this version doesn't serve together with context parallelism"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_of_context_parallelism_is_refused(what: str) -> None:
    specs, sizes, sentence = REFUSED[what]
    with pytest.raises(KvFerryError, match=sentence):
        served_specs(groups(*specs), config("cuda", **sizes))


def test_a_vllm_before_0_32_has_no_context_parallelism_with_kvferry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", "0.31.0")
    with pytest.raises(KvFerryError, match=r"size is 2, which .* with vLLM 0\.32 or later; this is vLLM 0\.31\.0"):
        scheduler_specs([full()], config("cuda", decode=2, tensor=2))


# ---- pages in a GPU's tensors ----


def view(layout: KVCacheLayout) -> torch.Tensor:
    """Returns the view [block, head, token, content] of the second of two layers in the memory order of the layout."""
    logical = (2, BLOCKS, HEADS, TOKENS, 2 * DIM)
    memory = torch.arange(torch.Size(logical).numel(), dtype=torch.int32)
    physical = memory.reshape([logical[axis] for axis in layout.stride_order])
    return physical.permute([layout.stride_order.index(axis) for axis in range(5)])[1]


@pytest.mark.parametrize("layout", list(KVCacheLayout))
def test_a_page_is_copied_whole_or_refused(layout: KVCacheLayout) -> None:
    tensor = view(layout)
    if not layout.name.startswith(("LB", "BL")):
        with pytest.raises(KvFerryError, match=r"has shape .*; chunks of whole blocks need blocks whose bytes are tog"):
            page_planes("layer", tensor, TOKENS, TOKENS, 1)
        return
    found = page_planes("layer", tensor, TOKENS, 2 * TOKENS, 1)
    (base, per_block, *strides), size = found.planes[0], HEADS * TOKENS * 2 * DIM * 4
    row = size // (2 * TOKENS)
    assert (found.num_heads, found.head_dim, strides) == (1, row, [size, row, 1])
    for block in range(BLOCKS):
        whole = torch.empty(0, dtype=torch.int32).set_(tensor.untyped_storage())
        first = (base + block * per_block - whole.data_ptr()) // 4
        assert torch.equal(whole[first : first + size // 4].sort().values, tensor[block].flatten().sort().values)


def test_a_kernels_smaller_blocks_make_one_page() -> None:
    tensor = torch.zeros(2 * BLOCKS, HEADS, TOKENS // 2, 2 * DIM)
    found = page_planes("layer", tensor, TOKENS, TOKENS, 1)
    assert found.split == 2
    assert found.planes[0][1] == HEADS * TOKENS * 2 * DIM * 4
    with pytest.raises(KvFerryError, match="need blocks whose bytes are together"):
        page_planes("layer", torch.zeros(2 * BLOCKS, 2, HEADS, TOKENS // 2, 2 * DIM)[:, 0], TOKENS, TOKENS, 1)


def test_a_page_that_tokens_do_not_divide_is_refused() -> None:
    with pytest.raises(KvFerryError, match=r"has 192 bytes on a rank and 128 tokens on all ranks; .* --block-size"):
        page_planes("layer", torch.zeros(BLOCKS, 1, 16, 3), 16, 128, 1)
