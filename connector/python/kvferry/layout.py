"""Where the elements of vLLM's KV tensors lie, in strides for the C++ packer; measured, never guessed from shapes."""

from typing import TYPE_CHECKING

import torch

from kvferry.errors import refuse_to_start

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig

# base address, then block, head, token and dim strides, all in bytes
Plane = tuple[int, int, int, int, int]


def attention_specs(kv_cache_config: "KVCacheConfig") -> "list[AttentionSpec]":
    """The spec of each KV cache group; refuses what kvferry can't save yet, by name."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if not specs or any(type(spec) not in (FullAttentionSpec, SlidingWindowSpec) for spec in specs):
        names = ", ".join(sorted({type(spec).__name__ for spec in specs})) or "none"
        refuse_to_start(
            f"this model has {len(specs)} KV cache group(s) of kind {names}; "
            "this version moves those of kind FullAttentionSpec and SlidingWindowSpec"
        )
    shapes = sorted({(spec.block_size, spec.num_kv_heads, spec.head_size) for spec in specs})
    if len(shapes) > 1:
        refuse_to_start(
            f"this model's KV cache groups differ in (block size, KV heads, head size): {shapes}; "
            "this version moves groups of one shape"
        )
    sizes = sorted({window for window in windows(specs) if window})
    if len(sizes) > 1:
        refuse_to_start(f"this model has sliding windows of {sizes} tokens; this version moves those of one size")
    return specs


def windows(specs: "list[AttentionSpec]") -> list[int]:
    """How many tokens the layers of each group attend to; 0: all. A group that vLLM keeps whole counts as 0."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return [spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0 for spec in specs]


def _probe_cpu_page(spec: "AttentionSpec", vllm_config: "VllmConfig") -> tuple[tuple[int, int, int], ...]:
    """(offset, token stride, dim stride) of K and of V inside one block and head of the CPU backend, in elements.

    The CPU kernels keep K in an order of their own that depends on the instruction set, so the kernel itself is asked:
    it writes numbered tokens into a scratch block, and where the numbers landed tells the strides.
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
        # One bit of each element's number at a time, so that a dtype of few bits can't blur them.
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


def cpu_layers(
    kv_caches: dict[str, torch.Tensor],
    kv_cache_config: "KVCacheConfig",
    vllm_config: "VllmConfig",
) -> list[tuple[str, int, Plane, Plane]]:
    """(layer name, KV group, K plane, V plane) for tensors of the CPU backend, in the model's order.

    Shape of each: [num_blocks, num_kv_heads, block_size, 2 * head_size].
    """
    from vllm.model_executor.models.utils import extract_layer_index

    groups = kv_cache_config.kv_cache_groups
    group_of = {name: index for index, group in enumerate(groups) for name in group.layer_names}
    page = _probe_cpu_page(groups[0].kv_cache_spec, vllm_config)
    layers = []
    for name in sorted(kv_caches, key=extract_layer_index):
        tensor = kv_caches[name]
        if tensor.device.type != "cpu":
            refuse_to_start(f"layer {name} keeps its KV on {tensor.device}; this version moves KV in host memory")
        size = tensor.element_size()
        block_stride, head_stride = tensor.stride(0) * size, tensor.stride(1) * size
        planes = [
            (tensor.data_ptr() + start * size, block_stride, head_stride, per_token * size, per_dim * size)
            for start, per_token, per_dim in page
        ]
        layers.append((name, group_of[name], planes[0], planes[1]))
    return layers
