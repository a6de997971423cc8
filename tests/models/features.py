"""The features of the table: the arguments of vLLM's engine that each needs, and what is asked of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import asks
from families import FAMILIES

if TYPE_CHECKING:
    from engine import Engine

Phases = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Feature:
    """One column of the table.

    ask: sends requests to an engine, with kvferry or without, and returns the answers. flags: vLLM's arguments; the
    features that change the same arguments of a family share engines. changes_tokens: True if the arguments may change
    the tokens of an engine without kvferry, which therefore gets them too. decode_flags: of the second engine, if there
    is one, which gets the KV of the first one; under `kvferry` they have settings of the connector. converts: True if
    that KV was computed in another type than the plain engine's, so that tokens may differ as far as those of vLLM
    alone do in that type; the KV of the two engines with kvferry is then compared too. phases: what an engine with
    kvferry does. of_images: True if only models with images are asked. families: those that are asked; none named: all
    of them.
    """

    ask: "Callable[[Engine, Any], list[asks.Spoken]]" = asks.greedy
    flags: dict[str, Any] = field(default_factory=dict)
    changes_tokens: bool = False
    decode_flags: dict[str, Any] | None = None
    is_pushed: bool = False
    converts: bool = False
    of_images: bool = False
    families: tuple[str, ...] = ()
    phases: "Callable[[Engine, Feature], Phases]" = asks.computed_and_loaded


NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1,
                                "prompt_lookup_max": 3}}
FEW_BLOCKS = {"num_gpu_blocks_override": "few", "max_model_len": 288}
# vLLM then numbers the images of a process instead of hashing them
NO_IMAGE_HASHES = {"mm_processor_cache_gb": 0, "enable_prefix_caching": False}
SMALL_STEPS = {"max_num_batched_tokens": 48, "max_num_seqs": 16}
READS_BFLOAT16 = {"dtype": "float32", "kvferry": {"chunk_dtype": "bfloat16"}}
FP8_READS_BFLOAT16 = {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "kvferry": {"chunk_dtype": "bfloat16"}}
WHOLE_BLOCKS = {"kvferry": {"whole_blocks": True}}
# one model of each kind of KV, for features that take long and do not depend on anything else
OF_EACH_KIND = ("llama", "gemma3-window", "deepseek-v2", "mamba2", "granite-hybrid", "mimo-v2", "gemma4")
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
    "bfloat16": Feature(asks.one_by_one, {"dtype": "bfloat16"}, changes_tokens=True, **HANDED_OVER),
    "float16": Feature(asks.one_by_one, {"dtype": "float16"}, changes_tokens=True, **HANDED_OVER),
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
    "chunk-dtype": Feature(flags={"dtype": "bfloat16"}, decode_flags=READS_BFLOAT16, converts=True,
                           families=OF_EACH_KIND),
    "chunk-dtype-fp8": Feature(asks.one_by_one, {"dtype": "bfloat16"}, decode_flags=FP8_READS_BFLOAT16, converts=True,
                               families=OF_EACH_KIND),
    "whole-blocks": Feature(flags=WHOLE_BLOCKS, decode_flags=WHOLE_BLOCKS, families=OF_EACH_KIND),
    "whole-blocks-preempted": Feature(asks.crowd, FEW_BLOCKS | WHOLE_BLOCKS, phases=asks.preempted,
                                      families=OF_EACH_KIND),
    "tensor-parallel": Feature(flags={"tensor_parallel_size": 2}, changes_tokens=True, families=OF_EACH_KIND,
                               **HANDED_OVER),
    "other-images": Feature(asks.pictured, of_images=True, phases=asks.pictured_apart),
    "images-without-hash": Feature(asks.pictured, NO_IMAGE_HASHES, of_images=True, phases=asks.never_shared),
}


def features_of(family: str) -> list[str]:
    """Returns the features that a family is asked for."""
    return [name for name, feature in FEATURES.items()
            if (FAMILIES[family].has_images or not feature.of_images) and family in (feature.families or FAMILIES)]


# Asked of the plain engine: every answer must change, or wrong KV would not be seen in the tokens.
CONTROL = Feature(asks.changed)
