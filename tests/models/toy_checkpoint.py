"""Writes a model family's toy as a checkpoint, so that servers of unlike tensor parallel sizes have the same weights.

With --load-format dummy (toy_weights.py) each tensor parallel rank has weights of its own.
"""

import hashlib
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine import write_model
from families import FAMILIES


def make(family: str, folder: Path, **changes: Any) -> Path:
    """Makes the checkpoint, unless it is there and was made by this source from the same configuration. Its weights are
    so large that all of the state changes the tokens. changes: of the family's configuration.
    """
    toy = replace(FAMILIES[family], config=FAMILIES[family].config | changes)
    source = Path(__file__).read_bytes() + json.dumps(toy.config).encode()
    maker, kept = hashlib.sha256(source).hexdigest(), folder / ".kvferry-maker"
    if kept.exists() and kept.read_text() == maker:
        return folder
    scratch = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.parent.mkdir(parents=True, exist_ok=True)
    write_model(toy, scratch)
    _write_weights(scratch)
    (scratch / ".kvferry-maker").write_text(maker)
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)
    return folder


def _write_weights(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = (folder / "config.json").read_text()
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(folder)))
    dice = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("A_log"):
                tensor.fill_(-4.0)  # states decay slowly
            elif tensor.dim() < 2 and not name.endswith("bias"):
                tensor.fill_(1.0)
            else:
                scale = 0.1 if tensor.dim() < 2 else 1.4 / math.sqrt(tensor.shape[-1])
                if ".conv.conv." in name:  # the output of full weights would hide that of attention
                    scale *= 0.1
                tensor.copy_(torch.randn(tensor.shape, generator=dice) * scale)
    model.save_pretrained(str(folder))
    (folder / "config.json").write_text(json.dumps(json.loads(config), indent=2))
