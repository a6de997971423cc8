"""Describes pages of KV as bytes, for chunks of whole blocks.

A chunk contains each block as a whole or not at all, so it does not matter which bytes of a block belong to which
token. Each token of a block gets the same number of consecutive bytes. With context parallelism these are all tokens
of the block, also those whose KV is on other ranks.
"""

from math import prod
from typing import TYPE_CHECKING

from kvferry.errors import refuse_to_start
from kvferry.gpu_layout import LayerPlanes

if TYPE_CHECKING:
    import torch


def page_planes(name: str, tensor: "torch.Tensor", own_tokens: int, block_tokens: int, heads: int) -> LayerPlanes:
    """Returns one plane, whose elements are bytes.

    tensor: [blocks, heads, tokens, content], perhaps with several of the kernel's blocks for each of vLLM's.
    own_tokens: tokens of a block on this rank. block_tokens: tokens of a block on all ranks. heads: 1, or the number of
    KV heads, if the bytes of each head are together.
    """
    shape, size = tuple(tensor.shape), tensor.element_size()
    split = own_tokens // shape[2] if len(shape) == 4 and own_tokens % shape[2] == 0 else 1
    block = prod(shape[1:]) * size * split
    is_together = _is_dense(tensor[0]) and (split == 1 or tensor.stride(0) == prod(shape[1:]))
    if heads > 1:
        is_together &= shape[1] == heads and split == 1 and tensor[0].is_contiguous()
    if not is_together:
        refuse_to_start(f"the KV tensor of layer {name} has shape {shape} and strides {tensor.stride()}; chunks of "
                        "whole blocks need blocks whose bytes are together")
    row, rest = divmod(block // heads, block_tokens)
    if rest:
        refuse_to_start(f"a block of layer {name} has {block} bytes on a rank and {block_tokens} tokens on all ranks; "
                        "chunks of whole blocks need a multiple of that number of bytes; choose another --block-size")
    strides = (tensor.stride(0) * split * size, block // heads, row, 1)
    return LayerPlanes([(tensor.data_ptr(), *strides)], heads, row, split)


def _is_dense(block: "torch.Tensor") -> bool:
    """Returns True if the elements fill one range of memory, in any order."""
    expected = 1
    for stride, count in sorted(zip(block.stride(), block.shape, strict=True)):
        if count > 1 and stride != expected:
            return False
        expected *= count
    return True
