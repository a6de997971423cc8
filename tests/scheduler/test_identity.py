"""Tests fingerprints and request extras: they change if and only if something changes KV."""

import functools
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvferry import digests
from kvferry._core import fingerprint_difference
from kvferry.conversion import other_chunk_dtype
from kvferry.identity import fingerprint, lora_settings
from kvferry.request_extras import RequestExtras, numbers_images
from kvferry_launch.testbed import toy_model
from vllm.config import ModelConfig, MultiModalConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest

SHAPE = toy_model.Shape(layers=2, hidden=64, heads=2, kv_heads=2, head_size=32, intermediate=64)
WEIGHTS_BYTES = 400_000
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16,
        "original_max_position_embeddings": 1024}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvferry" / "digests"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "toy")


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the fingerprint of an unchanged copy of the model."""
    return fingerprint_of(make_model(tmp_path_factory.mktemp("unchanged") / "toy"))


def make_model(folder: Path, **fields: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(toy_model.config(SHAPE) | fields))
    (folder / "model.safetensors").write_bytes(bytes(index % 251 for index in range(WEIGHTS_BYTES)))
    return folder


def vllm_config(model: Path | str, put: dict[str, Any] | None = None, **flags: Any) -> VllmConfig:
    """Returns what vLLM makes of its command line. `put`: values by their paths, set after vLLM's checks, which would
    otherwise load an architecture or ask for other hardware.
    """
    defaults = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 512, "block_size": 32}
    config = EngineArgs(model=str(model), **defaults | flags).create_engine_config()
    for path, value in (put or {}).items():
        *parents, name = path.split(".")
        object.__setattr__(functools.reduce(getattr, parents, config), name, value)
    return config


def fingerprint_of(model: Path | str, *, layers: int = 2, chunk_tokens: int = 64, **flags: Any) -> str:
    return fingerprint(vllm_config(model, **flags), layers, chunk_tokens)


def edit(**fields: Any) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | fields))

    return change


def flip(offset: int) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        content = bytearray((model / "model.safetensors").read_bytes())
        content[offset] ^= 1
        (model / "model.safetensors").write_bytes(content)

    return change


def write(name: str, content: str = "{}") -> Callable[[Path], None]:
    return lambda model: (model / name).write_text(content) and None


def another_norm(config: Any) -> Any:
    config.rms_norm_eps = 1e-5
    return config


def swap(model: Path) -> None:
    """Exchanges two tensors of equal size in the file."""
    content = (model / "model.safetensors").read_bytes()
    size = 1000
    (model / "model.safetensors").write_bytes(content[:size] + content[2 * size:3 * size] + content[size:2 * size]
                                              + content[3 * size:])


Change = Callable[[Path], None] | dict[str, Any] | tuple[Callable[[Path], None], dict[str, Any]]


def put_for_images(**settings: Any) -> Change:
    return {"put": {"model_config.multimodal_config": MultiModalConfig(**settings)}}


CHANGES_KV: dict[str, Change] = {
    # changes of the model's files
    "first byte of the weights": flip(0),
    "a byte in the middle of the weights": flip(WEIGHTS_BYTES // 2),
    "last byte of the weights": flip(WEIGHTS_BYTES - 1),
    "one more shard": write("model-2.safetensors"),
    "two tensors swapped": swap,
    "theta": edit(rope_theta=1e6),
    "dynamic NTK": edit(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
    "llama 3's rope": edit(rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                         "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}),
    "long rope": edit(rope_scaling=LONG | {"rope_theta": 10000.0}),
    "rope in sections": edit(rope_scaling={"rope_type": "default", "mrope_section": [8, 4, 4]}),
    "partial rope": edit(partial_rotary_factor=0.5),
    # yarn and dynamic NTK read it
    "positions of the training": edit(max_position_embeddings=8192),
    "kinds of layers": edit(layer_types=["sliding_attention", "full_attention"], sliding_window=64),
    "cap of the attention's logits": edit(attn_logit_softcapping=50.0),
    "norm of queries and keys": edit(use_qk_norm=True),
    "clipping of queries and keys": edit(clip_qkv=8.0),
    "scale of the attention": edit(query_pre_attn_scalar=256),
    "scale of embeddings": edit(embedding_multiplier=12.0),
    "experts of a token": edit(num_experts_per_tok=4),
    "yarn": edit(rope_scaling=YARN | {"rope_theta": 10000.0}),
    "linear rope": edit(rope_scaling={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}),
    "norm": edit(rms_norm_eps=1e-5),
    "activation": edit(hidden_act="gelu"),
    "attention bias": edit(attention_bias=True),
    "a window": edit(use_sliding_window=True, sliding_window=64, max_window_layers=0),
    "layer count": edit(num_hidden_layers=1),
    "intermediate size": edit(intermediate_size=96),
    "query heads": edit(num_attention_heads=4),
    "KV heads": edit(num_key_value_heads=1),
    "head size": edit(head_dim=16),
    "vocabulary": edit(vocab_size=256),
    "a field that nobody knows yet": edit(attention_sinks=4),
    # changes by vLLM's flags
    "theta by override": {"hf_overrides": {"rope_parameters": DEFAULT_ROPE | {"rope_theta": 1e6}}},
    "theta in its former place": {"hf_overrides": {"rope_theta": 1e6}},
    "rope by override": {"hf_overrides": {"rope_scaling": YARN | {"rope_theta": 10000.0}}},
    "rope parameters by override": {"hf_overrides": {"rope_parameters": YARN | {"rope_theta": 10000.0}}},
    "norm by override": {"hf_overrides": {"rms_norm_eps": 1e-5}},
    "norm by a function": {"hf_overrides": another_norm},
    "a false flag by override": {"hf_overrides": {"use_qk_norm": False}},
    # These are set after vLLM's checks, which would otherwise load the architecture or the quantization.
    "architecture by override": {"put": {"model_config.hf_overrides": {"architectures": ["Qwen2ForCausalLM"]}}},
    "quantized weights": {"put": {"model_config.hf_overrides": {"quantization_config": {"quant_method": "fp8"}}}},
    "data type": {"dtype": "bfloat16"},
    "quantization": {"put": {"model_config.quantization": "fp8"}},
    "details of a quantization": {"put": {"model_config.quantization_config": {"linear": "fp8_per_block"}}},
    "KV data type": {"put": {"cache_config.cache_dtype": "fp8"}},
    "another fp8": {"put": {"cache_config.cache_dtype": "fp8_e5m2"}},
    "KV of 8 bits with a scale for each token": {"put": {"cache_config.cache_dtype": "int8_per_token_head"}},
    "layers without fp8": {"put": {"cache_config.kv_cache_dtype_skip_layers": ["0"]}},
    "the indexer's data type": {"put": {"attention_config.indexer_kv_dtype": "fp8"}},
    "another class for the architecture": {"put": {"model_config.model_class_overrides": {"Qwen3ForCausalLM": "a:B"}}},
    # what a model for images does before its first layer
    "the processor's settings": put_for_images(mm_processor_kwargs={"num_crops": 4}),
    "how media are read": put_for_images(media_io_kwargs={"image": {"rgba_background_color": [0, 0, 0]}}),
    "video pruning": put_for_images(video_pruning_rate=0.5),
    "the encoder's data type": put_for_images(mm_encoder_attn_dtype="fp8"),
    "code that is run": (write("modeling_toy.py"), {"trust_remote_code": True}),
    "chunk size": {"chunk_tokens": 128},
    "layers with KV": {"layers": 3},
    "other weights of the same name": {"load_format": "dummy"},
}

KEEPS_KV: dict[str, Change] = {
    "transformers' version": edit(transformers_version="4.1"),
    "the name in the file": edit(_name_or_path="elsewhere"),
    "the data type's name": edit(dtype="float32"),
    "end token": edit(eos_token_id=[3, 4]),
    "start and padding token": edit(bos_token_id=7, pad_token_id=8),
    "use_cache": edit(use_cache=False),
    "dropout": edit(attention_dropout=0.1),
    "initialization": edit(initializer_range=0.5),
    "code that is not run": write("modeling_toy.py"),
    "labels": edit(id2label={"0": "yes", "1": "no"}),
    "generation": edit(temperature=0.3, top_k=5, do_sample=True),
    "generation_config.json": write("generation_config.json", '{"temperature": 0.1}'),
    "a tokenizer": write("tokenizer.json"),
    "a chat template": write("chat_template.jinja", "x"),
    "weights in a format that is not loaded": write("pytorch_model.bin"),
    "a touched file": lambda model: os.utime(model / "model.safetensors", (1, 1)),
    "other white space": lambda model: (model / "config.json").write_text(
        json.dumps(json.loads((model / "config.json").read_text()), indent=3, sort_keys=True)) and None,
    "an override that says the same": {"hf_overrides": {"rms_norm_eps": 1e-6, "rope_parameters": DEFAULT_ROPE}},
    "trust in code that is not there": {"trust_remote_code": True},
    "maximum length": {"max_model_len": 1024},
    "seed": {"seed": 5},
    "eager": {"enforce_eager": True},
    "served name": {"served_model_name": ["a", "b"]},
    "log probabilities": {"max_logprobs": 3, "logprobs_mode": "processed_logits"},
    "tokenizer's revision": {"tokenizer_revision": "v2"},
    "block size": {"block_size": 64},
    "memory": {"gpu_memory_utilization": 0.5, "num_gpu_blocks_override": 7},
    "no prefix caching": {"enable_prefix_caching": False},
    "hashes of prefix caching": {"prefix_caching_hash_algo": "sha256_cbor"},
    "n-gram speculation": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3,
                                                  "prompt_lookup_max": 3}},
    "revision with the same bytes": {"revision": "v2"},
    # Only what follows the last layer depends on it.
    "tied embeddings": {"put": {"model_config.hf_overrides": {"tie_word_embeddings": True}}},
    "requests in a step": {"max_num_seqs": 3},
    "tokens in a step": {"max_num_batched_tokens": 700},
    "chunked prefill": {"enable_chunked_prefill": False, "max_num_batched_tokens": 512},
    "scheduling by priority": {"scheduling_policy": "priority"},
    "asynchronous scheduling": {"async_scheduling": True},
    "tensor parallelism": {"put": {"parallel_config.tensor_parallel_size": 2}},
    "pipeline parallelism": {"put": {"parallel_config.pipeline_parallel_size": 2}},
    "data parallelism": {"put": {"parallel_config.data_parallel_size": 2}},
    "expert parallelism": {"put": {"parallel_config.enable_expert_parallel": True}},
    "the kernel of attention": {"put": {"attention_config.backend": "FLEX_ATTENTION"}},
    "no compilation": {"compilation_config": {"mode": 0}},
    "logits processors": {"logits_processors": ["a.module:Processor"]},
    "vLLM's generation defaults": {"generation_config": "vllm", "override_generation_config": {"temperature": 0.2}},
    "adapters are served": {"enable_lora": True, "max_lora_rank": 64},
    "how files are read": {"load_format": "safetensors", "download_dir": "/elsewhere"},
    "prompts of embeddings": {"enable_prompt_embeds": True},
    "sleep": {"put": {"model_config.enable_sleep_mode": True}},
    "auto by its name": {"put": {"cache_config.cache_dtype": "float32"}},
    "how many images": put_for_images(limit_per_prompt={}, mm_processor_cache_gb=1),
    "a pruning that is off": put_for_images(video_pruning_method="vidcom2"),
}


def after(change: Change, model: Path) -> str:
    if isinstance(change, dict):
        change = (lambda model: None, change)
    edit_files, flags = change if isinstance(change, tuple) else (change, {})
    edit_files(model)
    return fingerprint_of(model, **flags)


@pytest.mark.parametrize("change", CHANGES_KV)
def test_what_changes_kv_changes_the_fingerprint(change: str, model: Path, before: str) -> None:
    now = after(CHANGES_KV[change], model)
    assert now != before
    assert " is '" in fingerprint_difference(before, now)  # the text names a field and both values


@pytest.mark.parametrize("change", KEEPS_KV)
def test_what_keeps_kv_keeps_the_fingerprint(change: str, model: Path, before: str) -> None:
    assert after(KEEPS_KV[change], model) == before


def test_another_folder_and_the_hubs_cache_are_the_same_model(model: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "elsewhere" / "toy")
    hub = make_model(tmp_path / "hub" / "models--org--toy" / "snapshots" / "0123abcd")
    assert fingerprint_of(other) == fingerprint_of(model) == fingerprint_of(hub)


def test_names_of_generation_defaults_count_inside_other_settings(model: Path) -> None:
    found = {fingerprint_of(model, put={"model_config.hf_overrides": {"router": {"top_k": count}}})
             for count in (1, 2)}
    assert len(found) == 2


def test_loading_a_model_does_not_change_its_fingerprint(model: Path) -> None:
    """While a model is loaded, it changes its own configuration. With one rank, this happens in the scheduler's
    process.
    """
    loaded = ModelConfig(model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=512).hf_config
    loaded.rope_parameters["partial_rotary_factor"] = 0.5
    assert fingerprint_of(model, put={"model_config.hf_config": loaded}) == fingerprint_of(model)


def test_the_maximum_length_counts_where_a_model_compares_it(tmp_path: Path) -> None:
    model = make_model(tmp_path / "long", rope_scaling=LONG | {"rope_theta": 10000.0})
    short = fingerprint_of(model, max_model_len=512)
    assert fingerprint_of(model, max_model_len=1024) == short
    assert fingerprint_of(model, max_model_len=2048) != short


def test_a_draft_with_kv_of_its_own_counts(model: Path, tmp_path: Path) -> None:
    def with_draft(folder: Path, *, saves_draft_kv: bool = True, **settings: Any) -> str:
        draft = vllm_config(folder).model_config
        config = vllm_config(model, put={"speculative_config": SimpleNamespace(
            uses_draft_kv_cache=lambda: True, method="eagle", draft_model_config=draft, draft_load_config=None,
            **settings)})
        return fingerprint(config, 2, 64, saves_draft_kv=saves_draft_kv)

    draft = make_model(tmp_path / "draft")
    before = with_draft(draft)
    assert before != fingerprint_of(model)
    assert with_draft(draft, saves_draft_kv=False) == fingerprint_of(model)
    assert with_draft(draft, kv_cache_dtype="fp8") != before
    flip(77)(draft)
    assert with_draft(draft) != before


def test_tokens_that_end_n_grams_count(tmp_path: Path) -> None:
    """Models with embeddings of n-grams start them anew after these tokens."""
    found = {fingerprint_of(make_model(tmp_path / f"{name} {token}" / "toy", ngram_size=3, **{name: token}))
             for name in ("eos_token_id", "pad_token_id") for token in (7, 8)}
    assert len(found) == 4


def test_a_window_that_a_flag_turns_off_counts(tmp_path: Path) -> None:
    model = make_model(tmp_path / "toy", use_sliding_window=True, sliding_window=64, max_window_layers=0)
    found = {fingerprint_of(model, max_model_len=64, disable_sliding_window=off) for off in (False, True)}
    assert len(found) == 2


def test_details_of_what_comes_before_the_first_layer_count(model: Path, tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    found = set()
    for content in ("{}", '{"a": 2.0}'):
        scales.write_text(content)
        found.add(after(put_for_images(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(scales)), model))
    found |= {after(put_for_images(video_pruning_rate=0.5, video_pruning_method=kind), model)
              for kind in ("evs", "vidcom2")}
    assert len(found) == 4


# [case] settings of a server that reads chunks of bfloat16 servers
READS_BFLOAT16: dict[str, dict[str, Any]] = {
    "fp8 KV": {"dtype": "bfloat16", "put": {"cache_config.cache_dtype": "fp8"}},
    "KV of e5m2": {"dtype": "bfloat16", "put": {"cache_config.cache_dtype": "fp8_e5m2"}},
    "some layers without fp8": {"dtype": "bfloat16", "put": {"cache_config.cache_dtype": "fp8",
                                                             "cache_config.kv_cache_dtype_skip_layers": ["0"]}},
    "a model of float16": {"dtype": "float16"},
    "a model of float16 with KV of fp8": {"dtype": "float16", "put": {"cache_config.cache_dtype": "fp8"}},
    "a model of float16 with KV of bfloat16": {"dtype": "float16", "put": {"cache_config.cache_dtype": "bfloat16"}},
}


@pytest.mark.parametrize("case", READS_BFLOAT16)
def test_a_node_that_converts_has_the_fingerprint_of_those_it_reads(case: str, model: Path) -> None:
    config = vllm_config(model, **READS_BFLOAT16[case])
    plain = fingerprint_of(model, dtype="bfloat16")
    alone = fingerprint(config, 2, 64)
    assert other_chunk_dtype(config, "") == ""
    assert other_chunk_dtype(config, "bfloat16") == "bfloat16"
    assert alone != plain
    assert fingerprint(config, 2, 64, chunk_dtype="bfloat16") == plain
    assert fingerprint(config, 2, 64, chunk_dtype="float32") not in (plain, alone)


def test_a_node_whose_own_type_the_setting_names_is_as_without_it(model: Path) -> None:
    for put in ({}, {"cache_config.cache_dtype": "bfloat16"}):
        config = vllm_config(model, dtype="bfloat16", put=put)
        assert other_chunk_dtype(config, "bfloat16") == ""
        assert other_chunk_dtype(config, "float16") == "float16"


def test_what_else_changes_kv_keeps_a_converting_node_apart(model: Path) -> None:
    def converting() -> str:
        config = vllm_config(model, dtype="bfloat16", put={"cache_config.cache_dtype": "fp8"})
        return fingerprint(config, 2, 64, chunk_dtype="bfloat16")

    before = converting()
    flip(77)(model)
    assert converting() != before


def test_two_names_of_one_kv_data_type_are_the_same(model: Path) -> None:
    found = {fingerprint_of(model, put={"cache_config.cache_dtype": name}) for name in ("fp8", "fp8_e4m3")}
    assert len(found) == 1


# ---- the cache of digests on disk ----
def test_digests_are_kept_private_and_used_again(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint_of(model)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert [stat.S_IMODE(entry.stat().st_mode) for entry in cache.iterdir()] == [0o600]
    monkeypatch.setattr(digests, "_digest_of_piece", None)  # fails the test if any file is read
    assert fingerprint_of(model) == before


def test_damaged_entries_and_unwritable_folders_do_no_harm(
        model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint_of(model)
    for entry in cache.iterdir():
        entry.write_bytes(b"\xff\xfe nonsense")
    assert fingerprint_of(model) == before
    make_model(model, rms_norm_eps=1e-6)  # the same content, written again
    assert fingerprint_of(model) == before
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert fingerprint_of(model) == before
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent.parent.parent / "another"))
    assert fingerprint_of(model) == before


@pytest.mark.parametrize("place", ["folder", "entry"])
@pytest.mark.parametrize("fault", ["written by all", "another owner"])
def test_digests_that_another_user_may_have_written_are_not_used(
        place: str, fault: str, model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint_of(model)
    entry, = cache.iterdir()
    signature, digest = entry.read_text().split("\n")
    entry.write_text(f"{signature}\n{digest[::-1]}")
    # a digest that only this user could have written is accepted, even if it is forged
    assert fingerprint_of(model) != before

    path = cache if place == "folder" else entry
    if fault == "written by all":
        path.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(path, 1, 1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert fingerprint_of(model) == before


def test_weights_that_cannot_be_read_go_by_name(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> bytes:
        raise OSError("Input/output error")

    monkeypatch.setattr(digests, "_digest_of_piece", refuse)
    assert f"model={model}@main " in fingerprint_of(model)


def test_a_file_of_many_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_PIECE_BYTES", 1000)
    file = tmp_path / "weights.bin"
    found = set()
    for size in (0, 1, 999, 1000, 1001, 5000):
        file.write_bytes(b"\0" * size)
        found.add(digests.digest_of_files([file], "a test"))
    assert len(found) == 6


# ---- adapters and resets ----
def make_adapter(folder: Path, content: bytes = b"one") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


def extras(source: RequestExtras, path: Path | str, number: int = 1, *, inplace: bool = False, three_d: bool = False,
           salt: str | None = None, local: int = 0) -> str | None:
    lora = LoRARequest("adapter", number, str(path), load_inplace=inplace, is_3d_lora_weight=three_d)
    return source.of(SimpleNamespace(lora_request=lora, cache_salt=salt), local)  # type: ignore[arg-type]


def test_adapters_are_told_apart_by_content(tmp_path: Path) -> None:
    source = RequestExtras()
    one = extras(source, make_adapter(tmp_path / "one"), 1)
    copy = extras(source, make_adapter(tmp_path / "copy"), 2)
    other = extras(source, make_adapter(tmp_path / "other", b"two"), 3)
    scaled = make_adapter(tmp_path / "scaled")
    (scaled / "adapter_config.json").write_text('{"r": 16}')
    assert one == copy
    assert len({one, other, extras(source, scaled, 4), extras(source, tmp_path / "one", 5, three_d=True),
                extras(source, tmp_path / "one", 1, salt="s")}) == 5
    assert extras(source, "/nowhere", 6) is None


def test_settings_of_adapters_change_their_keys_alone(model: Path, tmp_path: Path) -> None:
    def key(**flags: Any) -> str | None:
        config = vllm_config(model, enable_lora=True, **flags)
        assert fingerprint(config, 2, 64) == fingerprint_of(model)
        return extras(RequestExtras(lora_settings(config)), make_adapter(tmp_path / "adapter"))

    before = key()
    assert key(max_lora_rank=64, max_loras=4, fully_sharded_loras=True) == before
    others = {key(lora_dtype="bfloat16"), key(lora_target_modules=["q_proj"]), key(enable_tower_connector_lora=True)}
    assert len(others | {before}) == 4


def test_an_adapter_that_is_loaded_again_in_place(tmp_path: Path) -> None:
    source = RequestExtras()
    path = make_adapter(tmp_path / "adapter")
    before = extras(source, path)
    assert extras(source, path, local=32) == before
    make_adapter(path, b"two")
    assert extras(source, path) is None  # only the worker knows the content of the adapter
    now = extras(source, path, inplace=True)
    assert now not in (None, before)
    assert extras(source, path, inplace=True) == now
    assert source.num_reloads == 1
    # vLLM's prefix cache may have KV of the adapter's former content
    assert extras(source, path, inplace=True, local=32) is None

    moved = extras(source, make_adapter(tmp_path / "moved", b"three"), inplace=True)
    assert moved not in (None, before, now)
    assert extras(source, path) is None  # the request came before the adapter was loaded from another folder


def test_a_reset_changes_the_extras() -> None:
    source = RequestExtras()
    request: Any = SimpleNamespace(lora_request=None, cache_salt="s")
    assert source.of(request) == "salt=s"
    source.weights_epoch += 1
    assert source.of(request) == "epoch=1;salt=s"


@pytest.mark.parametrize(("cache_gb", "caches_prefixes", "is_shared"), [(0, False, False), (1, False, True),
                                                                     (0, True, True)])
def test_kv_of_images_that_vllm_does_not_hash_is_not_shared(cache_gb: int, caches_prefixes: bool, is_shared: bool
                                                            ) -> None:
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=MultiModalConfig(mm_processor_cache_gb=cache_gb)),
        cache_config=SimpleNamespace(enable_prefix_caching=caches_prefixes))
    source = RequestExtras(numbers_images=numbers_images(config))

    def of(images: list[str]) -> str | None:
        return source.of(SimpleNamespace(lora_request=None, cache_salt=None, mm_features=images))  # type: ignore[arg-type]

    assert of([]) == ""
    assert (of(["renderer0-mm-1-image-0"]) == "") == is_shared
