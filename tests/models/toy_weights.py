"""Makes vLLM generate the weights of the models' toys (--load-format dummy), in this process or in servers."""

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvferry_launch.paths import MODELS

ASK = "KVFERRY_TOY_WEIGHTS"
ENVIRONMENT = {ASK: "1"}
FLAGS = ("--load-format", "dummy")


def generate_weights() -> None:
    """Replaces what --load-format dummy does in this process. Equal models get equal weights, if each is the first one
    of its process. Tensor parallel ranks get unlike weights, of replicated KV heads too, so that no two have equal KV.
    """
    from vllm.model_executor.model_loader import dummy_loader

    dummy_loader.DummyModelLoader.load_weights = _fill_all
    _flatten_heads()
    _compute_states_by_token()


def generate_weights_if_asked() -> None:
    """A plugin of vLLM, which calls it in each of its processes."""
    if os.environ.get(ASK):
        generate_weights()


def let_servers_generate() -> None:
    """Lets the servers that this process starts from now on call generate_weights(), if their environment has
    `ENVIRONMENT`.
    """
    folder = MODELS / "toy-weights"
    about = folder / "kvferry_toy_weights-1.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kvferry-toy-weights\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\ntoy_weights = {Path(__file__).stem}:generate_weights_if_asked\n")
    paths = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def _fill(tensor: Any, name: str = "") -> None:
    """Fills a weight with values so large that all attention changes the tokens. vLLM's own dummy weights are close to
    zero.
    """
    import torch

    # A (or the logarithm of -A) decides how fast a state decays; these values make it decay slowly
    if name in ("A", "A_log"):
        tensor.data.fill_(-0.01 if name == "A" else -4.0)
        return
    if not tensor.is_floating_point() or (tensor.dim() < 2 and "bias" not in name):
        tensor.data.fill_(1)
        return
    _fill.calls += 1  # type: ignore[attr-defined]
    dice = torch.Generator().manual_seed(_fill.calls)  # type: ignore[attr-defined]
    scale = 0.1 if tensor.dim() < 2 else 1.4 / math.sqrt(tensor.shape[-1])
    tensor.data.copy_(torch.randn(tensor.shape, generator=dice) * scale)


_fill.calls = 0  # type: ignore[attr-defined]


def _flatten_heads() -> None:
    """Gives Q and K to vLLM's rotary embedding for CPUs without a dimension for their heads. Where they have one, as in
    LFM2, its kernel reads beyond the positions, and answers change with what else is in the batch.
    """
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    kernel = RotaryEmbedding.forward_cpu

    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> tuple[Any, Any]:
        found = kernel(self, positions, query.flatten(1), None if key is None else key.flatten(1))
        return found[0].view_as(query), None if key is None else found[1].view_as(key)

    RotaryEmbedding.forward_cpu = forward_cpu


def _compute_states_by_token() -> None:
    """Computes the states of gated delta nets on CPUs token by token, with the kernel for decoding, in prompts too. The
    kernel for prompts rounds otherwise in bfloat16: vLLM, which computes the last tokens of a preempted request like a
    prompt, then gives other tokens than without the preemption, with kvferry and without it.
    """
    import torch
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    kernel = gdn_attention._cpu_gdn_attention_nonspec

    def by_token(layer: Any, step: Any, mixed_qkv: Any, b: Any, a: Any, out: Any) -> None:
        starts, slots = step.non_spec_query_start_loc, step.non_spec_state_indices_tensor
        for number in range(step.num_decodes + step.num_prefills):
            slot = slots[number:number + 1].contiguous()
            if number >= step.num_decodes and not step.has_initial_state[number]:
                for state in layer.kv_cache:
                    state[slot.long()] = 0
            one = SimpleNamespace(
                num_decodes=1, num_decode_tokens=1, num_prefills=0, num_prefill_tokens=0, spec_sequence_masks=None,
                num_accepted_tokens=None, non_spec_state_indices_tensor=slot,
                non_spec_query_start_loc=torch.tensor([0, 1], dtype=starts.dtype))
            for token in range(int(starts[number]), int(starts[number + 1])):
                kernel(layer, one, *(tensor[token:token + 1] for tensor in (mixed_qkv, b, a, out)))

    gdn_attention._cpu_gdn_attention_nonspec = by_token


def _fill_all(loader: Any, model: Any, config: Any) -> None:
    from vllm.distributed import get_tensor_model_parallel_rank

    del loader, config
    _fill.calls += 1_000_000 * get_tensor_model_parallel_rank()  # type: ignore[attr-defined]
    for layer in model.modules():
        for name, tensor in {**layer._parameters, **layer._buffers}.items():
            if tensor is not None and name not in layer._non_persistent_buffers_set:
                _fill(tensor, name)
    for layer in model.modules():
        if type(layer).__name__ == "ShortConv":  # the output of full weights would hide that of attention
            layer.conv.weight.data *= 0.1
