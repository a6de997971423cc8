"""The setting chunk_dtype: whether this node reads chunks of servers with another data type, and what it can't convert.

A node that reads such chunks has the fingerprint of the servers that computed them. It saves nothing, because the KV
that it computes differs from that of those servers.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from kvferry.errors import refuse_to_start
from kvferry.identity import dtype_name, kv_dtype
from kvferry.served import keeps_state, layer_specs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvferry.layout import CacheLayout

# [a type's name in fingerprints] the name of the same type in _core.
_ELEMENTS = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "fp8": "fp8_e4m3",
             "fp8_e5m2": "fp8_e5m2"}  # fmt: skip


def other_chunk_dtype(vllm_config: "VllmConfig", setting: str) -> str:
    """Returns `setting`, the data type of the chunks that this node reads; an empty text if this server's model and KV
    both have this type.
    """
    own = {dtype_name(vllm_config.model_config.dtype), kv_dtype(vllm_config)}
    return "" if own == {setting} else setting


def conversion(vllm_config: "VllmConfig", specs: "list[Any]", chunk_dtype: str, *, saves_draft_kv: bool) -> str:
    """Returns a text for the status: from which type to which loads convert or, if only the model's type differs from
    that of the chunks, both of these types. Returns an empty text if `chunk_dtype` is empty. Errors: KvFerryError if
    this version can't convert the chunks, or if kv_role is not kv_consumer.
    """
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    if not chunk_dtype:
        return ""
    to, what = kv_dtype(vllm_config), f"chunk_dtype is '{chunk_dtype}'"
    model_dtype = dtype_name(vllm_config.model_config.dtype)
    speculative = vllm_config.speculative_config
    if to not in _ELEMENTS:
        refuse_to_start(f"{what}, but this version can't convert chunks to KV of type {to}; it can convert to "
                        f"{', '.join(_ELEMENTS)}")
    if (role := vllm_config.kv_transfer_config.kv_role) != "kv_consumer":
        refuse_to_start(f"{what}, but this server's KV is of type {to} and its model of {model_dtype}, so it saves "
                        f"nothing that others could read; its kv_role is {role} and must be kv_consumer")
    _refuse_state(specs, chunk_dtype)
    if any(isinstance(one, MLAAttentionSpec) for spec in specs for one in layer_specs(spec)):
        refuse_to_start(f"{what}, but this model has latent attention (MLA), whose KV this version can't convert; "
                        "leave chunk_dtype out")
    if saves_draft_kv and speculative is not None and speculative.uses_draft_kv_cache():
        refuse_to_start(f"{what}, but this server runs a draft model, whose KV this version can't convert; set "
                        "save_draft_kv to false")
    own = f"{chunk_dtype} of a model with another --dtype than {model_dtype}"
    return f"{chunk_dtype} to {to}" if to != chunk_dtype else own


def tell_conversion(chunk_dtype: str, converts: str) -> None:
    """Logs what conversion() returned, if it is not empty."""
    if converts:
        # vLLM applies its log format only to loggers named vllm.*
        init_logger("vllm.kvferry").warning(
            "kvferry: this server reads chunks that servers with --dtype %s computed (%s): its answers may differ from "
            "those of a server without kvferry, since that KV was rounded differently, and it saves no KV for others",
            chunk_dtype, converts,
        )  # fmt: skip


def element_types(layouts: "list[CacheLayout]", kv_cache_config: "KVCacheConfig", vllm_config: "VllmConfig",
                  chunk_dtype: str) -> list[tuple[str, str]]:
    """Returns for each layout the type of its elements in blocks and in chunks; an empty list if `chunk_dtype` is
    empty. Errors: KvFerryError if a layer has state, if a layer's fp8 KV has a scale other than 1.0, or if a layout's
    layers have different types.
    """
    if not chunk_dtype:
        return []
    # vLLM registers the KV tensors before it makes the scheduler, which calls conversion().
    _refuse_state([group.kv_cache_spec for group in kv_cache_config.kv_cache_groups], chunk_dtype)
    found = []
    for layout in layouts:
        types = {_element_type(name, group, kv_cache_config, vllm_config) for name, group, *_ in layout.layers}
        if len(types) > 1:
            refuse_to_start(f"chunk_dtype is '{chunk_dtype}', but this model's layers have KV of types "
                            f"{' and '.join(sorted(types))}, which this version can't tell apart; leave "
                            "--kv-cache-dtype-skip-layers out")
        found.append((types.pop(), chunk_dtype))
    return found


def _refuse_state(specs: "list[Any]", chunk_dtype: str) -> None:
    if keeps_state(specs):
        refuse_to_start(f"chunk_dtype is '{chunk_dtype}', but this model has layers with state, which this version "
                        "can't convert; leave chunk_dtype out")


def _element_type(name: str, group: int, kv_cache_config: "KVCacheConfig", vllm_config: "VllmConfig") -> str:
    spec: Any = kv_cache_config.kv_cache_groups[group].kv_cache_spec
    dtype = getattr(spec, "kv_cache_specs", {name: spec})[name].dtype
    if dtype not in (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2):
        return _ELEMENTS[dtype_name(dtype)]
    layer = vllm_config.compilation_config.static_forward_context.get(name)
    scales = [getattr(layer, scale, None) for scale in ("_k_scale_float", "_v_scale_float")]
    if scales != [1.0, 1.0]:
        refuse_to_start(f"layer {name} stores K and V as fp8 with the scales {scales[0]} and {scales[1]}, and this "
                        "version converts chunks only to fp8 with scales of 1.0; leave chunk_dtype out, or use a "
                        "checkpoint without scales of KV")
    return _ELEMENTS[kv_dtype(vllm_config)]
