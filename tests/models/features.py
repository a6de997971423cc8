"""The features of the table: the arguments of vLLM's engine that each needs, and what is asked of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import asks

if TYPE_CHECKING:
    from engine import Engine

Phases = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Feature:
    """One column of the table.

    ask: sends requests to an engine, with kvferry or without, and returns the answers. flags: vLLM's arguments; the
    features that change the same arguments of a family share engines. changes_tokens: True if the arguments may change
    the tokens of an engine without kvferry, which therefore gets them too. decode_flags: of the second engine, if there
    is one, which gets the KV of the first one. phases: what an engine with kvferry does. of_images: True if only
    models with images are asked.
    """

    ask: "Callable[[Engine, Any], list[asks.Spoken]]" = asks.greedy
    flags: dict[str, Any] = field(default_factory=dict)
    changes_tokens: bool = False
    decode_flags: dict[str, Any] | None = None
    is_pushed: bool = False
    of_images: bool = False
    phases: "Callable[[Engine, Feature], Phases]" = asks.computed_and_loaded


NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1,
                                "prompt_lookup_max": 3}}
FEW_BLOCKS = {"num_gpu_blocks_override": "few", "max_model_len": 288}
# vLLM then numbers the images of a process instead of hashing them
NO_IMAGE_HASHES = {"mm_processor_cache_gb": 0, "enable_prefix_caching": False}
SMALL_STEPS = {"max_num_batched_tokens": 48, "max_num_seqs": 16}
HANDED_OVER: dict[str, Any] = {"phases": asks.also_handed_over}

FEATURES: dict[str, Feature] = {
    "float32": Feature(flags={"dtype": "float32"}, changes_tokens=True, **HANDED_OVER),
    "sampling": Feature(asks.sampled),
    "n=3": Feature(asks.several),
    "logprobs": Feature(asks.with_logprobs),
    "prompt-logprobs": Feature(asks.with_prompt_logprobs),
    "structured-output": Feature(asks.structured),
    "beam-search": Feature(asks.beams),
    "long-prompts": Feature(asks.long),
    "cache-salt": Feature(asks.salted, phases=asks.salted_apart),
    "aborts": Feature(asks.some_aborted),
    "sleep-and-reset": Feature(asks.after_sleep, phases=asks.slept_and_reset),
    "preemption": Feature(asks.crowd, FEW_BLOCKS, phases=asks.preempted),
    "all-at-once": Feature(asks.crowd, FEW_BLOCKS | SMALL_STEPS | NGRAM, phases=asks.preempted),
    "bfloat16": Feature(flags={"dtype": "bfloat16"}, changes_tokens=True, **HANDED_OVER),
    "float16": Feature(flags={"dtype": "float16"}, changes_tokens=True, **HANDED_OVER),
    "fp8-kv": Feature(flags={"kv_cache_dtype": "fp8"}, changes_tokens=True, **HANDED_OVER),
    "blocks-of-64": Feature(flags={"block_size": 64}, **HANDED_OVER),
    "blocks-of-128": Feature(flags={"block_size": 128}, **HANDED_OVER),
    "chunked-prefill": Feature(flags=SMALL_STEPS, **HANDED_OVER),
    "no-prefix-caching": Feature(flags={"enable_prefix_caching": False}, **HANDED_OVER),
    "n-gram-drafts": Feature(flags=NGRAM, **HANDED_OVER),
    "lora": Feature(asks.adapted, {"enable_lora": True, "max_lora_rank": asks.LORA_RANK}, True),
    "prompt-embeddings": Feature(asks.embedded, {"enable_prompt_embeds": True}, True),
    "pooling": Feature(flags={"runner": "pooling"}, changes_tokens=True),
    "multi-connector": Feature(flags={"kv_transfer_config": "multi"}, **HANDED_OVER),
    "pulled": Feature(decode_flags={}),
    "pushed": Feature(asks.other_prompts, decode_flags={}, is_pushed=True),
    "blocks-unlike": Feature(decode_flags={"block_size": 64}),
    "drafts-on-decode": Feature(decode_flags=NGRAM),
    "other-images": Feature(asks.pictured, of_images=True, phases=asks.pictured_apart),
    "images-without-hash": Feature(asks.pictured, NO_IMAGE_HASHES, of_images=True, phases=asks.never_shared),
}

# Asked of the plain engine: every answer must change, or wrong KV would not be seen in the tokens.
CONTROL = Feature(asks.changed)
