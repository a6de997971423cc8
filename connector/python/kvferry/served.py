"""Checks that kvferry can serve the model; if not, vLLM does not start, and one sentence says why."""

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

from kvferry.blocks.order import check_context_parallelism
from kvferry.errors import refuse_to_start
from kvferry.layout import draft_layers, names_unlike_heads
from kvferry.states.parts import Shapes, whole_shapes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MambaSpec

SERVED = ("this version serves full attention, sliding windows, chunked local attention, latent attention (MLA) and "
          "state of Mamba-2, of gated delta nets and of short convolutions")
# vLLM's kinds of state for which answers with loaded states were compared with those of vLLM alone.
_STATES = ("GDN_ATTN", "MAMBA2", "SHORT_CONV")

_WORDS = {
    "CircularBufferSpec": "layers with ring buffers of keys",
    "CrossAttentionSpec": "layers with cross-attention to an encoder",
    "EncoderOnlyAttentionSpec": "layers with attention of an encoder",
    "HiSparseHotSpec": "layers with sparse attention and a hot cache",
    "HiSparseResidentSpec": "layers with sparse attention and a hot cache",
    "HiddenStateCacheSpec": "layers with cached hidden states",
    "RSWASpec": "layers with reference sliding windows",
    "SinkFullAttentionSpec": "layers with attention sink tokens",
    "SlidingWindowMLASpec": "layers that combine latent attention with a sliding window",
}


def served_specs(kv_cache_config: "KVCacheConfig", vllm_config: "VllmConfig") -> "list[Any]":
    """Returns the spec of each KV cache group. Errors: KvFerryError, which says what this version can't serve."""
    from vllm.v1.kv_cache_interface import MambaSpec

    if vllm_config.model_config.runner_type == "pooling":
        refuse_to_start("this model is served for pooling (embeddings, scores, classes), which this version doesn't "
                        "support; start vLLM without --kv-transfer-config")
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    check_context_parallelism(vllm_config, has_state=keeps_state([one for spec in specs for one in layer_specs(spec)]))
    if not specs:
        refuse_to_start(f"this model keeps no KV; {SERVED}")
    if any(len(layer_specs(group)) > 1 and keeps_state(layer_specs(group)) for group in specs):
        refuse_to_start("this model has layers with states of different sizes in one KV cache group; this version "
                        "serves only models in which all states of a group have the same size")
    unserved = [found for found in (_unserved(spec) for group in specs for spec in layer_specs(group)) if found]
    if unserved:
        refuse_to_start(f"this model has {' and '.join(sorted(set(unserved)))}; {SERVED}")
    states = [spec for spec in specs if isinstance(spec, MambaSpec)]
    if states:
        _check_states(states, specs, vllm_config)
    return specs


def layer_specs(spec: "Any") -> "list[Any]":
    """Returns the specs of a KV cache group's layers: several if its layers have KV of different sizes. The scheduler's
    process gets only one of them from vLLM.
    """
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def kv_groups(specs: "list[Any]") -> list[tuple[int, int, bool]]:
    """Returns the fields of KvGroup (core_config.h) for each group. The window of layers with state is one block."""
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec

    return [(spec.block_size,
             spec.sliding_window if isinstance(spec, SlidingWindowSpec)
             else spec.attention_chunk_size if isinstance(spec, ChunkedLocalAttentionSpec)
             else spec.block_size if isinstance(spec, MambaSpec) else 0,
             isinstance(spec, ChunkedLocalAttentionSpec)) for spec in specs]  # fmt: skip


def window_format(kv_cache_config: "KVCacheConfig", specs: "list[Any]") -> str:
    """Returns a name for the groups with windows, if these differ in size or kind of window or in block size; otherwise
    an empty text.

    Messages between nodes name groups by their numbers, to say from which token on a chunk has KV of a group. So a
    number must mean the same layers on both nodes.
    """
    found = kv_groups(specs)
    if len({group for group in found if group[1]}) < 2:
        return ""
    layers = [[window, restarts, group.layer_names] for (_, window, restarts), group
              in zip(found, kv_cache_config.kv_cache_groups, strict=True)]  # fmt: skip
    return f"windows={hashlib.sha256(json.dumps(layers).encode()).hexdigest()[:8]} "


def keeps_state(specs: "list[Any]") -> bool:
    """Returns True if layers of the model have a state instead of KV of each token."""
    from vllm.v1.kv_cache_interface import MambaSpec

    return any(isinstance(spec, MambaSpec) for spec in specs)


def settings_json(vllm_config: "VllmConfig", specs: "list[Any]") -> str:
    """Returns kv_connector_extra_config. If the model has state, chunk_tokens is replaced by the block size."""
    extra = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
    if keeps_state(specs):
        extra["chunk_tokens"] = specs[0].block_size
    return json.dumps(extra)


def divided_shapes(specs: "list[Any]", vllm_config: "VllmConfig") -> Shapes | None:
    """Returns the shapes of a layer's states on all ranks together, if this version knows how ranks divide the model's
    states and KV, so that nodes of unlike tensor parallel sizes can share them; otherwise None.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    states = [spec for spec in specs if isinstance(spec, MambaSpec)]
    if not states or names_unlike_heads(vllm_config.model_config):
        return None
    return whole_shapes(states, vllm_config)


def state_format(specs: "list[Any]", vllm_config: "VllmConfig", whole: Shapes | None) -> str:
    """Returns a name for the format of states, which must be equal on all nodes that share states. Returns an empty
    text if the model has no state. whole: the result of divided_shapes().
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    found = [f"{spec.mamba_type.name}:{whole or spec.shapes}:{spec.dtypes}" for spec in specs
             if isinstance(spec, MambaSpec)]  # fmt: skip
    if not found:
        return ""
    # Kernels for CPUs may order the elements of a state in another way than those for GPUs (gated delta nets do).
    found.append(vllm_config.device_config.device_type)
    digest = hashlib.sha256(";".join(found).encode()).hexdigest()[:8]
    if whole is not None:
        return f"state={digest} "
    # It isn't known how ranks divide the state, so nodes need the same tensor parallel size.
    return f"state={digest},tensor_parallel:{vllm_config.parallel_config.tensor_parallel_size} "


def has_state_parts(fingerprint: str) -> bool:
    """Returns True if nodes of unlike tensor parallel sizes may have this fingerprint of a model with states."""
    return re.search(r"\bstate=[0-9a-f]+ ", fingerprint) is not None


def unlike_format(
    kv_cache_config: "KVCacheConfig", specs: "list[Any]", vllm_config: "VllmConfig", *, saves_draft_kv: bool
) -> str:
    """Returns the tensor parallel size if layers whose KV is saved differ in shape, or may differ in their number of
    heads; otherwise an empty text. vLLM does not tell how many heads of such a layer all ranks together have, which the
    shard map would need between nodes of unlike sizes.
    """
    from vllm.v1.kv_cache_interface import AttentionSpec

    groups = kv_cache_config.kv_cache_groups
    drafts = set() if saves_draft_kv else draft_layers([name for one in groups for name in one.layer_names],
                                                       vllm_config)  # fmt: skip
    shapes = {(spec.block_size, spec.num_kv_heads, spec.head_size, spec.head_size_v, spec.dtype)
              for group, spec in zip(groups, specs, strict=True)
              if isinstance(spec, AttentionSpec) and not drafts.issuperset(group.layer_names)}  # fmt: skip
    if len(shapes) <= 1 and not names_unlike_heads(vllm_config.model_config):
        return ""
    return f"unlike_layers=tensor_parallel:{vllm_config.parallel_config.tensor_parallel_size} "


def chunk_format(
    kv_cache_config: "KVCacheConfig", specs: "list[Any]", vllm_config: "VllmConfig", *, saves_draft_kv: bool
) -> str:
    """Returns the fields of the fingerprint that most models don't have."""
    whole = divided_shapes(specs, vllm_config)
    return (state_format(specs, vllm_config, whole) + window_format(kv_cache_config, specs)
            + unlike_format(kv_cache_config, specs, vllm_config, saves_draft_kv=saves_draft_kv))


def checkpoint_alignment(specs: "list[Any]") -> int:
    """Returns CoreConfig::checkpoint_alignment: vLLM copies states inside a step only at multiples of this number of
    tokens after the step's start. 0: vLLM makes no such copies.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    return next((spec.prefill_checkpoint_alignment or 0 for spec in specs
                 if isinstance(spec, MambaSpec) and spec.num_prefill_checkpoint_blocks), 0)  # fmt: skip


def _check_states(states: "list[MambaSpec]", specs: "list[Any]", vllm_config: "VllmConfig") -> None:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    what = "this model has layers with state"
    attention = [spec for spec in specs if spec not in states]
    kinds = sorted({spec.mamba_type.name for spec in states})
    if len(kinds) > 1 or kinds[0] not in _STATES:
        refuse_to_start(f"{what} of vLLM's kind {' and '.join(kinds)}; this version supports models with state of one "
                        f"kind, {', '.join(_STATES[:-1])} or {_STATES[-1]}; no others were compared with vLLM alone, "
                        "whose CPU build can't run them")
    if kinds != ["MAMBA2"] and any(spec.num_prefill_checkpoint_blocks for spec in states):
        refuse_to_start(f"{what} of vLLM's kind {kinds[0]}, copied inside steps as in Kimi's delta attention; this "
                        "version supports such copies of MAMBA2 only; vLLM's CPU build can't run the others")
    if any(spec.mamba_cache_mode != "align" for spec in states):
        refuse_to_start(f"{what}; vLLM keeps copies of the state only with prefix caching; "
                        "start vLLM with --enable-prefix-caching")
    if any(spec.num_speculative_blocks for spec in states):
        refuse_to_start(f"{what}, which this version doesn't serve together with speculative decoding")
    unit = vllm_config.cache_config.prefix_match_unit
    if unit not in (None, states[0].block_size):
        refuse_to_start(f"{what}; because of --prefix-match-unit {unit}, vLLM keeps copies of the state inside blocks; "
                        f"this version supports copies only at the ends of blocks, with --prefix-match-unit "
                        f"{states[0].block_size} or without the option")
    if len({spec.num_prefill_checkpoint_blocks and spec.prefill_checkpoint_alignment for spec in states}) > 1:
        refuse_to_start(f"{what}; vLLM keeps copies of their states at different places; "
                        "this version supports states of one kind")
    if any(window for _, window, _ in kv_groups(attention)):
        refuse_to_start(f"{what} and layers with sliding windows; "
                        "this version supports models with either of the two, not with both")
    if any(isinstance(spec, MLAAttentionSpec) for spec in specs):
        refuse_to_start(f"{what} and latent attention (MLA), a pair that vLLM's CPU build can't run and that was "
                        "never compared with vLLM alone; this version supports state beside full attention")
    pages = sorted({(spec.block_size, spec.page_size_bytes) for spec in specs})
    if len(pages) > 1 or pages[0][1] % pages[0][0]:
        refuse_to_start(f"{what}; its KV cache groups have (block size, bytes of a block) {pages}; this version "
                        "supports groups of one size, whose bytes are a multiple of the block size")
    shapes = sorted({(spec.num_kv_heads, spec.head_size, str(spec.dtype)) for spec in attention})
    if len(shapes) > 1:
        refuse_to_start(f"{what}; its KV cache groups differ in (KV heads, head size, element type): {shapes}; beside "
                        "layers with state this version supports groups of one shape")


def _unserved(spec: "KVCacheSpec") -> str:
    """Returns what messages call layers of this spec if they can't be served, otherwise an empty text. A subclass of a
    served spec can't be served.
    """
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    if type(spec) is MambaSpec:
        return ""
    if type(spec) not in (ChunkedLocalAttentionSpec, FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec):
        name = type(spec).__name__
        return f"{_WORDS.get(name, 'layers with KV of an unknown kind')} ({name})"
    if getattr(spec, "non_causal", False):
        return "layers with attention that isn't causal, where the KV of a token depends on later tokens"
    if spec.tokens_per_state != 1:
        return f"layers whose KV is kept for {spec.tokens_per_state} tokens at a time"
    return ""
