"""Makes small models with seeded random weights, for tests of KV transfer on a host without a GPU.

Attention weights are large, so that every output token depends on the KV of the whole prompt, and a wrong block changes
the tokens. Set-up runs this module as a script in .venv.
"""

import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from kvferry_launch.paths import MODELS

VOCAB = 512
ATTENTION_STD = 0.6
# Standard deviation of the weights of queries and keys in a model that does not normalise queries and keys. With a
# larger deviation, each token would attend to only one other token.
UNNORMED_STD = 0.12
OTHER_STD = 0.05
EMBEDDING_STD = 1.0


@dataclass(frozen=True)
class Shape:
    """Sizes of one kind of toy model. `layers`, `kv_heads` and `head_size` determine the KV bytes per token."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    window: int = 0  # attention window of every other layer, in tokens; makes two KV cache groups; 0: none


KINDS = {
    "toy": Shape(layers=4, hidden=128, heads=4, kv_heads=2, head_size=32, intermediate=256),
    # As many elements of KV per token as an 8B model has (32 layers, 8 KV heads of 128), but less computation.
    "wide": Shape(layers=32, hidden=256, heads=8, kv_heads=8, head_size=128, intermediate=256),
    "windowed": Shape(layers=4, hidden=128, heads=4, kv_heads=2, head_size=32, intermediate=256, window=80),
}


def config(shape: Shape) -> dict[str, object]:
    """Returns the content of config.json: for a Qwen3 model, or for a Llama model if the shape has windows."""
    kind: dict[str, object] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    if shape.window:
        kind = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "sliding_window": shape.window,
            "layer_types": ["sliding_attention", "full_attention"] * (shape.layers // 2),
        }
    return kind | {
        "vocab_size": VOCAB,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": VOCAB - 1,
    }


def weights(shape: Shape, seed: int) -> dict[str, np.ndarray]:
    """Maps the name of each tensor in the model's checkpoint to the tensor, in float32. Equal seeds give equal tensors.
    """
    rng = np.random.default_rng(seed)

    def normal(rows: int, columns: int, std: float) -> np.ndarray:
        return (rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(std)).astype(np.float32)

    def ones(size: int) -> np.ndarray:
        return np.ones(size, dtype=np.float32)

    query_std = UNNORMED_STD if shape.window else ATTENTION_STD
    q_size, kv_size = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    tensors = {
        "model.embed_tokens.weight": normal(VOCAB, shape.hidden, EMBEDDING_STD),
        "lm_head.weight": normal(VOCAB, shape.hidden, OTHER_STD * 4),
        "model.norm.weight": ones(shape.hidden),
    }
    for layer in range(shape.layers):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.self_attn.q_proj.weight": normal(q_size, shape.hidden, query_std),
            f"{name}.self_attn.k_proj.weight": normal(kv_size, shape.hidden, query_std),
            f"{name}.self_attn.v_proj.weight": normal(kv_size, shape.hidden, ATTENTION_STD),
            f"{name}.self_attn.o_proj.weight": normal(shape.hidden, q_size, ATTENTION_STD),
            f"{name}.mlp.gate_proj.weight": normal(shape.intermediate, shape.hidden, OTHER_STD),
            f"{name}.mlp.up_proj.weight": normal(shape.intermediate, shape.hidden, OTHER_STD),
            f"{name}.mlp.down_proj.weight": normal(shape.hidden, shape.intermediate, OTHER_STD),
            f"{name}.input_layernorm.weight": ones(shape.hidden),
            f"{name}.post_attention_layernorm.weight": ones(shape.hidden),
        }
        if not shape.window:
            tensors |= {f"{name}.self_attn.{norm}_norm.weight": ones(shape.head_size) for norm in "qk"}
    return tensors


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer with the words "w0" ... "w511", so that text endpoints and routers work."""
    tokenizer = Tokenizer(WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "w0",
        "bos_token": "w0",
        "eos_token": f"w{VOCAB - 1}",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }))


def kept(kind: str) -> Path:
    """Returns the folder build/models/KIND. Makes the model there if it is missing."""
    folder = MODELS / kind
    return folder if (folder / "config.json").exists() else make(folder, kind)


def make(folder: Path, kind: str = "toy", seed: int = 0, maker: str = "") -> Path:
    """Writes a model to a temporary folder, which replaces `folder`. `maker`: hash of this source, which is stored with
    the model; set-up makes the model again if the source has another hash by then.
    """
    shape = KINDS[kind]
    scratch = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    (scratch / "config.json").write_text(json.dumps(config(shape), indent=2))
    (scratch / "generation_config.json").write_text(json.dumps({"eos_token_id": VOCAB - 1}))
    save_file(weights(shape, seed), str(scratch / "model.safetensors"), metadata={"format": "pt"})
    write_tokenizer(scratch)
    (scratch / ".kvferry-maker").write_text(maker)
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)
    return folder


def make_adapter(folder: Path, seed: int, layers: list[str], inputs: int, outputs: dict[str, int], rank: int) -> Path:
    """Writes a LoRA adapter whose weights are so large that the adapter changes tokens.

    `layers`: names of the modules that contain the linear layers which the adapter changes. `inputs`: number of inputs
    of each such linear layer. `outputs`: maps the name of each linear layer to its number of outputs.
    """
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in layers:
        for name, size in outputs.items():
            for part, shape in (("lora_A", (rank, inputs)), ("lora_B", (size, rank))):
                values = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.4)
                tensors[f"base_model.model.{layer}.{name}.{part}.weight"] = values
    folder.mkdir(exist_ok=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(outputs), "bias": "none"}))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a toy model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=sorted(KINDS), default="toy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--maker", default="", help="hash of this file, recorded for set-up's check")
    arguments = parser.parse_args()
    make(arguments.folder, arguments.kind, arguments.seed, arguments.maker)


if __name__ == "__main__":
    main()
