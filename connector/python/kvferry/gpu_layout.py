"""Where vLLM's GPU backends keep K and V, in strides for the C++ packer.

A layer's tensor is a view of shape [block, head, token, content] whatever the physical order is (vLLM's KVCacheLayout:
LBHNC, LBNHC, BLHNC ...); the strides tell that. Backends differ in where a head's K and V are in it: side by side in
the content, or as two lots of heads. A latent cache (MLA) has one plane.
"""

from typing import TYPE_CHECKING, NamedTuple

from kvferry.errors import refuse_to_start

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import AttentionSpec

# base address, then block, head, token and dim strides, all in bytes
Plane = tuple[int, int, int, int, int]


class GpuPlanes(NamedTuple):
    planes: list[Plane]  # K and V, or the latent vector alone
    num_heads: int
    head_dim: int  # in elements


def gpu_planes(name: str, tensor: "torch.Tensor", spec: "AttentionSpec") -> GpuPlanes:
    """The planes of one layer. Refuses, by name and shape, what is laid out in another way."""
    shape = tuple(tensor.shape)
    if len(shape) != 4 or shape[2] != spec.block_size:
        refuse_to_start(
            f"layer {name} keeps its KV in a tensor of shape {shape}; this version moves those of "
            f"[blocks, heads, {spec.block_size} tokens, content]"
        )
    _, heads, _, content = shape
    size = tensor.element_size()
    block, head, token, dim = (stride * size for stride in tensor.stride())

    def plane(first_head: int, first_element: int) -> Plane:
        return (tensor.data_ptr() + first_head * head + first_element * dim, block, head, token, dim)

    value_dim = spec.head_size if spec.head_size_v is None else spec.head_size_v
    if value_dim == 0 or spec.state_content_bytes is not None:
        # A latent vector, or packed content whose inside is the backend's own: copied as it is.
        return GpuPlanes([plane(0, 0)], heads, content)
    per_head = (spec.num_kv_heads, spec.head_size)
    if value_dim == spec.head_size and (heads, content) == (spec.num_kv_heads, 2 * spec.head_size):
        return GpuPlanes([plane(0, 0), plane(0, spec.head_size)], *per_head)
    if value_dim == spec.head_size and (heads, content) == (2 * spec.num_kv_heads, spec.head_size):
        return GpuPlanes([plane(0, 0), plane(spec.num_kv_heads, 0)], *per_head)
    return refuse_to_start(
        f"layer {name} keeps its KV in a tensor of shape {shape}; with {spec.num_kv_heads} heads of {spec.head_size} "
        f"elements (values: {value_dim}) this version doesn't know where K and V are in it"
    )
