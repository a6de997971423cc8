"""Runs models with each kind of KV that a CPU can serve in vLLM, with and without kvferry.

python model_kinds.py CONTROLLER [KIND ...] prints one JSON object for each kind. vLLM is imported once, because the
import takes longer than everything else. Each engine runs in a fork of this process; the engines of one kind run at the
same time. The weights are generated, not loaded.
"""

import json
import math
import os
import random
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CHUNK = 64
LENGTHS = (200, 65, 129, 31, 150)
MAX_TOKENS = 60
PLAIN, FERRIED, DECODED = "plain.json", "ferried.json", "decoded.json"  # files with the answers of the engines
SHAPE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu", "torch_dtype": "float32",
    "bos_token_id": 0, "eos_token_id": 511, "tie_word_embeddings": False}
QWEN3 = SHAPE | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 64}
GEMMA3N = SHAPE | {  # the last two layers use the KV of the first two layers
    "architectures": ["Gemma3nForCausalLM"], "model_type": "gemma3n_text", "num_key_value_heads": 2, "head_dim": 32,
    "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 512, "num_kv_shared_layers": 2,
    "altup_num_inputs": 2, "laurel_rank": 16, "sliding_window": 96, "intermediate_size": [256] * 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.0] * 4}

MAMBA2 = SHAPE | {
    "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "state_size": 16, "num_heads": 4, "head_dim": 64,
    "expand": 2, "n_groups": 2, "chunk_size": 16, "conv_kernel": 4}
del MAMBA2["num_attention_heads"]
GRANITE = SHAPE | {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "num_key_value_heads": 2,
    "num_local_experts": 0, "shared_intermediate_size": 256, "layer_types": ["mamba", "attention"] * 2,
    "mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 16, "mamba_chunk_size": 16,
    "position_embedding_type": "nope"}


@dataclass(frozen=True)
class Kind:
    config: dict[str, Any]
    flags: dict[str, Any] = field(default_factory=dict)
    is_pair: bool = False  # True: one engine hands its KV over to another engine


KINDS = {
    "fp8": Kind(QWEN3, {"kv_cache_dtype": "fp8"}),
    "bfloat16": Kind(QWEN3, {"dtype": "bfloat16"}),
    "shared": Kind(GEMMA3N),
    "n-gram": Kind(QWEN3, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4,
                                                  "prompt_lookup_min": 1, "prompt_lookup_max": 3}}, is_pair=True),
    # On CPUs, vLLM's Mamba-2 stops if a step computes several blocks of a prompt. With few blocks, vLLM must preempt.
    "mamba2": Kind(MAMBA2, {"enable_prefix_caching": True, "long_prefill_token_threshold": 32,
                            "num_gpu_blocks_override": 8}),
    "granite": Kind(GRANITE, {"long_prefill_token_threshold": 64, "num_gpu_blocks_override": 20}),
}


@dataclass
class Spoken:
    """The answer to one prompt: its tokens, the lead of each token over the second best in logprob, kvferry's report.
    """

    tokens: list[int]
    margins: list[float]
    kv_transfer_params: dict[str, Any] | None


def prompts() -> list[list[int]]:
    dice = random.Random(1)
    return [[dice.randrange(1, 500) for _ in range(length)] for length in LENGTHS]


def fill(tensor: Any, name: str = "") -> None:
    """Fills a weight with values so large that all attention changes the tokens. vLLM's own dummy weights are close to
    zero.
    """
    import torch

    # A (or the logarithm of -A) decides how fast a state decays; these values make it decay slowly
    if name in ("A", "A_log"):
        tensor.data.fill_(-0.01 if name == "A" else -4.0)
        return
    if tensor.dim() < 2:
        tensor.data.fill_(1.0)
        return
    fill.calls += 1  # type: ignore[attr-defined]
    dice = torch.Generator().manual_seed(fill.calls)  # type: ignore[attr-defined]
    tensor.data.copy_(torch.randn(tensor.shape, generator=dice) * (1.4 / math.sqrt(tensor.shape[-1])))


fill.calls = 0  # type: ignore[attr-defined]


def fill_all(loader: Any, model: Any, config: Any) -> None:
    del loader, config
    for layer in model.modules():
        for name, tensor in {**layer._parameters, **layer._buffers}.items():
            if tensor is not None and name not in layer._non_persistent_buffers_set:
                fill(tensor, name)


class Engine:
    def __init__(self, kind: Kind, folder: str, controller: str) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig
        from vllm.model_executor.model_loader import dummy_loader

        dummy_loader.DummyModelLoader.load_weights = fill_all
        transfer = KVTransferConfig(
            kv_connector="KvFerryConnector", kv_connector_module_path="kvferry.vllm", kv_role="kv_both",
            kv_load_failure_policy="recompute", kv_connector_extra_config={
                "controller": controller, "chunk_tokens": CHUNK, "pool_bytes": "64MiB"})
        self._llm = LLM(folder, **{
            "dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True, "block_size": 32,
            "max_model_len": 512, "load_format": "dummy", "logprobs_mode": "processed_logprobs",
            "kv_transfer_config": transfer if controller else None} | kind.flags)

    def say(self, max_tokens: int, params: list[dict[str, Any]] | None = None) -> list[Spoken]:
        """Answers all prompts, after it has emptied vLLM's own prefix cache."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        assert self._llm.reset_prefix_cache()
        sampling = [SamplingParams(
            temperature=0.0, frequency_penalty=1.5, max_tokens=max_tokens, ignore_eos=True, detokenize=False,
            logprobs=2, extra_args={"kv_transfer_params": one} if one else None)
            for one in params or [{}] * len(LENGTHS)]
        found = self._llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts()], sampling,
                                   use_tqdm=False)
        leads = [[sorted(-entry.logprob for entry in step.values())[:2] for step in one.outputs[0].logprobs]
                 for one in found]
        return [Spoken(list(one.outputs[0].token_ids), [second - first for first, second in lead],
                       one.kv_transfer_params) for one, lead in zip(found, leads, strict=True)]


def plain(kind: Kind, folder: str) -> dict[str, list[Spoken]]:
    return {"plain": Engine(kind, folder, "").say(MAX_TOKENS)}


def ferried(kind: Kind, folder: str, controller: str) -> dict[str, list[Spoken]]:
    """Computes the KV of the prompts; then loads whole chunks of this KV from kvferry; then, by a hand-over, loads the
    KV of all tokens except the last one.
    """
    engine, report = Engine(kind, folder, controller), {"kvferry_report": True}
    every = [report] * len(LENGTHS)
    found = {"computed": engine.say(MAX_TOKENS, every), "loaded": engine.say(MAX_TOKENS, every)}
    first = engine.say(1, [{"do_remote_decode": True}] * len(LENGTHS))
    params = [(one.kv_transfer_params or {}) | report for one in first]
    if not kind.is_pair:
        return found | {"handed over": engine.say(MAX_TOKENS, params)}
    # From here on this engine runs no more steps, like an engine in the middle of a long step.
    shared = Path(folder).parent
    (shared / "params.part").write_text(json.dumps(params))
    (shared / "params.part").rename(shared / "params.json")
    wait_for(shared / DECODED)
    return found


def decoded(kind: Kind, folder: str, controller: str) -> dict[str, list[Spoken]]:
    engine = Engine(kind, folder, controller)
    params = json.loads(wait_for(Path(folder).parent / "params.json").read_text())
    return {"handed over": engine.say(MAX_TOKENS, params)}


def wait_for(path: Path) -> Path:
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return path


def in_fork(core: int, path: Path, kind: Kind, folder: Path, controller: str) -> int:
    """Starts one engine, which writes its answers to `path`, and returns the process's id."""
    process = os.fork()
    if process:
        return process
    try:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(core)
        if path.name == PLAIN:
            found = plain(kind, str(folder))
        else:
            found = (ferried if path.name == FERRIED else decoded)(kind, str(folder), controller)
        path.write_text(json.dumps({name: [asdict(one) for one in spoken] for name, spoken in found.items()}))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)  # ends at once, because an orderly end would only take some seconds


def main() -> None:
    controller, names = sys.argv[1], sys.argv[2:] or list(KINDS)
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1",
                   "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM  # noqa: F401

    cores = sorted(os.sched_getaffinity(0))
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            engines = (PLAIN, FERRIED, DECODED) if KINDS[name].is_pair else (PLAIN, FERRIED)
            answers = [Path(folder) / which for which in engines]
            model = Path(folder) / "model"
            model.mkdir()
            (model / "config.json").write_text(json.dumps(KINDS[name].config))
            running = [in_fork(cores[index % len(cores)], path, KINDS[name], model, controller)
                       for index, path in enumerate(answers)]
            for process in running:
                os.waitpid(process, 0)
            printed: dict[str, Any] = {"kind": name}
            for path in answers:
                printed |= json.loads(path.read_text()) if path.exists() else {}
            print(json.dumps(printed), flush=True)


if __name__ == "__main__":
    main()
