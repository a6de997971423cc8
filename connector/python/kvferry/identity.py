"""The model's fingerprint, a readable text from which all chunk keys are derived and which nodes compare."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FORMAT_VERSION = 1
_SAMPLE_BYTES = 64 * 1024


def model_identity(model: str, revision: str | None) -> str:
    """Returns the same name for a model on every host that has the same files, in any folder.

    A local folder gets its base name and a digest of config.json and of each weight file's size, first and last 64 KiB:
    reading all weights would take minutes. A hub name is used unchanged, with its revision.
    """
    folder = Path(model)
    if not folder.is_dir():
        return f"{model}@{revision or 'main'}"
    digest = hashlib.sha256()
    config = folder / "config.json"
    if config.is_file():
        # Fields that tools rewrite in every copy are left out of the digest.
        fields = json.loads(config.read_text())
        fields.pop("transformers_version", None)
        fields.pop("_name_or_path", None)
        digest.update(json.dumps(fields, sort_keys=True).encode())
    weights = sorted(p for pattern in ("*.safetensors", "*.bin", "*.gguf") for p in folder.glob(pattern))
    for file in weights:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_SAMPLE_BYTES))
            stream.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(stream.read(_SAMPLE_BYTES))
    return f"{folder.name}#{digest.hexdigest()[:16]}"


def fingerprint(vllm_config: "VllmConfig", num_layers: int, chunk_tokens: int) -> str:
    """Returns model, KV dtype, layers, heads, head size, chunk size and format version.

    TP size, block size and vLLM's version are left out: nodes that differ in those share chunks.
    """
    model = vllm_config.model_config
    cache_dtype = vllm_config.cache_config.cache_dtype
    kv_dtype = str(model.dtype).removeprefix("torch.") if cache_dtype == "auto" else cache_dtype
    return (
        f"model={model_identity(model.model, model.revision)} kv_dtype={kv_dtype} layers={num_layers} "
        f"kv_heads={model.get_total_num_kv_heads()} head_dim={model.get_head_size()} "
        f"chunk_tokens={chunk_tokens} format={FORMAT_VERSION}"
    )
