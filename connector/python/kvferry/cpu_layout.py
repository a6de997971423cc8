"""Finds where vLLM's CPU backend keeps K and V, and describes the places by strides for the C++ packer.

The order of the elements depends on the instruction set, the element type and whether the KV is quantized. To find the
order, this module lets vLLM's attention kernel write numbered elements into a scratch block. The strides follow from
the positions of the numbers.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch

from kvferry.errors import refuse_to_start
from kvferry.gpu_layout import LayerPlanes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec


class PageStrides(NamedTuple):
    """The place of K or V within one block and head. All fields count elements."""

    start: int
    token: int
    dim: int


def probe_page(spec: "AttentionSpec", vllm_config: "VllmConfig") -> list[PageStrides]:
    """Returns the strides of K and of V. Errors: KvFerryError if the kernel can't store such KV, or if strides can't
    express its order of elements.
    """
    isa, written = written_offsets(spec, vllm_config)
    found = []
    for name, offsets in zip("KV", written, strict=True):
        strides = strides_of(offsets)
        if strides is None:
            refuse_to_start(
                f"vLLM's attention for CPUs ('{isa}' kernel) interleaves the elements of {name} of type {spec.dtype} "
                "in some layers only, which this version can't pack; set whole_blocks to true"
            )
        found.append(strides)
    return found


def strides_of(offsets: torch.Tensor) -> PageStrides | None:
    """Returns the strides that lead to these offsets of tokens and dims; None if there are none."""
    start, (block, dim) = int(offsets[0, 0]), offsets.shape
    strides = PageStrides(
        start,
        int(offsets[1, 0]) - start if block > 1 else dim,
        int(offsets[0, 1]) - start if dim > 1 else 1,
    )
    expected = start + torch.arange(block).unsqueeze(1) * strides.token + torch.arange(dim) * strides.dim
    return strides if torch.equal(offsets, expected) else None


def written_offsets(spec: "AttentionSpec", vllm_config: "VllmConfig") -> tuple[str, list[torch.Tensor]]:
    """Returns vLLM's name for the kernel, and the offset in a block of each token and dim of K and of V, the same in
    each KV head. Errors: KvFerryError if the kernel can't store such KV.
    """
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model_dtype = vllm_config.model_config.dtype
    # --kv-cache-dtype-skip-layers leaves some layers in the model's type.
    cache_dtype = vllm_config.cache_config.cache_dtype if spec.dtype == torch.uint8 else "auto"
    if spec.dtype not in (model_dtype, torch.uint8):  # with any other element type the kernel would hang
        refuse_to_start(
            f"vLLM's attention for CPUs can't store KV of element type {spec.dtype} from {model_dtype}; "
            "--kv-cache-dtype can be auto, fp8, fp8_e4m3 or fp8_e5m2"
        )
    try:
        isa = _get_attn_isa(model_dtype, spec.block_size, spec.head_size, cache_dtype)
        return isa, [_written_offsets(spec, model_dtype, cache_dtype, isa, plane) for plane in range(2)]
    except RuntimeError as error:  # this also catches NotImplementedError
        reason = str(error).splitlines()[0]
        refuse_to_start(
            f"vLLM's attention for CPUs can't store KV of head size {spec.head_size} and element type {spec.dtype} "
            f"from {model_dtype} ({reason}); choose other values for --dtype and --kv-cache-dtype"
        )


def _written_offsets(
    spec: "AttentionSpec", model_dtype: torch.dtype, cache_dtype: str, isa: str, plane: int
) -> torch.Tensor:
    """Returns the offset in a block at which the kernel writes each token and dim of K (plane 0) or V (plane 1)."""
    from vllm import _custom_ops as ops

    block, dim = spec.block_size, spec.head_size
    page = torch.zeros((1, 1, block * 2, dim), dtype=spec.dtype)
    key_cache, value_cache = page.chunk(2, dim=2)
    # Each pass writes one bit of each element's number, since a dtype with few bits cannot represent large numbers.
    numbers = torch.arange(1, block * dim + 1, dtype=torch.int64)
    where = torch.zeros(block * dim * 2, dtype=torch.int64)
    for bit in range((block * dim).bit_length()):
        marks = ((numbers >> bit) & 1).to(model_dtype).reshape(block, 1, dim)
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
    offsets = torch.zeros(block * dim, dtype=torch.int64)
    positions = ((where > 0) & (where <= block * dim)).nonzero().flatten()
    offsets[where[positions] - 1] = positions
    return offsets.reshape(block, dim)


def check_shape(name: str, tensor: torch.Tensor, spec: "AttentionSpec") -> None:
    """Refuses a layer's tensor that isn't [blocks, KV heads, block size, 2 * head size]."""
    expected = (spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
    if tuple(tensor.shape[1:]) != expected or tensor.dtype.itemsize != spec.dtype.itemsize:
        refuse_to_start(
            f"the KV tensor of layer {name} has shape {tuple(tensor.shape)} and type {tensor.dtype}; this version "
            f"supports [blocks, {', '.join(map(str, expected))}] of {spec.dtype} on CPUs"
        )


def cpu_planes(name: str, tensor: torch.Tensor, spec: "AttentionSpec", page: list[PageStrides]) -> LayerPlanes:
    """Returns K and V of one layer."""
    check_shape(name, tensor, spec)
    size = tensor.element_size()
    block, head = tensor.stride(0) * size, tensor.stride(1) * size
    planes = [
        (tensor.data_ptr() + strides.start * size, block, head, strides.token * size, strides.dim * size)
        for strides in page
    ]
    return LayerPlanes(planes, spec.num_kv_heads, spec.head_size)


def check_latents(vllm_config: "VllmConfig") -> None:
    """Refuses what is untested of latent attention (MLA) on CPUs: vLLM's kernel for CPUs with AMX, and types other than
    float32, whose rounding depends on how a prompt is divided. The kernel CPU_MLA writes a token's latent and then its
    rope part in one row of the tensor, as kernels for GPUs do.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    chosen = vllm_config.attention_config.backend
    if torch.cpu._is_amx_tile_supported() and chosen != AttentionBackendEnum.CPU_MLA:
        refuse_to_start("this model has latent attention (MLA), with which vLLM's AMX kernel is untested; start vLLM "
                        "with --attention-backend CPU_MLA")
    if vllm_config.model_config.dtype != torch.float32:
        refuse_to_start("this model has latent attention (MLA), which this version serves on CPUs in float32 only; "
                        "start vLLM with --dtype float32")
