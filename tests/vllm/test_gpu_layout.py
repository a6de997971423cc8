"""Compares kvferry's description of K and V in a GPU's cache with the views that vLLM's own backends use."""

import itertools

import pytest
import torch
from kvferry._core import KvFerryError
from kvferry.gpu_layout import gpu_planes
from kvferry.handshake import StepPlan
from kvferry.layout import cache_layout
from kvferry.vllm import KvFerryConnector
from kvferry.worker_connector import WorkerConnector
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

LAYERS, BLOCKS, HEADS, TOKENS, DIM = 3, 5, 2, 4, 8


def layer_views(layout: KVCacheLayout, heads: int, content: int) -> list[torch.Tensor]:
    """Returns views [block, head, token, content] of all layers, in the memory order of the layout."""
    logical = (LAYERS, BLOCKS, heads, TOKENS, content)
    memory = torch.arange(torch.Size(logical).numel(), dtype=torch.float32)
    physical = memory.reshape([logical[axis] for axis in layout.stride_order])
    inverse = [layout.stride_order.index(axis) for axis in range(5)]
    return list(physical.permute(inverse).unbind(0))


def read(plane: tuple[int, ...], tensor: torch.Tensor, *index: int) -> float:
    """Returns the element at (block, head, token, dim), computed only from a plane's strides."""
    base, *strides = plane
    offset = base - tensor.untyped_storage().data_ptr() + sum(i * s for i, s in zip(index, strides, strict=True))
    assert offset % tensor.element_size() == 0
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return whole[offset // tensor.element_size()].item()


def spec(**changes: object) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32, **changes)


@pytest.mark.parametrize("layout", list(KVCacheLayout))
def test_k_and_v_side_by_side_as_flash_attention_splits_them(layout: KVCacheLayout) -> None:
    for tensor in layer_views(layout, HEADS, 2 * DIM):
        found = gpu_planes("layer", tensor, spec())
        assert (found.num_heads, found.head_dim) == (HEADS, DIM)
        views = tensor.transpose(1, 2).split(DIM, dim=-1)  # the order [block, token, head, dim] of flash_attn.py
        for plane, view in zip(found.planes, views, strict=True):
            for index in itertools.product(range(BLOCKS), range(HEADS), range(TOKENS), range(DIM)):
                block, head, token, dim = index
                assert read(plane, tensor, *index) == view[block, token, head, dim].item()


@pytest.mark.parametrize("layout", list(KVCacheLayout))
def test_heads_of_k_before_heads_of_v_as_flashinfer_splits_them(layout: KVCacheLayout) -> None:
    for tensor in layer_views(layout, 2 * HEADS, DIM):
        found = gpu_planes("layer", tensor, spec())
        assert (found.num_heads, found.head_dim) == (HEADS, DIM)
        for plane, view in zip(found.planes, tensor.split(HEADS, dim=1), strict=True):
            for index in itertools.product(range(BLOCKS), range(HEADS), range(TOKENS), range(DIM)):
                assert read(plane, tensor, *index) == view[index].item()


@pytest.mark.parametrize("layout", list(KVCacheLayout))
def test_a_latent_cache_has_one_plane(layout: KVCacheLayout) -> None:
    mla = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=DIM, dtype=torch.float32)
    for tensor in layer_views(layout, 1, DIM):
        found = gpu_planes("layer", tensor, mla)
        assert (len(found.planes), found.num_heads, found.head_dim) == (1, 1, DIM)
        for index in itertools.product(range(BLOCKS), range(1), range(TOKENS), range(DIM)):
            assert read(found.planes[0], tensor, *index) == tensor[index].item()


def test_a_kernels_blocks_may_be_smaller_than_the_block_managers() -> None:
    manager = FullAttentionSpec(block_size=2 * TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32)
    logical = (LAYERS, 2 * BLOCKS, HEADS, TOKENS, 2 * DIM)
    memory = torch.arange(torch.Size(logical).numel(), dtype=torch.float32)
    for tensor in memory.reshape(LAYERS, 2 * BLOCKS, TOKENS, HEADS, 2 * DIM).transpose(2, 3).unbind(0):
        found = gpu_planes("layer", tensor, manager)
        assert (found.num_heads, found.head_dim, found.split) == (HEADS, DIM, 2)
        for plane, view in zip(found.planes, tensor.split(DIM, dim=-1), strict=True):
            for index in itertools.product(range(BLOCKS), range(HEADS), range(2 * TOKENS), range(DIM)):
                block, head, token, dim = index
                expected = view[2 * block + token // TOKENS, head, token % TOKENS, dim].item()
                assert read(plane, tensor, *index) == expected


def test_a_kernels_smaller_blocks_whose_heads_lie_apart_are_refused() -> None:
    manager = FullAttentionSpec(block_size=2 * TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32)
    with pytest.raises(KvFerryError, match=r"layer has blocks of 4 tokens where vLLM's block manager has 8.*NHD"):
        gpu_planes("layer", torch.zeros(2 * BLOCKS, HEADS, TOKENS, 2 * DIM), manager)


class OnGpu(torch.Tensor):
    """A tensor in host memory that says it is on a GPU."""

    device = property(lambda _: torch.device("cuda:0"))


def unlike_layers() -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """Returns two layers with full attention and, between them, one with a window and half the elements in a head,
    whose blocks have twice the tokens and thus the same bytes.
    """
    window = SlidingWindowSpec(block_size=2 * TOKENS, num_kv_heads=HEADS, head_size=DIM // 2, dtype=torch.float32,
                               sliding_window=16)
    names = [["model.layers.0.attn", "model.layers.2.attn"], ["model.layers.1.attn"]]
    made = [KVCacheGroupSpec(names[0], spec()), KVCacheGroupSpec(names[1], window)]
    tensors = {name: torch.rand(BLOCKS, HEADS, one.kv_cache_spec.block_size, 2 * one.kv_cache_spec.head_size)
               for one in made for name in one.layer_names}  # fmt: skip
    return (KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=made),
            {name: tensor.as_subclass(OnGpu) for name, tensor in tensors.items()})  # fmt: skip


def test_layers_of_unlike_shapes_have_a_layout_for_each_run_of_like_ones() -> None:
    made, tensors = unlike_layers()
    layouts = cache_layout(tensors, made, None)
    assert [([name for name, *_ in one.layers], one.head_dim, one.block_tokens) for one in layouts] == [
        (["model.layers.0.attn"], DIM, TOKENS), (["model.layers.1.attn"], DIM // 2, 2 * TOKENS),
        (["model.layers.2.attn"], DIM, TOKENS)]
    for layout in layouts:
        (name, group, *planes), = layout.layers
        assert group == (layout.head_dim != DIM)
        views = tensors[name].split(layout.head_dim, dim=-1)
        for plane, view in zip(planes, views, strict=True):
            for index in itertools.product(range(BLOCKS), range(HEADS), range(layout.block_tokens),
                                           range(layout.head_dim)):
                assert read(plane, tensors[name], *index) == view[index].item()


def test_layers_of_unlike_shapes_beside_state_are_refused() -> None:
    made, tensors = unlike_layers()
    state = MambaSpec(block_size=TOKENS, shapes=((16,),), dtypes=(torch.float32,), mamba_cache_mode="align")
    made.kv_cache_groups.append(KVCacheGroupSpec(["model.layers.3.mamba"], state))
    tensors["model.layers.3.mamba"] = torch.zeros(BLOCKS, 1, 1, 64, dtype=torch.uint8).as_subclass(OnGpu)
    with pytest.raises(KvFerryError, match=r"differ in \(planes, heads, .*; beside layers with state this version"):
        cache_layout(tensors, made, None)


def test_sleep_waits_for_the_gpu_and_not_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    for device in ("cpu", "cuda:1"):
        connector = KvFerryConnector.__new__(KvFerryConnector)
        connector._worker = WorkerConnector.__new__(WorkerConnector)
        connector._worker._device = torch.device(device)
        connector.unregister_kv_caches()
    assert waited == [torch.device("cuda:1")]
    assert KvFerryConnector.supports_sleep_mode(None)


@pytest.mark.parametrize(("settings", "requires"), [
    ({}, False), ({"push_layers": 0}, False), ({"push_layers": 4}, True), ({"push_layers": 65}, False),
    ({"unknown_key": 1}, False)])
def test_cuda_graphs_are_piecewise_where_layers_are_pushed(settings: dict[str, int], requires: bool) -> None:
    assert KvFerryConnector.requires_piecewise_for_cudagraph(settings) is requires


class RecordingNode:
    """Stands for the C++ node, and records which layers it was asked to save."""

    def __init__(self, wants_layers: bool) -> None:
        self._wants_layers = wants_layers
        self.saved: list[int] = []

    def begin_step(self, plan: bytes, stream: int) -> None:
        pass

    def wants_layers(self) -> bool:
        return self._wants_layers

    def save_layer(self, layer: int, stream: int) -> None:
        assert stream == 0  # that of a CPU
        self.saved.append(layer)

    def save(self, stream: int) -> None:
        pass


@pytest.mark.parametrize("wants_layers", [False, True])
def test_layers_are_saved_in_steps_that_push_them_alone(wants_layers: bool) -> None:
    connector = WorkerConnector.__new__(WorkerConnector)
    node = RecordingNode(wants_layers)
    connector._node, connector._has_layer_hooks, connector._wants_layers = node, True, False
    connector._open_report, connector._device = None, torch.device("cpu")
    connector._layers = {"model.0": 0, "model.1": 1}
    connector.save_layer("model.0")  # before any step, as while CUDA graphs are captured
    connector.begin_step(StepPlan(b""))
    for name in ("model.0", "model.1", "draft.0"):
        connector.save_layer(name)
    connector.save()
    connector.save_layer("model.0")
    assert node.saved == ([0, 1] if wants_layers else [])


@pytest.mark.parametrize(
    "shape", [(BLOCKS, HEADS, TOKENS, 3 * DIM), (BLOCKS, HEADS, TOKENS + 1, 2 * DIM), (BLOCKS, 64)])
def test_what_lies_in_another_way_is_refused_by_name_and_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(KvFerryError, match=r"the KV tensor of layer model\.7 has shape \(5, "):
        gpu_planes("model.7", torch.zeros(shape), spec())
