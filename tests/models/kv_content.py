"""Reads the KV that an engine has of its requests, to compare what two engines have of one prompt."""

import json
from pathlib import Path
from typing import Any

from kvferry.layout import CacheLayout, cache_layout

Kept = dict[str, list[Any]]  # [prompt as JSON][layer] tensor [K or V, token, head, element]


def keep_kv(core: Any) -> Kept:
    """Returns what gets the KV of each request when it ends: of all tokens of its prompt but the last, in float32, and
    not-a-number where vLLM has given the block up already. `core`: vLLM's engine core, of one rank in this process.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker: Any = get_kv_transfer_group()
    worker, scheduler, kept = worker._worker, core.scheduler, Kept()
    layouts = cache_layout(worker._kv_caches, worker._kv_cache_config, worker._vllm_config)
    free = scheduler._free_request

    def ended(request: Any, *arguments: Any, **named: Any) -> Any:
        tables = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        kept[json.dumps(request.prompt_token_ids)] = [
            _read(layout, layer, worker._kv_caches, tables, request.num_prompt_tokens - 1, fp8_type(core))
            for layout in layouts for layer in layout.layers]
        return free(request, *arguments, **named)

    scheduler._free_request = ended
    return kept


def fp8_type(core: Any) -> Any:
    """Returns torch's type of the engine's quantized KV, which vLLM keeps in tensors of bytes; None if it has none."""
    import torch

    types = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    return types.get(core.vllm_config.cache_config.cache_dtype)


def _read(layout: CacheLayout, layer: Any, caches: dict[str, Any], tables: Any, num_tokens: int, fp8: Any) -> Any:
    import torch

    name, group, *planes = layer
    tensor, tokens = caches[name], torch.arange(num_tokens)
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    blocks = torch.tensor(tables[group])[tokens // layout.block_tokens]
    found = []
    for base, *strides in planes[:layout.planes]:
        view = whole.as_strided((layout.num_blocks, layout.num_kv_heads, layout.block_tokens, layout.head_dim),
                                [stride // layout.element_bytes for stride in strides],
                                (base - whole.data_ptr()) // layout.element_bytes)
        values = view[blocks, :, tokens % layout.block_tokens]
        values = (values.view(fp8) if fp8 is not None and values.dtype == torch.uint8 else values).float()
        values[blocks == 0] = torch.nan
        found.append(values)
    return torch.stack(found)


def write(kept: Kept, path: Path) -> None:
    import torch

    torch.save(kept, path)


def complaint_about(kept: Kept, path: Path, fp8: Any = None) -> str:
    """Returns how the KV that was written to `path`, rounded to `fp8` if that is a type, differs from `kept`, or an
    empty text. At least a quarter of each layer's must be in both: vLLM gives up what lies before a window.
    """
    import torch

    written: Kept = torch.load(path)
    if sorted(kept) != sorted(written):
        return f"KV of {len(kept)} prompts instead of {len(written)}"
    for prompt, layers in kept.items():
        for number, (own, other) in enumerate(zip(layers, written[prompt], strict=True)):
            if fp8 is not None:
                other = other.to(fp8).float()
            both = ~(own.isnan() | other.isnan())
            if 4 * int(both.sum()) < own.numel():
                return f"only {int(both.sum())} of {own.numel()} elements of layer {number} are in both engines"
            if wrong := int((own != other)[both].sum()):
                return f"{wrong} of {int(both.sum())} elements of layer {number} are not those of the other engine"
    return ""
