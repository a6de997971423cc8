"""Describes one worker's KV tensors by strides for the C++ packer, and finds the worker's part of the model."""

import re
from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvferry.blocks.order import has_own_pages
from kvferry.blocks.pages import page_planes
from kvferry.compat import scheduler_spec
from kvferry.cpu_layout import check_latents, check_shape, cpu_planes, probe_page
from kvferry.errors import refuse_to_start
from kvferry.gpu_layout import LayerPlanes, Plane, gpu_planes

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec


# Matches the names of many draft models' and MTP heads' layers, such as draft_model.layers.0, mtp.layers.0,
# model.mtp_layers.0 and model.layers.61.mtp_block. Layers of other draft models have the numbers after those of the
# model's layers: model.layers.32 beside a model of 32 layers.
_DRAFT = re.compile(r"(^|[._])(draft|mtp|eagle)")


# Parts of the names that configurations have for a number of KV heads, or of query heads for each KV head.
_KV_HEADS = ("kv_heads", "key_value_heads", "n_heads_in_group", "num_attention_groups")


class CacheLayout(NamedTuple):
    """Consecutive layers of one shape."""

    layers: list[tuple[str, int, Plane, Plane]]  # in the model's order: name, KV group, K, V (= K if `planes` is 1)
    planes: int  # number of planes: 2 if K and V are separate, otherwise 1
    num_kv_heads: int
    head_dim: int  # number of elements
    element_bytes: int
    num_blocks: int
    block_tokens: int


def cache_layout(
    kv_caches: dict[str, torch.Tensor],
    kv_cache_config: "KVCacheConfig",
    vllm_config: "VllmConfig",
    *,
    whole_blocks: bool = False,
) -> list[CacheLayout]:
    """Returns the layouts of one worker's KV tensors, which are all on its CPU or all on its GPU, in the order of the
    layers. There is one layout if all layers have one shape. whole_blocks: describe pages as bytes.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    devices = sorted({str(tensor.device) for tensor in kv_caches.values()})
    if len(devices) != 1 or devices[0].split(":")[0] not in ("cpu", "cuda"):
        refuse_to_start(
            f"this worker's KV is on {', '.join(devices) or 'no device'}; "
            "this version supports one CPU or one CUDA GPU per worker"
        )
    group_of = _owning_layers(kv_caches, kv_cache_config)
    specs = _specs_of(group_of, kv_cache_config)
    states = {name: spec for name, spec in specs.items() if isinstance(spec, MambaSpec)}
    specs = {name: spec for name, spec in specs.items() if name not in states}
    blocks = {name: spec.block_size for name, spec in specs.items()}
    if whole_blocks:
        ranks = vllm_config.parallel_config.decode_context_parallel_size
        blocks = {name: scheduler_spec(spec, ranks).block_size for name, spec in specs.items()}
        found = _pages(kv_caches, specs, blocks, vllm_config)
    elif devices == ["cpu"]:
        found = _cpu_layers(kv_caches, specs, vllm_config)
    else:
        found = {name: gpu_planes(name, kv_caches[name], specs[name]) for name in specs}
    shapes = {name: (len(one.planes), one.num_heads, one.head_dim,
                     1 if whole_blocks else kv_caches[name].element_size(),
                     len(kv_caches[name]) // one.split, blocks[name])
              for name, one in found.items()}  # fmt: skip
    unlike = sorted(set(shapes.values()))
    if len(unlike) > 1 and states:
        refuse_to_start("this model's layers differ in (planes, heads, elements per head, bytes per element, blocks, "
                        f"block size): {unlike}; beside layers with state this version supports only layers that are "
                        "equal in all of these")
    for name, state in states.items():
        shapes[name] = unlike[0] if unlike else (
            1, 1, state.page_size_bytes // state.block_size, 1, len(kv_caches[name]), state.block_size)
        found[name] = _state_planes(name, kv_caches[name], state, *shapes[name][:5])
    layers = [(name, group, found[name].planes[0], found[name].planes[-1]) for name, group in group_of.items()]
    return [CacheLayout(list(alike), *shape) for shape, alike in groupby(layers, key=lambda layer: shapes[layer[0]])]


def _cpu_layers(kv_caches: dict[str, torch.Tensor], specs: dict[str, Any], vllm_config: "VllmConfig"
                ) -> dict[str, LayerPlanes]:  # fmt: skip
    latents = _latents_on_cpu(specs, vllm_config)
    kinds = {(spec.block_size, spec.head_size, spec.dtype): spec
             for name, spec in specs.items() if name not in latents}  # fmt: skip
    pages = {kind: probe_page(spec, vllm_config) for kind, spec in kinds.items()}
    return {name: gpu_planes(name, kv_caches[name], spec) if name in latents else
            cpu_planes(name, kv_caches[name], spec, pages[spec.block_size, spec.head_size, spec.dtype])
            for name, spec in specs.items()}  # fmt: skip


def _latents_on_cpu(specs: dict[str, Any], vllm_config: "VllmConfig") -> set[str]:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    latents = {name for name, spec in specs.items() if isinstance(spec, MLAAttentionSpec)}
    if latents:
        check_latents(vllm_config)
    return latents


def _pages(kv_caches: dict[str, torch.Tensor], specs: dict[str, Any], blocks: dict[str, int],
           vllm_config: "VllmConfig") -> dict[str, LayerPlanes]:  # fmt: skip
    """Describes the layers' pages as bytes. blocks: tokens in a block of each layer, on all ranks together."""
    on_cpu = vllm_config.device_config.device_type == "cpu"
    latents = _latents_on_cpu(specs, vllm_config) if on_cpu else set()
    found = {}
    for name, spec in specs.items():
        if on_cpu and name not in latents:
            check_shape(name, kv_caches[name], spec)
        heads = 1 if has_own_pages(vllm_config) or name in latents else spec.num_kv_heads
        found[name] = page_planes(name, kv_caches[name], spec.block_size, blocks[name], heads)
    return found


def layer_specs(kv_caches: dict[str, torch.Tensor], kv_cache_config: "KVCacheConfig") -> dict[str, Any]:
    """Returns the spec of each layer that has KV or states of its own."""
    return _specs_of(_owning_layers(kv_caches, kv_cache_config), kv_cache_config)


def _specs_of(group_of: dict[str, int], kv_cache_config: "KVCacheConfig") -> dict[str, Any]:
    found = {name: kv_cache_config.kv_cache_groups[group].kv_cache_spec for name, group in group_of.items()}
    return {name: getattr(spec, "kv_cache_specs", {name: spec})[name] for name, spec in found.items()}


def _state_planes(
    name: str, tensor: torch.Tensor, spec: "MambaSpec", planes: int, heads: int, dim: int, size: int, num_blocks: int
) -> LayerPlanes:
    """Describes a layer's states as if each block were KV of `planes` planes and `heads` heads with `dim` elements.

    A chunk contains each block as a whole or not at all, so it does not matter which bytes of a block belong to which
    token.
    """
    row = dim * size
    plane = spec.block_size * row
    if tensor.element_size() != 1 or not tensor[0].is_contiguous() or len(tensor) != num_blocks:
        refuse_to_start(
            f"the states of layer {name} are in a tensor of shape {tuple(tensor.shape)} and type {tensor.dtype}; "
            f"this version supports {num_blocks} blocks of one-byte elements, each block contiguous"
        )
    if heads * planes * plane != spec.page_size_bytes:
        refuse_to_start(f"the states of layer {name} have {spec.page_size_bytes} bytes per block, but KV of a layer "
                        f"has {heads * planes * plane}; this version supports blocks of one size")
    strides = (tensor.stride(0), planes * plane, row, size)
    return LayerPlanes([(tensor.data_ptr() + index * plane, *strides) for index in range(planes)], heads, dim)


def _owning_layers(kv_caches: dict[str, torch.Tensor], kv_cache_config: "KVCacheConfig") -> dict[str, int]:
    """Returns the KV group of each layer that has KV of its own, in the model's order.

    A layer that reads an earlier layer's KV has the same tensor as that layer, and is in the same group or in none.
    """
    groups = enumerate(kv_cache_config.kv_cache_groups)
    group_of = {name: index for index, group in groups for name in group.layer_names}
    owners: dict[tuple[int, int], str] = {}  # keyed by group and address; groups share memory, but not blocks
    for name in sorted(kv_caches, key=_layer_numbers):
        if name in group_of:
            owners.setdefault((group_of[name], kv_caches[name].data_ptr()), name)
    owned = {address for _, address in owners}
    unknown = [name for name in kv_caches if name not in group_of and kv_caches[name].data_ptr() not in owned]
    if unknown:
        refuse_to_start(f"vLLM has KV of the layers {', '.join(unknown)}, but no KV cache group with them; "
                        "this version supports layers in groups, and layers that read another layer's KV")
    return {name: group for (group, _), name in owners.items()}


def _layer_numbers(name: str) -> tuple[int, ...]:
    """Returns the numbers in a layer's name: (3,) for model.layers.3.self_attn."""
    return tuple(int(part) for part in name.split(".") if part.isdecimal())


def shard_of(
    layouts: list[CacheLayout], vllm_config: "VllmConfig", pp_rank: int, tp_rank: int, *, has_own_pages: bool = False
) -> tuple[int, int, int, int]:
    """Returns the worker's part of the model's KV: first layer, number of layers, first KV head, number of KV heads.

    has_own_pages: the rank has blocks of which other ranks have no part that this version knows (blocks/order.py).
    Each rank then counts as one head, so that it reads only from the rank with its number. With context parallelism
    tp_rank counts the ranks of a pipeline stage.
    """
    from vllm.distributed.utils import get_pp_indices

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    stages, tp_size = parallel.pipeline_parallel_size, parallel.tensor_parallel_size
    first = 0
    heads, num_layers = layouts[0].num_kv_heads, sum(len(layout.layers) for layout in layouts)
    if len(layouts) > 1:
        _check_unlike(layouts, tp_size, stages)
        # What a rank has of a layer counts as one head: vLLM does not tell how many heads a layer has on all ranks
        # together. So a rank reads only from the rank with its number (see unlike_format() in served.py).
        return first, num_layers, tp_rank, 1
    if stages > 1:
        first, end = get_pp_indices(model.get_total_num_hidden_layers(), pp_rank, stages)
        found = [number for name, *_ in layouts[0].layers for number in _layer_numbers(name)]
        if found != list(range(first, end)):
            refuse_to_start(
                f"pipeline stage {pp_rank} has layers {first} to {end - 1}, but has KV only of layers {found}; "
                "with pipeline parallelism this version supports only models whose layers all have their own KV"
            )
    if has_own_pages:
        return first, num_layers, tp_rank, 1
    if tp_size == 1:
        return first, num_layers, 0, heads
    if names_unlike_heads(model):
        return first, num_layers, tp_rank * heads, heads  # a rank reads only from ranks with its number, as above
    if model.is_attention_free:
        return first, num_layers, tp_rank, heads
    total = 1 if model.use_mla else model.get_total_num_kv_heads()
    if heads != max(1, total // tp_size):
        refuse_to_start(f"this worker has {heads} KV heads, which is not its share of the model's {total} KV heads at "
                        f"tensor parallel size {tp_size}; expected: {max(1, total // tp_size)}")
    # If there are more ranks than heads, neighbouring ranks have the same head.
    return first, num_layers, tp_rank * total // tp_size, heads


def names_unlike_heads(model: "ModelConfig") -> bool:
    """Returns True if the model's configuration has several numbers of KV heads, so that layers may differ in it.

    The ranks' shares of such layers may all have one shape: one head of eight, and one of two copies of a head of four.
    The number of heads that vLLM tells is then right for some of the layers only.
    """
    found: set[int] = set()

    def look(value: Any, counts: bool) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                look(inner, any(part in str(name) for part in _KV_HEADS))
        elif isinstance(value, (list, tuple)):
            for inner in value:
                look(inner, counts)
        elif counts and isinstance(value, int) and not isinstance(value, bool):
            found.add(value)

    look(model.hf_text_config.to_dict(), counts=False)
    return len(found) > 1


def _check_unlike(layouts: list[CacheLayout], tp_size: int, stages: int) -> None:
    """Refuses what this version can't serve of models whose layers have KV of unlike shapes."""
    what = "this model's layers have KV of different shapes"
    if stages > 1:
        refuse_to_start(f"{what}, which this version serves only without pipeline parallelism; set "
                        f"--pipeline-parallel-size ({stages}) to 1")
    shapes: dict[int, set[tuple[int, ...]]] = {}  # [KV group]
    for layout in layouts:
        for _, group, *_ in layout.layers:
            shapes.setdefault(group, set()).add(layout[1:])
    if tp_size > 1 and any(len(found) > 1 for found in shapes.values()):
        refuse_to_start(f"{what} in one KV cache group, of which vLLM's scheduler does not know; this version serves "
                        f"that only without tensor parallelism; set --tensor-parallel-size ({tp_size}) to 1, or leave "
                        "a draft model's KV out with save_draft_kv false")


def has_draft_kv(vllm_config: "VllmConfig") -> bool:
    """Returns True if vLLM runs a draft model that has KV of its own (speculative decoding)."""
    speculative = vllm_config.speculative_config
    return speculative is not None and bool(speculative.uses_draft_kv_cache())


def draft_layers(names: Iterable[str], vllm_config: "VllmConfig") -> set[str]:
    """Returns the names of the draft model's layers. Errors: KvFerryError if there is a draft model, but none of
    `names` can be recognized as that of a draft layer.
    """
    if not has_draft_kv(vllm_config):
        return set()
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    every = list(names)
    found = {name for name in every if _DRAFT.search(name)
             or any(int(part) >= num_layers for part in re.findall(r"layers\.(\d+)", name))}  # fmt: skip
    if not found:
        refuse_to_start(f"with save_draft_kv false, the layers of the draft model must have names of their own; this "
                        f"version does not find them among {', '.join(every)}; leave save_draft_kv out")
    return found


def count_chunk_layers(kv_cache_config: "KVCacheConfig", vllm_config: "VllmConfig", saves_draft_kv: bool) -> int:
    """Returns the number of layers whose KV is in a chunk, in all pipeline stages together."""
    if vllm_config.parallel_config.pipeline_parallel_size > 1:  # kv_cache_config has the layers of one stage only
        return int(vllm_config.model_config.get_total_num_hidden_layers())
    names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    return len(names) if saves_draft_kv else len(names) - len(draft_layers(names, vllm_config))
