"""The layout of vLLM's KV tensors, as strides for the C++ packer; for the CPU backend, the strides are measured."""

from typing import TYPE_CHECKING, NamedTuple

import torch

from kvferry.errors import refuse_to_start
from kvferry.gpu_layout import Plane, gpu_planes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig


class CacheLayout(NamedTuple):
    layers: list[tuple[str, int, Plane, Plane]]  # in order: name, KV group, K, V (latent: K again)
    planes: int  # 2, or 1 for a latent cache
    num_kv_heads: int
    head_dim: int  # in elements


def attention_specs(kv_cache_config: "KVCacheConfig") -> "list[AttentionSpec]":
    """Returns the spec of each KV cache group. Errors: KvFerryError, which names the unsupported kinds."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if not specs or any(type(spec) not in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec) for spec in specs):
        names = ", ".join(sorted({type(spec).__name__ for spec in specs})) or "none"
        refuse_to_start(
            f"this model has {len(specs)} KV cache group(s) of kind {names}; "
            "this version supports FullAttentionSpec, MLAAttentionSpec and SlidingWindowSpec"
        )
    shapes = sorted({(spec.block_size, spec.num_kv_heads, spec.head_size) for spec in specs})
    if len(shapes) > 1:
        refuse_to_start(
            f"this model's KV cache groups differ in (block size, KV heads, head size): {shapes}; "
            "this version supports groups of one shape"
        )
    sizes = sorted({window for window in windows(specs) if window})
    if len(sizes) > 1:
        refuse_to_start(f"this model has sliding windows of {sizes} tokens; this version supports one size")
    return specs


def windows(specs: "list[AttentionSpec]") -> list[int]:
    """Returns the number of tokens that the layers of each group attend to, 0 for all."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return [spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0 for spec in specs]


def _probe_cpu_page(spec: "AttentionSpec", vllm_config: "VllmConfig") -> tuple[tuple[int, int, int], ...]:
    """Returns (offset, token stride, dim stride) of K and of V in one block and head of the CPU backend, in elements.

    The CPU kernels store K in an order that depends on the instruction set. So the kernel writes numbered tokens into a
    scratch block, and the strides follow from the positions of the numbers.
    """
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache_dtype = vllm_config.cache_config.cache_dtype
    block, dim = spec.block_size, spec.head_size
    isa = _get_attn_isa(spec.dtype, block, dim, cache_dtype)
    found = []
    for plane in range(2):
        page = torch.zeros((1, 1, block * 2, dim), dtype=spec.dtype)
        key_cache, value_cache = page.chunk(2, dim=2)
        offsets = torch.zeros((block, dim), dtype=torch.int64)
        # Each pass writes one bit of each element's number, since a dtype with few bits cannot represent large numbers.
        numbers = torch.arange(1, block * dim + 1, dtype=torch.int64)
        where = torch.zeros(block * dim * 2, dtype=torch.int64)
        for bit in range((block * dim).bit_length()):
            marks = ((numbers >> bit) & 1).to(spec.dtype).reshape(block, 1, dim)
            zeros = torch.zeros_like(marks)
            page.zero_()
            ops.cpu_attn_reshape_and_cache(
                zeros if plane else marks,
                marks if plane else zeros,
                key_cache,
                value_cache,
                torch.arange(block, dtype=torch.int64),
                isa,
                k_scale=1.0,
                v_scale=1.0,
                kv_cache_dtype=cache_dtype,
            )
            where |= (page.reshape(-1) != 0).to(torch.int64) << bit
        for position, number in enumerate(where.tolist()):
            if number:
                offsets[(number - 1) // dim, (number - 1) % dim] = position
        start = int(offsets[0, 0])
        per_token = int(offsets[1, 0]) - start if block > 1 else dim
        per_dim = int(offsets[0, 1]) - start if dim > 1 else 1
        expected = (
            start + torch.arange(block).unsqueeze(1) * per_token + torch.arange(dim).unsqueeze(0) * per_dim
        )
        if not torch.equal(offsets, expected):
            refuse_to_start(
                f"the CPU attention kernel '{isa}' interleaves its {'V' if plane else 'K'} cache; "
                "start vLLM with --dtype float32"
            )
        found.append((start, per_token, per_dim))
    return tuple(found)


def cache_layout(
    kv_caches: dict[str, torch.Tensor],
    kv_cache_config: "KVCacheConfig",
    vllm_config: "VllmConfig",
) -> CacheLayout:
    """Returns the layout of one worker's KV tensors, which are all on its CPU or all on its GPU."""
    from vllm.model_executor.models.utils import extract_layer_index

    groups = kv_cache_config.kv_cache_groups
    spec_of = {name: (index, group.kv_cache_spec) for index, group in enumerate(groups) for name in group.layer_names}
    devices = sorted({str(tensor.device) for tensor in kv_caches.values()})
    if len(devices) != 1 or devices[0].split(":")[0] not in ("cpu", "cuda"):
        refuse_to_start(
            f"this worker's KV is on {', '.join(devices) or 'no device'}; "
            "this version supports one CPU or one CUDA GPU per worker"
        )
    names = sorted(kv_caches, key=extract_layer_index)
    if devices == ["cpu"]:
        spec = groups[0].kv_cache_spec
        page = _probe_cpu_page(spec, vllm_config)
        planes_of = {name: _cpu_planes(kv_caches[name], page) for name in names}
        return CacheLayout([(name, spec_of[name][0], *planes_of[name]) for name in names], 2, spec.num_kv_heads,
                           spec.head_size)
    found = {name: gpu_planes(name, kv_caches[name], spec_of[name][1]) for name in names}
    shapes = sorted({(len(one.planes), one.num_heads, one.head_dim) for one in found.values()})
    if len(shapes) != 1:
        refuse_to_start(f"this model's layers differ in (planes, heads, elements): {shapes}; "
                        "this version supports layers of one kind")
    layers = [(name, spec_of[name][0], found[name].planes[0], found[name].planes[-1]) for name in names]
    return CacheLayout(layers, *shapes[0])


def shard_of(
    layout: CacheLayout, vllm_config: "VllmConfig", pp_rank: int, tp_rank: int
) -> tuple[int, int, int, int]:
    """Returns the worker's part of the model's KV: first layer, number of layers, first KV head, number of KV heads."""
    from vllm.distributed.utils import get_pp_indices
    from vllm.model_executor.models.utils import extract_layer_index

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    stages, tp_size = parallel.pipeline_parallel_size, parallel.tensor_parallel_size
    first = 0
    if stages > 1:
        first, end = get_pp_indices(model.get_total_num_hidden_layers(), pp_rank, stages)
        found = [extract_layer_index(name) for name, *_ in layout.layers]
        if found != list(range(first, end)):
            refuse_to_start(
                f"stage {pp_rank} of the pipeline has layers {first} to {end - 1}, but KV of layers {found}; "
                "with pipeline parallelism this version supports only models whose layers all have their own KV"
            )
    heads = layout.num_kv_heads
    if tp_size == 1:
        return first, len(layout.layers), 0, heads
    total = 1 if model.use_mla else model.get_total_num_kv_heads()
    if heads != max(1, total // tp_size):
        refuse_to_start(f"this worker has {heads} KV heads, not its share of {total} at tensor parallel size {tp_size}")
    # If there are more ranks than heads, neighbouring ranks have the same head.
    return first, len(layout.layers), tp_rank * total // tp_size, heads


def _cpu_planes(tensor: torch.Tensor, page: tuple[tuple[int, int, int], ...]) -> tuple[Plane, Plane]:
    """Returns K and V of a CPU backend's tensor, which is [num_blocks, num_kv_heads, block_size, 2 * head_size]."""
    size = tensor.element_size()
    block_stride, head_stride = tensor.stride(0) * size, tensor.stride(1) * size
    key, value = (
        (tensor.data_ptr() + start * size, block_stride, head_stride, per_token * size, per_dim * size)
        for start, per_token, per_dim in page
    )
    return key, value
