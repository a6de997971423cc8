"""Decides whether chunks consist of whole blocks, and names the order that a block's elements have.

They do where this version can't describe the places of a token's elements: if the attention kernel interleaves tokens,
if context parallelism puts the tokens of a block on several ranks in turns, or if the setting whole_blocks says so. The
pages are then copied as bytes (pages.py), so nodes can share chunks only if their blocks have the same order. The
fingerprint therefore has the order's name.
"""

import hashlib
from typing import TYPE_CHECKING, Any

import vllm

from kvferry.compat import scheduler_spec
from kvferry.cpu_layout import strides_of, written_offsets
from kvferry.errors import refuse_to_start

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def has_context_ranks(vllm_config: "VllmConfig") -> bool:
    """Returns True if the tokens of a block are on several ranks."""
    return int(vllm_config.parallel_config.decode_context_parallel_size) > 1


def scheduler_specs(specs: "list[Any]", vllm_config: "VllmConfig") -> "list[Any]":
    """Returns the groups' specs with the block sizes that vLLM's scheduler has: all tokens of a block on all ranks."""
    return [scheduler_spec(spec, vllm_config.parallel_config.decode_context_parallel_size) for spec in specs]


def block_order(
    kv_cache_config: "KVCacheConfig", vllm_config: "VllmConfig", is_wanted: bool, chunk_dtype: str = ""
) -> str:
    """Returns the fields of the fingerprint that name the order of a block's elements, if chunks consist of whole
    blocks; otherwise an empty text. Scheduler and workers get the same text. is_wanted: the setting whole_blocks.
    chunk_dtype: the result of other_chunk_dtype(). Errors: KvFerryError if such chunks would have to be converted.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    # The scheduler's process gets from vLLM only the first spec of a group whose layers differ.
    specs = [_first(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    on_cpu = vllm_config.device_config.device_type == "cpu"
    measured, interleaves = _measure(specs, vllm_config) if on_cpu else ("", False)
    in_turns = has_context_ranks(vllm_config)
    # A GPU's layers beside layers with state are described by strides; their chunks are whole blocks anyway.
    is_wanted &= on_cpu or not any(isinstance(spec, MambaSpec) for spec in specs)
    if not (is_wanted or interleaves or in_turns):
        return ""
    if chunk_dtype:
        refuse_to_start(f"chunk_dtype is '{chunk_dtype}', but this server's chunks are whole blocks, copied as bytes, "
                        "which this version can't convert; leave chunk_dtype out")
    order = measured if on_cpu else _device_order(kv_cache_config, vllm_config)
    blocks = "+".join(map(str, sorted({spec.block_size for spec in specs})))
    parallel = vllm_config.parallel_config
    context = (f"context=decode:{parallel.decode_context_parallel_size},"
               f"prefill:{parallel.prefill_context_parallel_size},interleave:{parallel.cp_kv_cache_interleave_size},"
               f"tensor_parallel:{parallel.tensor_parallel_size} ") if in_turns else ""  # fmt: skip
    return f"order={order},blocks:{blocks} {context}"


def has_own_pages(vllm_config: "VllmConfig") -> bool:
    """Returns True if a page of whole blocks has no part that ranks of another tensor parallel size could read. Kernels
    for CPUs keep each KV head's tokens together. Of those for GPUs this isn't known.
    """
    return has_context_ranks(vllm_config) or vllm_config.device_config.device_type != "cpu"


def check_context_parallelism(vllm_config: "VllmConfig", has_state: bool) -> None:
    """Refuses what this version can't serve of context parallelism."""
    parallel = vllm_config.parallel_config
    decode, prefill = parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
    if prefill > 1 and decode == 1:
        refuse_to_start(f"--prefill-context-parallel-size is {prefill} and --decode-context-parallel-size 1; all of "
                        f"these {prefill} ranks then have the same KV, and vLLM tells its scheduler of one of them "
                        "only; this version serves prefill context parallelism only together with decode context "
                        "parallelism")
    if decode > 1 and has_state:
        refuse_to_start(f"--decode-context-parallel-size is {decode}, and this model has layers with state, which this "
                        "version doesn't serve together with context parallelism; set it to 1")


def _first(spec: "Any") -> "Any":
    return next(iter(getattr(spec, "kv_cache_specs", {"": spec}).values()))


def _measure(specs: "list[Any]", vllm_config: "VllmConfig") -> tuple[str, bool]:
    """Returns the name of the order in which vLLM's kernels for CPUs write blocks, and True if strides can't express
    it. The name has a digest of each element's place, as the kernels themselves show it.
    """
    from vllm.v1.kv_cache_interface import AttentionSpec, MLAAttentionSpec

    found: set[tuple[str, str]] = set()
    interleaves = False
    for spec in specs:
        # A token's latent is one row (check_latents() in cpu_layout.py), and a state is no KV of tokens.
        if isinstance(spec, AttentionSpec) and not isinstance(spec, MLAAttentionSpec):
            isa, planes = written_offsets(spec, vllm_config)
            shape = f"{spec.block_size},{spec.head_size},{spec.dtype}"
            found.add((isa, f"{shape}:{[plane.flatten().tolist() for plane in planes]}"))
            interleaves |= None in map(strides_of, planes)
    if not found:
        return "rows", False
    digest = hashlib.sha256(repr(sorted(found)).encode()).hexdigest()[:8]
    return f"{'+'.join(sorted({isa for isa, _ in found}))}:{digest}", interleaves


def _device_order(kv_cache_config: "KVCacheConfig", vllm_config: "VllmConfig") -> str:
    """Returns a name for the order in which a GPU's kernels write blocks, made of all that vLLM chooses it by."""
    from vllm.platforms import current_platform

    backend = vllm_config.attention_config.backend
    chosen = [vllm.__version__, str(current_platform.get_device_capability()), getattr(backend, "name", str(backend)),
              str(getattr(kv_cache_config, "kv_cache_layout", None))]  # fmt: skip
    digest = hashlib.sha256(";".join(chosen).encode()).hexdigest()[:8]
    parallel = vllm_config.parallel_config.tensor_parallel_size
    return f"{vllm_config.device_config.device_type}:{digest},tensor_parallel:{parallel}"
