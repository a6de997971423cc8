"""Tests which of vLLM's kinds of KV are served, and the sentences that refuse the others. No server runs."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvferry import cpu_layout
from kvferry._core import KvFerryError
from kvferry.blocks.order import block_order
from kvferry.layout import CacheLayout, cache_layout, count_chunk_layers, draft_layers, shard_of
from kvferry.preparations import prepared_tokens_max
from kvferry.served import kv_groups, served_specs, state_format, unlike_format, window_format
from kvferry_launch.paths import REPO
from processor import has_fp8_kernels
from vllm.v1 import kv_cache_interface as kinds
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kind
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

BLOCKS, HEADS, TOKENS, DIM = 3, 2, 32, 64
SHAPE: dict[str, Any] = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": DIM, "dtype": torch.float32}
LATENT: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 576, "dtype": torch.float32}


def config(dtype: torch.dtype = torch.float32, cache_dtype: str = "auto", context_parallel: int = 1,
           runner: str = "generate", prefill_context_parallel: int = 1) -> Any:
    """Returns those parts of a VllmConfig that are read here."""
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype, runner_type=runner),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype, prefix_match_unit=None),
        attention_config=SimpleNamespace(backend=None),
        parallel_config=SimpleNamespace(prefill_context_parallel_size=prefill_context_parallel,
                                        decode_context_parallel_size=context_parallel),
        device_config=SimpleNamespace(device_type="cpu"))


def groups(*specs: KVCacheSpec) -> KVCacheConfig:
    """Returns a group for each spec. Layers 0 to 2 are in the first group, 3 to 5 in the second one."""
    names = [[f"model.layers.{3 * group + layer}.self_attn" for layer in range(3)] for group in range(len(specs))]
    found = [KVCacheGroupSpec(layers, spec) for layers, spec in zip(names, specs, strict=True)]
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=found)


def full(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**SHAPE | changes)


def state(**changes: Any) -> kinds.MambaSpec:
    """Returns the spec of a layer's convolution and state. Its blocks are as long as those of full()."""
    return kinds.MambaSpec(**{
        "block_size": TOKENS, "shapes": ((3, 40), (2, 64, 16)), "dtypes": (torch.bfloat16, torch.float32),
        "mamba_cache_mode": "align", "page_size_padded": 4 * 2 * HEADS * TOKENS * DIM} | changes)


FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}

SERVED: dict[str, Callable[[], tuple[KVCacheSpec, ...]]] = {
    "full": lambda: (full(),),
    "latent": lambda: (kinds.MLAAttentionSpec(**LATENT),),
    "windows": lambda: (full(), kinds.SlidingWindowSpec(**SHAPE, sliding_window=64)),
    "windows kept whole": lambda: (full(sliding_window=64),),
    "chunked local attention kept whole": lambda: (full(attention_chunk_size=64),),
    "fp8": lambda: (full(dtype=torch.uint8),),
    "state": lambda: (state(page_size_padded=None, shapes=((2, 64, 16),), dtypes=(torch.float32,)),),
    "state beside attention": lambda: (state(), full(), state()),
    "chunked local": lambda: (full(), kinds.ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64)),
    "windows of two sizes": lambda: tuple(kinds.SlidingWindowSpec(**SHAPE, sliding_window=n) for n in (64, 128)),
    "sizes": lambda: (kinds.UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs={
        "a": full(), "b": full(num_kv_heads=1)}),),
    "blocks": lambda: (full(), full(block_size=2 * TOKENS, num_kv_heads=1)),
    "state of short convolutions": lambda: (full(), state(mamba_type=Kind.SHORT_CONV, shapes=((2, 64),),
                                                          dtypes=(torch.float32,))),
    "state of gated delta nets": lambda: (state(mamba_type=Kind.GDN_ATTN), state(mamba_type=Kind.GDN_ATTN), full()),
}
ALL = (TOKENS, 0, False)
GROUPS = {
    "latent": [(16, 0, False)], "windows": [ALL, (TOKENS, 64, False)], "state": [(TOKENS, TOKENS, False)],
    "state beside attention": [(TOKENS, TOKENS, False), ALL, (TOKENS, TOKENS, False)],
    "chunked local": [ALL, (TOKENS, 64, True)], "windows of two sizes": [(TOKENS, 64, False), (TOKENS, 128, False)],
    "blocks": [ALL, (2 * TOKENS, 0, False)],
    "state of short convolutions": [ALL, (TOKENS, TOKENS, False)],
    "state of gated delta nets": [(TOKENS, TOKENS, False), (TOKENS, TOKENS, False), ALL]}

REFUSED: dict[str, tuple[Callable[[], tuple[KVCacheSpec, ...]], str]] = {
    "state without copies": (lambda: (full(), state(mamba_cache_mode="none")),
                             "has layers with state; .*; start vLLM with --enable-prefix-caching"),
    "state and drafts": (lambda: (full(), state(num_speculative_blocks=2)), "together with speculative decoding"),
    "state of another kind": (lambda: (state(mamba_type=Kind.LINEAR),),
                              "of vLLM's kind LINEAR; this version .* GDN_ATTN, MAMBA2 or SHORT_CONV; no others were"),
    "state of two kinds": (lambda: (state(), state(mamba_type=Kind.SHORT_CONV)), "kind MAMBA2 and SHORT_CONV; this"),
    "delta nets copied inside steps": (
        lambda: (full(), state(mamba_type=Kind.GDN_ATTN, num_prefill_checkpoint_blocks=1,
                               prefill_checkpoint_alignment=64)), "of vLLM's kind GDN_ATTN, copied inside steps"),
    "state and latents": (lambda: (kinds.MLAAttentionSpec(**LATENT), state()), r"and latent attention \(MLA\), a pair"),
    "states at unlike places": (lambda: (state(), state(num_prefill_checkpoint_blocks=1,
                                                        prefill_checkpoint_alignment=1)), "at different places"),
    "state and windows": (lambda: (state(), kinds.SlidingWindowSpec(**SHAPE, sliding_window=64)),
                          "and layers with sliding windows; this version supports models with either of the two"),
    "state in other blocks": (lambda: (full(), state(page_size_padded=None)), "supports groups of one size"),
    "state in odd blocks": (lambda: (state(page_size_padded=None, shapes=((3, 5),), dtypes=(torch.float32,)),),
                            "whose bytes are a multiple of the block size"),
    "cross-attention": (lambda: (full(), kinds.CrossAttentionSpec(**SHAPE)), "has layers with cross-attention"),
    "an encoder": (lambda: (kinds.EncoderOnlyAttentionSpec(**SHAPE),), "has layers with attention of an encoder"),
    "state and chunked local": (lambda: (state(), kinds.ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64)),
                                "and layers with sliding windows; this version supports models with either"),
    "state and unequal heads": (lambda: (state(), full(), full(num_kv_heads=1, head_size=HEADS * DIM)),
                                r"differ in \(KV heads, head size, element type\)"),
    "states of two sizes": (lambda: (kinds.UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs={
        "a": state(), "b": state(shapes=((3, 41), (2, 64, 16)))}),), "has layers with states of different sizes"),
    "sinks": (lambda: (kinds.SinkFullAttentionSpec(**SHAPE, sink_len=4),), "has layers with attention sink tokens"),
    "windows of latents": (lambda: (kinds.SlidingWindowMLASpec(**LATENT, sliding_window=64),),
                           "has layers that combine latent attention with a sliding window"),
    "prefix LM": (lambda: (full(non_causal=True),), "has layers with attention that isn't causal"),
    "compressed": (lambda: (kinds.MLAAttentionSpec(**LATENT, tokens_per_state=4),), "kept for 4 tokens at a time"),
    "no KV": (lambda: (), "this model keeps no KV"),
}


@pytest.mark.parametrize("kind", SERVED)
def test_is_served(kind: str) -> None:
    specs = SERVED[kind]()
    assert served_specs(groups(*specs), config()) == list(specs)
    assert kv_groups(list(specs)) == GROUPS.get(kind, [ALL])


def test_groups_with_unlike_windows_are_named_by_their_layers() -> None:
    """Nodes tell each other by the groups' numbers what a chunk has of their windows."""
    def name(*windows: int) -> str:
        made = groups(*(kinds.SlidingWindowSpec(**SHAPE, sliding_window=n) for n in windows))
        return window_format(made, [group.kv_cache_spec for group in made.kv_cache_groups])

    assert name(64, 64) == ""
    assert name(64, 128) != name(128, 64) != ""


@pytest.mark.parametrize("kind", REFUSED)
def test_is_refused_with_a_sentence(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    make, sentence = REFUSED[kind]
    with pytest.raises(KvFerryError, match=sentence):
        served_specs(groups(*make()), config())
    assert capfd.readouterr().err.count("kvferry: ") == 1


def test_states_of_another_kind_or_device_have_another_format() -> None:
    nodes: list[Any] = [
        SimpleNamespace(device_config=SimpleNamespace(device_type=device),
                        parallel_config=SimpleNamespace(tensor_parallel_size=ranks))
        for device, ranks in (("cpu", 1), ("cuda", 1), ("cpu", 2))]
    specs = (state(), state(mamba_type=Kind.GDN_ATTN))
    found = [state_format([full(), spec], node, None) for node in nodes for spec in specs]
    assert len(set(found)) == len(found)
    assert state_format([full()], nodes[0], None) == ""


def test_pooling_is_refused() -> None:
    with pytest.raises(KvFerryError, match=r"is served for pooling .*; start vLLM without --kv-transfer-config"):
        served_specs(groups(full()), config(runner="pooling"))


def every_kind_of_vllm() -> set[str]:
    found, queue = set(), [KVCacheSpec]
    while queue:
        queue += (below := queue.pop().__subclasses__())
        found |= {kind.__name__ for kind in below if kind.__module__ == kinds.__name__}
    return found


def test_every_kind_has_words() -> None:
    """A kind that a new version of vLLM adds must be served, or refused with a sentence of its own."""
    from kvferry import served

    assert every_kind_of_vllm() - set(served._WORDS) == {
        "AttentionSpec", "ChunkedLocalAttentionSpec", "FullAttentionSpec", "MambaSpec", "MLAAttentionSpec",
        "SlidingWindowSpec", "UniformTypeKVCacheSpecs"}


def tensors(names: list[str], spec: FullAttentionSpec = full()) -> dict[str, torch.Tensor]:  # noqa: B008
    shape = (BLOCKS, spec.num_kv_heads, spec.block_size, spec.head_size + spec.head_size_v)
    return {name: torch.zeros(shape, dtype=spec.dtype) for name in names}


def read(layout: CacheLayout, of: dict[str, torch.Tensor], layer: int, plane: int) -> torch.Tensor:
    """Returns K or V of a layer as [block, head, token, dim], computed only from the layout's strides."""
    name, _, *planes = layout.layers[layer]
    base, *strides = planes[plane]
    tensor = of[name]
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    size = layout.element_bytes
    return whole.as_strided((layout.num_blocks, layout.num_kv_heads, tensor.shape[2], layout.head_dim),
                            [stride // size for stride in strides], (base - whole.data_ptr()) // size)


@pytest.mark.parametrize("cache_dtype", [*FP8, "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_strides_of_a_cpu_read_what_its_kernel_wrote(dtype: torch.dtype, cache_dtype: str) -> None:
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    if cache_dtype in FP8 and not has_fp8_kernels():
        pytest.skip("vLLM's fp8 KV cache needs AVX-512 or AMX")
    isa = _get_attn_isa(dtype, TOKENS, DIM, cache_dtype)
    spec = full(dtype=torch.uint8 if cache_dtype in FP8 else dtype)
    of = tensors(groups(spec).kv_cache_groups[0].layer_names, spec)
    if isa == "amx":  # test_whole_blocks.py has what follows from this order
        assert block_order(groups(spec), config(dtype, cache_dtype), is_wanted=False).startswith("order=amx:")
        return
    (layout,) = cache_layout(of, groups(spec), config(dtype, cache_dtype))
    # these values are exact in every data type
    written = torch.randint(-8, 8, (2, BLOCKS * TOKENS, HEADS, DIM)).to(dtype)
    cache = list(of.values())[1].view(BLOCKS, HEADS, 2 * TOKENS, DIM).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(written[0], written[1], *cache, torch.arange(BLOCKS * TOKENS), isa,
                                   k_scale=1.0, v_scale=1.0, kv_cache_dtype=cache_dtype)
    for plane in range(2):
        found = read(layout, of, 1, plane)
        found = found.view(FP8.get(cache_dtype, dtype))
        expected = written[plane].reshape(BLOCKS, TOKENS, HEADS, DIM).transpose(1, 2)
        assert torch.equal(found.to(torch.float32), expected.to(torch.float32))


@pytest.mark.parametrize("kind", [kind for kind in SERVED if "state" in kind])
def test_strides_of_state_read_each_byte_of_a_page_in_order(kind: str) -> None:
    made = groups(*SERVED[kind]())
    of, pages = {}, {}
    for group in made.kv_cache_groups:
        spec = group.kv_cache_spec
        for name in group.layer_names:
            if isinstance(spec, kinds.MambaSpec):  # in vLLM's view of a page, the states come last
                pages[name] = torch.randint(0, 256, (BLOCKS, spec.page_size_bytes), dtype=torch.uint8)
                of[name] = pages[name][:, : spec.state_content_size_bytes].unflatten(1, (1, 1, -1))
            else:
                of |= tensors([name])
    (layout,) = cache_layout(of, made, config())
    for name, _, *planes in layout.layers:
        if name not in pages:
            continue
        base = pages[name].data_ptr()
        found = [pages[name].view(-1).as_strided(
            (BLOCKS, layout.num_kv_heads, TOKENS, layout.head_dim, layout.element_bytes), (*strides, 1), start - base)
            for start, *strides in planes[: layout.planes]]
        assert torch.equal(torch.stack(found, dim=2).reshape(BLOCKS, -1), pages[name])


def test_states_in_an_unknown_tensor_are_refused() -> None:
    made = groups(*SERVED["state"]())
    of = {name: torch.zeros(BLOCKS, 2, 64, 16) for name in made.kv_cache_groups[0].layer_names}
    with pytest.raises(KvFerryError, match=r"states of layer .*\(3, 2, 64, 16\) and type torch.float32"):
        cache_layout(of, made, config())


def test_strides_of_a_cpu_read_the_latents_that_its_kernel_wrote() -> None:
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    spec = kinds.MLAAttentionSpec(**LATENT)
    of = tensors(groups(spec).kv_cache_groups[0].layer_names, spec)
    (layout,) = cache_layout(of, groups(spec), config())
    assert (layout.planes, layout.num_kv_heads, layout.head_dim) == (1, 1, 576)
    written = torch.rand(BLOCKS * spec.block_size, 576)
    latent, rope = written.split((512, 64), dim=1)
    impl: Any = SimpleNamespace()
    CPUMLAImpl.do_kv_cache_update(impl, latent, rope.unsqueeze(1), list(of.values())[1].squeeze(1),
                                  torch.arange(BLOCKS * spec.block_size), "auto", torch.ones(1))
    assert torch.equal(read(layout, of, 1, 0), written.view(BLOCKS, 1, spec.block_size, 576))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_latents_of_a_cpu_in_half_precision_are_refused(dtype: torch.dtype) -> None:
    spec = kinds.MLAAttentionSpec(**LATENT | {"dtype": dtype})
    of = tensors(groups(spec).kv_cache_groups[0].layer_names, spec)
    with pytest.raises(KvFerryError, match="on CPUs in float32 only; start vLLM with --dtype float32"):
        cache_layout(of, groups(spec), config(dtype))


def test_latents_of_an_amx_kernel_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    spec = kinds.MLAAttentionSpec(**LATENT)
    of = tensors(groups(spec).kv_cache_groups[0].layer_names, spec)
    with pytest.raises(KvFerryError, match=r"latent attention \(MLA\), .* start vLLM with --attention-backend CPU_MLA"):
        cache_layout(of, groups(spec), config())
    chosen = config()
    chosen.attention_config.backend = AttentionBackendEnum.CPU_MLA
    (layout,) = cache_layout(of, groups(spec), chosen)
    assert layout.planes == 1


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float16"])
def test_kv_of_another_type_than_the_cpu_kernels_is_refused(cache_dtype: str) -> None:
    spec = full(dtype=getattr(torch, cache_dtype))
    of = tensors(groups(spec).kv_cache_groups[0].layer_names, spec)
    with pytest.raises(KvFerryError, match=f"KV of element type torch.{cache_dtype} from .*auto, fp8"):
        cache_layout(of, groups(spec), config(cache_dtype=cache_dtype))


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("in_group", [False, True])  # vLLM's two model runners differ in this
def test_layers_that_read_anothers_kv_are_left_out(in_group: bool, is_there: bool) -> None:
    made = groups(full(), full())
    own = [name for group in made.kv_cache_groups for name in group.layer_names]
    of = tensors(own)
    of[own[3]] = of[own[0]]  # the groups share memory, but use different blocks of it
    shared = {"model.layers.6.self_attn": own[1], "model.layers.7.self_attn": own[4]}
    of |= {name: of[target] for name, target in shared.items()} if is_there else {}
    for (name, _), group in zip(shared.items(), made.kv_cache_groups, strict=True):
        group.layer_names += [name] if in_group else []
    (layout,) = cache_layout(of, made, config())
    assert [(name, group) for name, group, *_ in layout.layers] == [
        (name, index // 3) for index, name in enumerate(own)]


@pytest.mark.parametrize("drafts", [
    ["draft_model.layers.0.self_attn"], ["mtp.layers.0.self_attn"], ["model.layers.3.mtp_block.self_attn"],
    ["model.layers.3.self_attn"], ["model.mtp_layers.0.self_attn", "model.mtp_layers.1.self_attn"]])
def test_layers_of_a_draft_model_are_told_by_their_names(drafts: list[str]) -> None:
    names = groups(full()).kv_cache_groups[0].layer_names
    speculative: Any = SimpleNamespace(uses_draft_kv_cache=lambda: True)
    drafting: Any = SimpleNamespace(speculative_config=speculative, model_config=SimpleNamespace(
        get_total_num_hidden_layers=lambda: 3))
    assert draft_layers([*names, *drafts], drafting) == set(drafts)
    drafting.parallel_config = SimpleNamespace(pipeline_parallel_size=1)
    made = groups(full())
    made.kv_cache_groups[0].layer_names += drafts
    assert count_chunk_layers(made, drafting, saves_draft_kv=False) == 3
    assert count_chunk_layers(made, drafting, saves_draft_kv=True) == 3 + len(drafts)
    with pytest.raises(KvFerryError, match=r"does not find them among model\.layers\.0\.self_attn"):
        draft_layers(names, drafting)
    drafting.speculative_config = None
    assert draft_layers([*names, *drafts], drafting) == set()


def test_a_layer_without_a_group_is_refused() -> None:
    made = groups(full())
    of = tensors([*made.kv_cache_groups[0].layer_names, "draft.layers.0.attn"])
    with pytest.raises(KvFerryError, match=r"the layers draft\.layers\.0\.attn, but no KV cache group"):
        cache_layout(of, made, config())


def test_a_head_size_that_the_cpu_kernel_refuses_is_a_sentence() -> None:
    spec = full(head_size=72)
    of = tensors(groups(spec).kv_cache_groups[0].layer_names, spec)
    with pytest.raises(KvFerryError, match=r"can't store KV of head size 72 .*choose other values for --dtype"):
        cache_layout(of, groups(spec), config())


@pytest.mark.parametrize("width", [TOKENS, 4 * DIM])
def test_a_cpu_tensor_of_another_shape_is_refused(width: int) -> None:
    of = {name: torch.zeros(BLOCKS, HEADS, TOKENS, width) for name in groups(full()).kv_cache_groups[0].layer_names}
    with pytest.raises(KvFerryError, match=rf"has shape \(3, 2, 32, {width}\) .* supports \[blocks, 2"):
        cache_layout(of, groups(full()), config())


def test_layers_of_different_element_types_are_refused() -> None:
    of = tensors(groups(full()).kv_cache_groups[0].layer_names)
    of["model.layers.1.self_attn"] = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * DIM, dtype=torch.float16)
    with pytest.raises(KvFerryError, match=r"type torch.float16; this version supports .* of torch.float32"):
        cache_layout(of, groups(full()), config())


def test_layers_of_unlike_shapes_have_a_layout_each() -> None:
    small = full(num_kv_heads=1, block_size=2 * TOKENS)
    sizes = kinds.UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs={
        f"model.layers.{layer}.self_attn": full(head_size=DIM // 2) if layer == 1 else full() for layer in range(3)})
    made = groups(sizes, small)
    of: dict[str, torch.Tensor] = {}
    for group in made.kv_cache_groups:
        for name in group.layer_names:
            of |= tensors([name], getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, small))
    layouts = cache_layout(of, made, config())
    assert [(len(layout.layers), layout.num_kv_heads, layout.head_dim, layout.block_tokens) for layout in layouts] == [
        (1, HEADS, DIM, TOKENS), (1, HEADS, DIM // 2, TOKENS), (1, HEADS, DIM, TOKENS), (3, 1, DIM, 2 * TOKENS)]
    for layout in layouts:
        name = layout.layers[0][0]
        written = torch.rand(of[name].shape)
        of[name].copy_(written)
        values = torch.cat([read(layout, of, 0, plane).flatten() for plane in range(2)])
        assert torch.equal(values.sort().values, written.flatten().sort().values)  # each element is read once


def ranks(tp_size: int, stages: int = 1, **named: Any) -> Any:
    """Returns those parts of a VllmConfig that say how the model is divided. `named`: fields of its configuration."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size, pipeline_parallel_size=stages),
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: 6, get_total_num_kv_heads=lambda: HEADS,
                                     is_attention_free=False, use_mla=False,
                                     hf_text_config=SimpleNamespace(to_dict=lambda: named)),
        speculative_config=None)


def unlike_layouts(*groups_of: int) -> list[CacheLayout]:
    """Returns layouts whose numbers of elements in a head differ, each with a layer of that KV group."""
    plane = (0, 0, 0, 0, 0)
    return [CacheLayout([(f"model.layers.{place}", group, plane, plane)], 2, 1, DIM * (place + 1), 4, BLOCKS, TOKENS)
            for place, group in enumerate(groups_of)]


def test_ranks_with_layers_of_unlike_shapes_count_as_one_head_each() -> None:
    parts = [shard_of(unlike_layouts(0, 1), ranks(2), 0, rank) for rank in range(2)]
    assert parts == [(0, 2, 0, 1), (0, 2, 1, 1)]
    assert shard_of(unlike_layouts(0, 0), ranks(1), 0, 0) == (0, 2, 0, 1)


UNLIKE_HEADS: list[dict[str, Any]] = [
    {"num_key_value_heads": 2, "swa_num_key_value_heads": 4}, {"num_kv_heads": [2, 2, 4]},
    {"num_attention_groups": 2, "attention_other_setting": {"num_attention_groups": 4}},
    {"block_configs": [{"attention": {"n_heads_in_group": count}} for count in (8, 4)]}]


def test_ranks_read_only_from_their_number_if_layers_may_differ_in_their_number_of_heads() -> None:
    """With four ranks, each may have one head of four in some layers, and a copy of one of two in others."""
    (layout,) = unlike_layouts(0)
    alike = {"num_key_value_heads": 2, "num_attention_heads": 8, "linear_num_key_heads": 4, "head_dim": 64}
    assert [shard_of([layout], ranks(4, **alike), 0, rank)[2] for rank in range(4)] == [0, 0, 1, 1]
    assert unlike_format(groups(full()), [full()], ranks(4, **alike), saves_draft_kv=True) == ""
    for named in UNLIKE_HEADS:
        assert [shard_of([layout], ranks(4, **named), 0, rank) for rank in range(4)] == [
            (0, 1, rank, 1) for rank in range(4)]
        assert unlike_format(groups(full()), [full()], ranks(4, **named), saves_draft_kv=True) == (
            "unlike_layers=tensor_parallel:4 ")


def test_nodes_with_layers_of_unlike_shapes_need_one_tensor_parallel_size() -> None:
    def format_of(tp_size: int, *specs: KVCacheSpec, saves_draft_kv: bool = True, drafts: bool = False) -> str:
        vllm_config, made = ranks(tp_size), groups(*specs)
        if drafts:  # the layers 3 to 5, of the second group, are beyond those of the model
            vllm_config.model_config.get_total_num_hidden_layers = lambda: 3
            vllm_config.speculative_config = SimpleNamespace(uses_draft_kv_cache=lambda: True)
        return unlike_format(made, list(specs), vllm_config, saves_draft_kv=saves_draft_kv)

    for other in (full(head_size=2 * DIM), full(num_kv_heads=1), full(block_size=2 * TOKENS), full(dtype=torch.uint8),
                  kinds.SlidingWindowSpec(**SHAPE | {"num_kv_heads": 1}, sliding_window=64)):
        assert [format_of(size, full(), other) for size in (1, 2)] == [
            "unlike_layers=tensor_parallel:1 ", "unlike_layers=tensor_parallel:2 "]
    for alike in ((full(),), (full(), kinds.SlidingWindowSpec(**SHAPE, sliding_window=64)), (full(), state())):
        assert format_of(2, *alike) == ""
    assert format_of(2, full(), full(num_kv_heads=1), drafts=True) != ""
    assert format_of(2, full(), full(num_kv_heads=1), drafts=True, saves_draft_kv=False) == ""


def interleaved() -> None:
    """Describes KV whose order of elements has no strides: those of two tokens take turns."""
    def pairs_of_tokens(*_: Any) -> torch.Tensor:
        return torch.arange(TOKENS * DIM).reshape(TOKENS // 2, DIM, 2).transpose(1, 2).reshape(TOKENS, DIM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_layout, "_written_offsets", pairs_of_tokens)
        cache_layout(tensors(groups(full()).kv_cache_groups[0].layer_names), groups(full()), config())


# the rows of the document's table of refusals, each with what is refused
TOGETHER: dict[str, Callable[[], object]] = {
    "layers of unlike shapes with pipeline parallelism": lambda: shard_of(unlike_layouts(0, 1), ranks(1, 2), 0, 0),
    "layers of unlike shapes in one KV cache group, with tensor parallelism":
        lambda: shard_of(unlike_layouts(0, 0), ranks(2), 0, 0),
    "layers of unlike shapes beside layers with state":
        lambda: served_specs(groups(state(), full(), full(num_kv_heads=1, head_size=HEADS * DIM)), config()),
    "state with speculative decoding": lambda: served_specs(groups(full(), state(num_speculative_blocks=2)), config()),
    "context parallelism beside layers with state":
        lambda: served_specs(groups(full(), state()), config(context_parallel=2)),
    "prefill context parallelism without decode context parallelism":
        lambda: served_specs(groups(full()), config(prefill_context_parallel=2)),
    "`chunk_dtype` with chunks of whole blocks":
        lambda: block_order(groups(full()), config(), is_wanted=True, chunk_dtype="bfloat16"),
    "AMX kernels in some layers only": interleaved,
}


def test_the_document_has_the_words_of_each_refusal() -> None:
    text = (REPO / "launch" / "docs" / "compatibility.md").read_text()
    rows = re.findall(r'^\| ([^|]+) \| [^|]+ \| "([^|"]+)" \|$', text, re.MULTILINE)
    assert [what for what, _ in rows] == list(TOGETHER)
    for what, words in rows:
        with pytest.raises(KvFerryError, match=re.escape(words)):
            TOGETHER[what]()


def test_a_refusal_of_unlike_layers_says_what_is_served_instead() -> None:
    with pytest.raises(KvFerryError, match=r"set --pipeline-parallel-size \(2\) to 1"):
        shard_of(unlike_layouts(0, 1), ranks(1, 2), 0, 0)
    with pytest.raises(KvFerryError, match=r"set --tensor-parallel-size \(2\) to 1, or leave a draft model's KV out"):
        shard_of(unlike_layouts(0, 0), ranks(2), 0, 0)
    with pytest.raises(KvFerryError, match=r"interleaves the elements of K of type torch\.float32 .* whole_blocks to"):
        interleaved()


def prepared(*specs: KVCacheSpec, device: str = "cpu", caching: bool = True, connector: str = "KvFerryConnector",
             policy: str = "recompute", world: int = 1, replicas: int = 1, speculative: Any = None) -> int:
    vllm_config: Any = SimpleNamespace(
        device_config=SimpleNamespace(device_type=device), cache_config=SimpleNamespace(enable_prefix_caching=caching),
        kv_transfer_config=SimpleNamespace(kv_connector=connector, kv_load_failure_policy=policy),
        parallel_config=SimpleNamespace(world_size=world, data_parallel_size=replicas), speculative_config=speculative)
    kv_cache_config = groups(*specs)
    kv_cache_config.num_blocks = 40
    return prepared_tokens_max(vllm_config, kv_cache_config)


def test_preparations_may_hold_a_quarter_of_the_blocks() -> None:
    assert prepared(full()) == 40 * TOKENS // 4
    assert prepared(full(sliding_window=64)) == 40 * TOKENS // 4, "a window kept whole is cached like full attention"


@pytest.mark.parametrize("specs,changes", [
    ((full(),), {"device": "cuda"}), ((full(),), {"caching": False}), ((full(),), {"caching": None}),
    ((full(),), {"connector": "MultiConnector"}), ((full(),), {"policy": "fail"}), ((full(),), {"world": 2}),
    ((full(),), {"replicas": 2}), ((full(),), {"speculative": object()}), ((full(), full()), {}), ((state(),), {}),
    ((kinds.MLAAttentionSpec(**LATENT),), {}), ((kinds.SlidingWindowSpec(**SHAPE, sliding_window=64),), {})])
def test_whatever_is_not_known_to_work_is_not_prepared(specs: tuple[KVCacheSpec, ...], changes: dict[str, Any]) -> None:
    assert prepared(*specs, **changes) == 0
