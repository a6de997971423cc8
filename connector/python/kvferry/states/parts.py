"""Finds which bytes of a model's states each tensor parallel rank has, so that nodes of unlike sizes can share states.

vLLM keeps the states of a layer one after the other in a page: the last inputs of a convolution, then the state itself,
then padding. A rank has some of the heads of a state and the convolution's channels that belong to them. How the
channels are divided is not told by their number, so it is found by comparing vLLM's shapes at this server's tensor
parallel size with those at size 1.
"""

import copy
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from kvferry.errors import refuse_to_start

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import MambaSpec

    from kvferry.layout import CacheLayout

Shapes = tuple[tuple[int, ...], ...]


class Part(NamedTuple):
    """Part of a layer's bytes of which ranks have consecutive ones; the fields of LayerPart (shard_map.h)."""

    whole: int  # bytes on all ranks together; 0: padding
    first: int  # place of the rank's first byte
    bytes: int


class _Share(NamedTuple):
    """Channels or elements of which ranks have consecutive ones."""

    whole: int
    own: int  # number on each rank; ranks may all have the same


# first layer; [layer] its kind; [kind] its parts
ChunkParts = tuple[int, list[int], list[list[Part]]]


def whole_shapes(specs: "Iterable[MambaSpec]", vllm_config: "VllmConfig") -> Shapes | None:
    """Returns the shapes of a layer's states on all tensor parallel ranks together. Returns None if the specs have
    other states than vLLM tells for the whole model, or if this version does not know how ranks divide them.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    model = vllm_config.model_config
    model_class, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
    shapes_of = getattr(model_class, "get_mamba_state_shape_from_config", None)
    if shapes_of is None:
        return None
    alone = copy.copy(vllm_config)
    alone.parallel_config = copy.copy(vllm_config.parallel_config)
    alone.parallel_config.tensor_parallel_size = 1
    whole: Shapes = tuple(map(tuple, shapes_of(alone)))
    own: Shapes = tuple(map(tuple, shapes_of(vllm_config)))
    size = vllm_config.parallel_config.tensor_parallel_size
    is_known = all(tuple(map(tuple, spec.shapes)) == own and _shares(spec, whole, size) is not None for spec in specs)
    return whole if is_known else None


def state_parts(spec: "MambaSpec", whole: Shapes, tp_rank: int, tp_size: int) -> list[Part]:
    """Returns the parts of a page of states in the order of its bytes. whole: the result of whole_shapes()."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    found = _shares(spec, whole, tp_size)
    if found is None:
        refuse_to_start(f"this model has layers with states of shapes {spec.shapes}, which tensor parallel ranks "
                        f"divide otherwise than those of other layers, of {whole} on all ranks together")
    channels, heads = found
    parts: list[Part] = []

    def add(share: _Share, size: int) -> None:
        first = tp_rank * share.own if share.own < share.whole else 0
        parts.append(Part(share.whole * size, first * size, share.own * size))

    element, rows = spec.dtypes[0].itemsize, _conv_shape(spec.shapes[0])[0]
    if is_conv_state_dim_first():  # the inputs of a channel are side by side
        for share in channels:
            add(share, rows * element)
    else:
        for _ in range(rows):
            for share in channels:
                add(share, element)
    if heads is not None:
        add(heads, prod(spec.shapes[1][1:]) * spec.dtypes[1].itemsize)
    # Nodes of other sizes may have padding where this one has none, so that it is always named.
    return [*parts, Part(0, 0, spec.page_size_bytes - sum(part.bytes for part in parts))]


def chunk_parts(layout: "CacheLayout", specs: "dict[str, Any]", whole: Shapes, vllm_config: "VllmConfig",
                shard: tuple[int, int, int, int], tp_rank: int) -> ChunkParts:  # fmt: skip
    """Returns which bytes of each layer the worker has in a chunk, which is one block.

    layout: of all layers, since a model with layers of state has one. specs: the spec of each layer. whole: the result
    of whole_shapes() for those with state. shard: the result of shard_of() in layout.py.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    model, size = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
    first_layer, _, first_head, num_heads = shard
    head = layout.planes * layout.block_tokens * layout.head_dim * layout.element_bytes
    total = num_heads if size == 1 else model.get_total_num_kv_heads()
    kinds: dict[tuple[Part, ...], int] = {}
    each = []
    for name, *_ in layout.layers:
        parts = (state_parts(specs[name], whole, tp_rank, size) if isinstance(specs[name], MambaSpec)
                 else [Part(total * head, first_head * head, num_heads * head)])
        if (found := sum(part.bytes for part in parts)) != num_heads * head:
            refuse_to_start(f"layer {name} has {found} bytes in a block, but the layers of this model should have "
                            f"{num_heads * head}")
        each.append(kinds.setdefault(tuple(parts), len(kinds)))
    return first_layer, each, [list(kind) for kind in kinds]


def _conv_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the number of inputs of a channel and the number of channels."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    first, second = shape
    return (second, first) if is_conv_state_dim_first() else (first, second)


def _shares(spec: "MambaSpec", whole: Shapes, tp_size: int) -> tuple[list[_Share], _Share | None] | None:
    """Returns how ranks divide the channels of a layer's convolution, and the heads of its state, if it has some. The
    channels are those of x, B and C in Mamba-2, where all ranks have B and C if there is one group of them, and those
    of q, k and v in gated delta nets. Returns None if this version does not know how.
    """
    kind, own = spec.mamba_type.name, spec.shapes
    if spec.tp_replicated or spec.num_speculative_blocks or len(own) != len(whole) or not 1 <= len(own) <= 2:
        return None
    (rows, channels), (whole_rows, whole_channels) = _conv_shape(own[0]), _conv_shape(whole[0])
    if rows != whole_rows:
        return None
    if kind == "SHORT_CONV":
        share = _Share(whole_channels, channels)
        return ([share], None) if len(own) == 1 and _divides(share, tp_size) else None
    if len(own) != 2 or len(own[1]) != 3 or own[1][1:] != whole[1][1:]:
        return None
    heads = _Share(whole[1][0], own[1][0])
    rest = _Share(whole_channels - heads.whole * own[1][1], channels - heads.own * own[1][1])
    if not _divides(heads, tp_size) or rest.whole <= 0 or rest.own <= 0 or rest.whole % 2 or rest.own % 2:
        return None
    values = _Share(heads.whole * own[1][1], heads.own * own[1][1])
    pair = _Share(rest.whole // 2, rest.own // 2)  # B and C, or q and k, are equally long
    size = own[1][2]  # that of a group, or of a head
    if pair.whole % size or pair.own % size:
        return None
    if kind == "GDN_ATTN":
        return ([pair, pair, values], heads) if _divides(pair, tp_size) else None
    if kind == "MAMBA2":
        is_on_all = pair.whole == pair.own == size
        return ([values, pair, pair], heads) if is_on_all or _divides(pair, tp_size) else None
    return None


def _divides(share: _Share, tp_size: int) -> bool:
    return share.own > 0 and share.own * tp_size == share.whole
