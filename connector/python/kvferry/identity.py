"""Makes the model's fingerprint: a readable text from which all chunk keys are derived, and which nodes compare.

The fingerprint covers what changes KV: the weights' content, and the configuration that vLLM runs with. It leaves out
what changes no KV (parallelism, block size, vLLM's version, scheduling, tokenizer), so that nodes which differ only in
these share chunks. chunk_format() in served.py adds fields for models with state, unlike windows or unlike layers.
"""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from kvferry.compat import config_revision
from kvferry.digests import digest_of_files

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger(__name__)

FORMAT_VERSION = 2

# Load formats that take some or all of the weights from elsewhere than the files of the model's folder.
_LOADED_FROM_ELSEWHERE = {"tensorizer", "runai_streamer", "runai_streamer_sharded", "modelexpress", "ipc_cache"}

# Fields of a Hugging Face configuration that change no KV, or that tools rewrite in every copy.
_NEUTRAL_NAMES = """
    transformers_version _name_or_path name_or_path auto_map torch_dtype dtype _commit_hash _attn_implementation
    attn_implementation _attn_implementation_autoset use_cache return_dict torchscript output_attentions
    output_hidden_states output_router_logits bos_token_id eos_token_id pad_token_id sep_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id begin_suppress_tokens suppress_tokens
    tokenizer_class prefix id2label label2id num_labels problem_type finetuning_task task_specific_params
    tie_word_embeddings initializer_range attention_dropout hidden_dropout dropout attn_pdrop embd_pdrop resid_pdrop
    router_aux_loss_coef gradient_checkpointing max_length min_length do_sample early_stopping num_beams
    num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
    return_dict_in_generate remove_invalid_values exponential_decay_length_penalty
"""
_NEUTRAL = frozenset(_NEUTRAL_NAMES.split())
# Tokens at which an n-gram ends. In models with embeddings of n-grams, the ids of these tokens therefore change KV.
_TOKENS_OF_NGRAMS = {"bos_token_id", "eos_token_id", "pad_token_id"}
_KV_DTYPES = {"fp8_e4m3": "fp8"}  # vLLM has two names for this type


def kv_dtype(vllm_config: "VllmConfig") -> str:
    """Returns the data type of the server's KV, which is the model's unless --kv-cache-dtype names another."""
    name = vllm_config.cache_config.cache_dtype
    return dtype_name(vllm_config.model_config.dtype) if name == "auto" else _KV_DTYPES.get(name, name)


def fingerprint(
    vllm_config: "VllmConfig", num_layers: int, chunk_tokens: int, *, saves_draft_kv: bool = True, chunk_dtype: str = ""
) -> str:
    """Returns a text with digests of weights and configuration, KV types and sizes, chunk size and format version.

    num_layers: layers whose KV is in a chunk. saves_draft_kv: True if these include the layers of a draft model.
    chunk_dtype: the result of other_chunk_dtype() in conversion.py. Unless it is empty, the text is that of a server
    with --dtype chunk_dtype.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    dtype = chunk_dtype or dtype_name(model.dtype)
    config = effective_config(model)
    draft = ""
    speculative = vllm_config.speculative_config
    has_draft = saves_draft_kv and speculative is not None and speculative.uses_draft_kv_cache()
    if has_draft and speculative.draft_model_config is not None:
        other = speculative.draft_model_config
        weights = model_identity(other, speculative.draft_load_config or vllm_config.load_config)
        own = _kv_fields(other, effective_config(other)) | _set_only({
            "dtype": dtype_name(other.dtype) if other.dtype != model.dtype else None,
            "quantization": other.quantization, "kv_dtype": getattr(speculative, "kv_cache_dtype", None)})  # fmt: skip
        draft = f"draft={speculative.method}:{weights}:{_digest(own)} "
    skip_layers = [] if chunk_dtype else sorted(cache.kv_cache_dtype_skip_layers)
    fields = _kv_fields(model, config) | {"skip_layers": skip_layers}
    if (indexer := getattr(vllm_config.attention_config, "indexer_kv_dtype", "auto")) != "auto":
        fields["indexer"] = indexer
    return (
        f"model={model_identity(model, vllm_config.load_config)} config={_digest(fields)} dtype={dtype} "
        f"quantization={model.quantization or 'none'} rope={_rope(config)} "
        f"kv_dtype={chunk_dtype or kv_dtype(vllm_config)} layers={num_layers} "
        f"kv_heads={model.get_total_num_kv_heads()} head_dim={model.get_head_size()} {draft}"
        f"chunk_tokens={chunk_tokens} format={FORMAT_VERSION}"
    )


def lora_settings(vllm_config: "VllmConfig") -> str:
    """Returns vLLM's settings that change what an adapter does to KV, for the keys of the adapters' chunks."""
    lora = vllm_config.lora_config
    if lora is None:
        return ""
    is_own_dtype = lora.lora_dtype not in ("auto", vllm_config.model_config.dtype)
    found = _set_only({
        "dtype": dtype_name(lora.lora_dtype) if is_own_dtype else "",
        "modules": sorted(lora.target_modules or ()),
        "tower": lora.enable_tower_connector_lora,
        "shared_experts": getattr(lora, "enable_moe_shared_loras", False),
    })  # fmt: skip
    return f",settings:{_digest(found)}" if found else ""


# ---- weights ----


def model_identity(model: "ModelConfig", load_config: Any) -> str:
    """Returns the model's name and a digest of all its weights, equal on every host that has the same files.

    Weights that can't be read from local files are identified by name and revision, dummy weights by name.
    """
    source = str(model.model_weights or model.model)
    name = _base_name(source)
    load_format = str(load_config.load_format)
    if load_format == "dummy":
        return f"{name}#dummy"
    try:
        if files := [] if load_format in _LOADED_FROM_ELSEWHERE else _files_of(model, load_config):
            return f"{name}#{digest_of_files(files, f'weights of {name}')[:16]}"
        reason = "the weights are not local files"
    except OSError as error:
        reason = str(error)
    logger.warning(
        "kvferry: the weights of %s (load format %s) can't be hashed: %s; nodes share KV if the model's name and "
        "revision are equal, without a check of the weights", source, load_format, reason,
    )  # fmt: skip
    return f"{source}@{model.revision or 'main'}"


def _files_of(model: "ModelConfig", load_config: Any) -> list[Path]:
    """Returns the weight files, and other files in their folder that change KV: a processor's configuration, remote
    code.
    """
    folder = _local_folder(model, load_config)
    files = weight_files(folder, str(load_config.load_format))
    if files and folder.is_dir():
        files += folder.glob("*processor_config.json") if model.multimodal_config else []
        files += folder.glob("*.py") if model.trust_remote_code else []
    return files


def weight_files(folder: Path, load_format: str) -> list[Path]:
    """Returns the files of weights in safetensors or, if there are none, those in other formats. With some values of
    `load_format` the other formats are looked for first.
    """
    if folder.is_file():
        return [folder]
    kinds = ("*.safetensors",), ("*.bin", "*.pt", "*.gguf")
    for patterns in reversed(kinds) if load_format in ("pt", "npcache") else kinds:
        if files := sorted(file for pattern in patterns for file in folder.glob(pattern) if file.is_file()):
            return files
    return []


def _local_folder(model: "ModelConfig", load_config: Any) -> Path:
    """Returns where the weights are: the model's path itself, or the revision's folder in the hub's cache."""
    path = Path(model.model)
    if path.exists():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model.model, revision=model.revision, cache_dir=load_config.download_dir,
                                      local_files_only=True))  # fmt: skip
    except Exception as error:  # the hub raises many types of error; the model's name is used instead
        logger.debug("kvferry: %s is not in the hub's cache: %s", model.model, error)
        return path


def _base_name(source: str) -> str:
    """Returns the last part of a path or hub name; for a path in the hub's cache, the model's name."""
    parts = [part for part in source.split("/") if part]
    hub = [part for part in parts if part.startswith("models--")]
    return hub[-1].split("--")[-1] if hub else (parts or [source])[-1]


# ---- configuration ----


def effective_config(model: "ModelConfig") -> Any:
    """Returns the Hugging Face configuration with vLLM's overrides.

    The configuration is read again, because vLLM changes its own copy when it loads a model. In the scheduler's process
    that copy has the changes only if there is one rank, so nodes of different parallelism would get different
    fingerprints.
    """
    from vllm.transformers_utils.config import get_config

    overrides = model.hf_overrides
    by_function = callable(overrides)
    nested = {} if by_function else {key: value for key, value in overrides.items() if isinstance(value, dict)}
    flat = {} if by_function else {key: value for key, value in overrides.items() if key not in nested}
    try:
        config = get_config(
            model.hf_config_path or model.model,
            model.trust_remote_code,
            config_revision(model),
            model.code_revision,
            model.config_format,
            hf_overrides_kw=flat,
            hf_overrides_fn=overrides if by_function else None,
            token=model.hf_token,
        )
        if nested:
            model._apply_dict_overrides(config, nested)
    except Exception as error:  # get_config() raises many types of error; vLLM's own copy is used instead
        logger.warning("kvferry: can't read the configuration of %s again (%s); vLLM's copy is used, by which nodes of "
                       "another parallelism may get another fingerprint and share no KV with this one",
                       model.model, error)
        return model.hf_config
    return config


def _kv_fields(model: "ModelConfig", config: Any) -> dict[str, Any]:
    """Returns all fields of the configuration that may change KV."""
    text = config.get_text_config()
    multimodal = model.multimodal_config
    fields: dict[str, Any] = {
        "hf": _without_neutral(config.to_dict()),
        # vLLM's own settings, in addition to the Hugging Face configuration.
        "window": model.get_sliding_window(),
        "quantization": model.quantization_config,
        "processor": getattr(multimodal, "mm_processor_kwargs", None),
        "video_pruning": getattr(multimodal, "video_pruning_rate", None),
    }
    # The next fields are left out unless they are set, so that releases of kvferry without them have the same digest.
    fields |= _set_only({"classes": getattr(model, "model_class_overrides", None)})
    if multimodal is not None:
        scales = multimodal.mm_encoder_fp8_scale_path
        fields |= _set_only({
            # A client may choose a name as an image's key; the key then does not tell how the image is decoded.
            "media": multimodal.media_io_kwargs,
            "pruning_method": fields["video_pruning"] and getattr(multimodal, "video_pruning_method", None),
            "encoder_dtype": multimodal.mm_encoder_attn_dtype,
            "encoder_scales": scales and digest_of_files([Path(scales)], "scales of the encoder"),
        })  # fmt: skip
    # vLLM's max_model_len changes KV only in models that compare it with a limit: those with longrope, and Llama 4.
    original = getattr(text, "original_max_position_embeddings", None)
    for rope in _ropes(config):
        original = rope.get("original_max_position_embeddings", original)
        if rope.get("rope_type") == "longrope" and original:
            fields["long_rope"] = model.max_model_len > original
    if str(getattr(text, "model_type", "")).startswith("llama4"):
        fields["long_llama4"] = model.max_model_len > 32768
    return fields


def _set_only(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


def _without_neutral(value: Any) -> Any:
    """Removes neutral fields from model configurations, but not from other dictionaries: there the same names may have
    another meaning.
    """
    if isinstance(value, dict):
        neutral = _NEUTRAL if "model_type" in value else frozenset()
        if any("ngram" in str(key) for key in value):
            neutral -= _TOKENS_OF_NGRAMS
        return {str(key): _without_neutral(inner) for key, inner in value.items()
                if key not in neutral and inner is not None}  # fmt: skip
    if isinstance(value, (list, tuple)):
        return [_without_neutral(inner) for inner in value]
    return value


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Returns the model's rope parameters: one dictionary, or one for each kind of layer."""
    found = getattr(config.get_text_config(), "rope_parameters", None) or {}
    inner = [value for value in found.values() if isinstance(value, dict)]
    return inner if inner and len(inner) == len(found) else [found]


def _rope(config: Any) -> str:
    found = _as_json(getattr(config.get_text_config(), "rope_parameters", None) or "none").replace('"', "")
    if len(found) <= 200:
        return found
    first = _ropes(config)[0]
    return f"{first.get('rope_type')},theta:{first.get('rope_theta')},#{_digest(found)}"


def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"),
                      default=lambda other: sorted(map(str, other)) if isinstance(other, (set, frozenset))
                      else str(other))  # fmt: skip


def _digest(value: Any) -> str:
    return hashlib.sha256(_as_json(value).encode()).hexdigest()[:16]
