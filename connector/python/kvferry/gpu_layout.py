"""Finds where vLLM's GPU backends keep K and V, and describes the places by strides for the C++ packer.

A layer's tensor has the shape [block, head, token, content] for every physical order (vLLM's KVCacheLayout, such
as LBHNC or BLNHC); only the strides differ. K and V of a head are side by side in the content, or all K heads come
before all V heads. K and V are one plane each. A latent cache (MLA), or content in a backend's own format, is one
plane.

If the attention kernel takes smaller blocks than vLLM's block manager gives out, the tensor has several of the kernel's
blocks for each of the manager's.
"""

from typing import TYPE_CHECKING, NamedTuple

from kvferry.errors import refuse_to_start

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import AttentionSpec

# address of the first element, then the strides of block, head, token and dim in bytes
Plane = tuple[int, int, int, int, int]


class LayerPlanes(NamedTuple):
    planes: list[Plane]  # K and V, or one plane: a latent vector, or content in a backend's own format
    num_heads: int
    head_dim: int  # number of elements
    split: int = 1  # number of the tensor's blocks that make one block of vLLM's block manager


def gpu_planes(name: str, tensor: "torch.Tensor", spec: "AttentionSpec") -> LayerPlanes:
    """Returns the planes of one layer. Errors: KvFerryError if this version does not support the tensor's layout."""
    shape = tuple(tensor.shape)
    if len(shape) != 4 or spec.block_size % shape[2] != 0:
        refuse_to_start(
            f"the KV tensor of layer {name} has shape {shape}; this version supports "
            f"[blocks, heads, tokens, content], where tokens is {spec.block_size} or a divisor of it"
        )
    _, heads, tokens, content = shape
    size = tensor.element_size()
    block, head, token, dim = (stride * size for stride in tensor.stride())
    split = spec.block_size // tokens
    if split > 1 and block != tokens * token:
        refuse_to_start(
            f"the attention kernel of layer {name} has blocks of {tokens} tokens where vLLM's block manager has "
            f"{spec.block_size}, and the tokens of a head are not evenly spaced across the smaller blocks; set "
            f"VLLM_KV_CACHE_LAYOUT=NHD, in which they are, or --block-size {tokens}"
        )
    block *= split

    def plane(first_head: int, first_element: int) -> Plane:
        return (tensor.data_ptr() + first_head * head + first_element * dim, block, head, token, dim)

    value_dim = spec.head_size if spec.head_size_v is None else spec.head_size_v
    if value_dim == 0 or spec.state_content_bytes is not None:
        # A latent vector, or content in the backend's own format, is copied unchanged.
        return LayerPlanes([plane(0, 0)], heads, content, split)
    per_head = (spec.num_kv_heads, spec.head_size, split)
    if value_dim == spec.head_size and (heads, content) == (spec.num_kv_heads, 2 * spec.head_size):
        return LayerPlanes([plane(0, 0), plane(0, spec.head_size)], *per_head)
    if value_dim == spec.head_size and (heads, content) == (2 * spec.num_kv_heads, spec.head_size):
        return LayerPlanes([plane(0, 0), plane(spec.num_kv_heads, 0)], *per_head)
    return refuse_to_start(
        f"the KV tensor of layer {name} has shape {shape}; this version cannot find K and V of {spec.num_kv_heads} "
        f"heads in it (a K vector has {spec.head_size} elements, a V vector {value_dim}); it supports K and V of equal "
        f"size, side by side in the content or all K heads before all V heads"
    )
