"""Tests which bytes of a layer's states each tensor parallel rank has, by what vLLM's own code gives a rank of the
channels and heads. No server runs.
"""

from collections.abc import Callable
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvferry._core import KvFerryError
from kvferry.handshake import WorkerHello, checked_payloads
from kvferry.layout import CacheLayout
from kvferry.served import divided_shapes, state_format
from kvferry.states.parts import Part, chunk_parts, state_parts, whole_shapes
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Calculator
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kind
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

TOKENS = 32
DTYPES = (torch.bfloat16, torch.float32)
Shapes = tuple[tuple[int, ...], ...]
Loads = list[tuple[int, int, bool]]  # as in vLLM: channels of all ranks, copies among these, whether all have them


class Model(SimpleNamespace):
    """shapes: vLLM's shapes of the states on a rank. loads: how vLLM's layer has its convolution's weights loaded."""

    kind: Kind
    shapes: Callable[[int], Shapes]
    loads: Callable[[int], Loads]


def mamba2(groups: int, heads: int = 8, head_dim: int = 6, size: int = 4, kernel: int = 4) -> Model:
    def loads(ranks: int) -> Loads:
        extra = Calculator.extra_groups_for_head_shards(groups, ranks)  # the next lines are those of MambaMixer2
        group = ((groups + extra) * size, extra * size, groups % ranks != 0)
        return [(heads * head_dim, 0, False), group, group]

    return Model(kind=Kind.MAMBA2, loads=loads, shapes=lambda ranks: Calculator.mamba2_state_shape(
        tp_world_size=ranks, intermediate_size=heads * head_dim, n_groups=groups, num_heads=heads, head_dim=head_dim,
        state_size=size, conv_kernel=kernel))


def delta_net(key_heads: int = 4, value_heads: int = 8, key_dim: int = 6, value_dim: int = 10) -> Model:
    keys, values = key_heads * key_dim, value_heads * value_dim
    return Model(kind=Kind.GDN_ATTN, loads=lambda _: [(keys, 0, False), (keys, 0, False), (values, 0, False)],
                 shapes=lambda ranks: Calculator.gated_delta_net_state_shape(
                     ranks, key_heads, value_heads, key_dim, value_dim, 4))


def short_conv(channels: int = 48) -> Model:
    return Model(kind=Kind.SHORT_CONV, loads=lambda _: [(channels, 0, False)],
                 shapes=lambda ranks: Calculator.short_conv_state_shape(ranks, channels, 3))


MODELS = {"Mamba-2": mamba2(4), "Mamba-2 of one group": mamba2(1), "gated delta net": delta_net(),
          "short convolution": short_conv()}


def spec(model: Model, ranks: int, **changes: Any) -> MambaSpec:
    shapes = model.shapes(ranks)
    content = sum(prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, DTYPES, strict=False))
    fields: dict[str, Any] = {"block_size": TOKENS, "shapes": shapes, "dtypes": DTYPES[:len(shapes)],
                              "mamba_type": model.kind, "mamba_cache_mode": "align",
                              "page_size_padded": content + (24 if ranks == 1 else 0)}
    return MambaSpec(**fields | changes)


def page_of(model: Model, ranks: int, rank: int) -> bytes:
    """Returns a rank's page, of which every element is the number that it has on all ranks together."""
    conv, *states = model.shapes(ranks)
    rows, width = reversed(conv) if mamba_utils.is_conv_state_dim_first() else conv
    loads = model.loads(ranks)
    names = torch.zeros(width, dtype=torch.int64)
    mamba_v2_sharded_weight_loader(loads, ranks, rank)(
        names, torch.arange(sum(whole - copies for whole, copies, _ in loads)))
    inputs = names + 1000 * torch.arange(rows).unsqueeze(1)
    found = (inputs.T if mamba_utils.is_conv_state_dim_first() else inputs).contiguous().to(torch.int16)
    page = found.numpy().tobytes()
    for shape in states:
        heads = torch.arange(rank * prod(shape), (rank + 1) * prod(shape), dtype=torch.int32)
        page += heads.numpy().tobytes()
    return page + b"\xff" * (24 if ranks == 1 else 0)


@pytest.fixture(params=["SD", "DS"])
def _layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mamba_utils, "is_conv_state_dim_first", lambda: request.param == "DS")


@pytest.mark.usefixtures("_layout")
@pytest.mark.parametrize("name", MODELS)
def test_all_sizes_have_the_same_elements_in_the_same_places(name: str) -> None:
    model, wholes = MODELS[name], {}
    for ranks in (1, 2, 4):
        parts: list[bytearray] = []
        for rank in range(ranks):
            page, start = page_of(model, ranks, rank), 0
            found = state_parts(spec(model, ranks), model.shapes(1), rank, ranks)
            parts = parts or [bytearray(b"\xee" * part.whole) for part in found]
            for whole, part in zip(parts, found, strict=True):
                bytes_ = page[start:start + part.bytes]
                if part.whole:
                    had = whole[part.first:part.first + part.bytes]
                    assert set(had) == {0xee} or had == bytes_  # ranks that have the same bytes have equal ones
                    whole[part.first:part.first + part.bytes] = bytes_
                start += part.bytes
            assert start == len(page)
            assert found[-1] == Part(0, 0, 24 if ranks == 1 else 0)
        wholes[ranks] = b"".join(parts)
    assert wholes[1] == page_of(model, 1, 0)[:-24]
    assert wholes[1] == wholes[2] == wholes[4]


def config(model: Model | None, ranks: int, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    """Returns those parts of a VllmConfig that are read here. vLLM tells the shapes of `model` for it."""
    def shapes(told: Any) -> Shapes:
        assert model is not None
        return model.shapes(told.parallel_config.tensor_parallel_size)

    made = SimpleNamespace() if model is None else SimpleNamespace(get_mamba_state_shape_from_config=shapes)
    monkeypatch.setattr(ModelRegistry, "resolve_model_cls", lambda *_, **__: (made, ""))
    model_config: dict[str, Any] = {
        "architecture": "Toy", "hf_text_config": SimpleNamespace(to_dict=dict), "is_attention_free": False,
        "get_total_num_kv_heads": lambda: 4}
    return SimpleNamespace(model_config=SimpleNamespace(**model_config | changes),
                           parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
                           device_config=SimpleNamespace(device_type="cpu"))


@pytest.mark.parametrize("name", MODELS)
def test_all_sizes_have_one_format(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for ranks in (1, 2, 4):
        node, specs = config(MODELS[name], ranks, monkeypatch), [spec(MODELS[name], ranks)]
        assert divided_shapes(specs, node) == MODELS[name].shapes(1)
        found.add(state_format(specs, node, divided_shapes(specs, node)))
    assert len(found) == 1
    assert "tensor_parallel" not in found.pop()


UNKNOWN: dict[str, tuple[Model, int, dict[str, Any]]] = {
    "keys of two heads on four ranks": (delta_net(key_heads=2, key_dim=6), 4, {}),
    "states that all ranks have": (mamba2(4), 2, {"tp_replicated": True}),
    "states of drafts": (mamba2(4), 2, {"num_speculative_blocks": 1}),
    "another kind": (mamba2(4), 2, {"mamba_type": Kind.LINEAR}),
    "three states": (mamba2(4), 2, {"shapes": (*mamba2(4).shapes(2), (1, 2)), "dtypes": (*DTYPES, torch.float32),
                                    "page_size_padded": None}),
    "other shapes than vLLM tells": (mamba2(4), 2, {"shapes": mamba2(4, heads=16).shapes(2), "page_size_padded": None}),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_states_that_are_divided_in_unknown_ways_need_equal_sizes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ranks, changes = UNKNOWN[name]
    node, specs = config(model, ranks, monkeypatch), [spec(model, ranks, **changes)]
    assert whole_shapes(specs, node) is None
    assert divided_shapes(specs, node) is None
    assert state_format(specs, node, None).endswith(f",tensor_parallel:{ranks} ")


def test_models_that_tell_no_shapes_need_equal_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert whole_shapes([spec(mamba2(4), 2)], config(None, 2, monkeypatch)) is None


def test_a_model_with_several_numbers_of_heads_needs_equal_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = SimpleNamespace(to_dict=lambda: {"num_key_value_heads": 4, "num_global_key_value_heads": 2})
    node = config(mamba2(4), 2, monkeypatch, hf_text_config=heads)
    assert divided_shapes([spec(mamba2(4), 2)], node) is None


def test_a_chunk_has_the_heads_of_attention_and_the_parts_of_states(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ranks, dim = MODELS["short convolution"], 2, 16
    page = 2 * 2 * TOKENS * dim * 4  # K and V of two heads
    layers = [(name, 0, (0, 0, 0, 0, 0), (0, 0, 0, 0, 0)) for name in ("a", "b", "c")]
    layout = CacheLayout(layers, 2, 2, dim, 4, 3, TOKENS)
    state = spec(model, ranks, page_size_padded=page)
    full = FullAttentionSpec(block_size=TOKENS, num_kv_heads=2, head_size=dim, dtype=torch.float32)
    specs = {"a": full, "b": state, "c": full}
    node = config(model, ranks, monkeypatch)
    assert chunk_parts(layout, specs, model.shapes(1), node, (5, 3, 2, 2), 1) == (
        5, [0, 1, 0], [[Part(2 * page, page, page)],
                       [Part(96, 48, 48), Part(96, 48, 48), Part(0, 0, page - 96)]])
    with pytest.raises(KvFerryError, match=f"layer b has {page + 8} bytes in a block, but .* should have {page}"):
        chunk_parts(layout, specs | {"b": spec(model, ranks, page_size_padded=page + 8)}, model.shapes(1), node,
                    (5, 3, 2, 2), 1)
    with pytest.raises(KvFerryError, match="which tensor parallel ranks divide otherwise"):
        chunk_parts(layout, specs | {"b": spec(short_conv(40), ranks, page_size_padded=page)}, model.shapes(1), node,
                    (5, 3, 2, 2), 1)


def test_a_worker_that_says_no_parts_is_refused_where_the_fingerprint_promises_them() -> None:
    for fingerprint, promises in (("state=0123abcd model=toy", True), ("model=toy", False),
                                  ("state=0123abcd,tensor_parallel:2 model=toy", False)):
        hellos = {(0, rank): WorkerHello(b"%d" % rank, has_parts=promises) for rank in (1, 0)}
        assert checked_payloads(hellos, fingerprint, "") == [b"0", b"1"]
        hellos[0, 1].has_parts = not promises
        with pytest.raises(KvFerryError, match="unlike shapes of the model's states"):
            checked_payloads(hellos, fingerprint, "")
