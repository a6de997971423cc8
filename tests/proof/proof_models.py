"""The models of the proof, and what their servers need: a toy model, or a family of tests/models."""

import hashlib
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import toy_weights
from engine import write_model
from families import FAMILIES, LAYERS
from kvferry_launch.paths import MODELS
from kvferry_launch.testbed import toy_model


@dataclass(frozen=True)
class Model:
    """A model's folder, and the flags and environment variables of each of its servers."""

    folder: Path
    flags: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)


def kept(name: str, num_layers: int = LAYERS) -> Model:
    """Returns a model, and makes its folder if it is missing. `num_layers`: of a family of tests/models, a multiple of
    its toy's.
    """
    if name not in FAMILIES:
        return Model(toy_model.kept(name))
    flags = list(toy_weights.FLAGS)
    for flag, value in FAMILIES[name].flags.items():
        if flag == "num_gpu_blocks_override":  # enough for the engines of tests/models
            continue
        flags += [f"--{flag.replace('_', '-')}", *([] if value is True else [str(value)])]
    return Model(_family_folder(name, num_layers), tuple(flags), toy_weights.ENVIRONMENT)


def _family_folder(name: str, num_layers: int) -> Path:
    """Returns build/models/family-NAME-LAYERS. Its configuration names the code that generates the weights, so that
    answers of a plain server that are kept are those of these weights.
    """
    made_by = hashlib.sha256(Path(toy_weights.__file__).read_bytes()).hexdigest()
    folder = MODELS / f"family-{name}-{num_layers}"
    shutil.rmtree(folder, ignore_errors=True)
    config = _deepened(FAMILIES[name].config, num_layers) | {"weights_made_by": made_by}
    return write_model(replace(FAMILIES[name], config=config), folder)


def _deepened(config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Returns the configuration with so many layers of the language model, whose kinds repeat those of the toy."""
    if "text_config" in config:
        return config | {"text_config": _deepened(config["text_config"], num_layers)}
    deeper = {name: value * (num_layers // LAYERS) if isinstance(value, list) and len(value) == LAYERS else value
              for name, value in config.items()}
    if "hybrid_override_pattern" in config:  # a string with a letter for each layer
        deeper["hybrid_override_pattern"] = config["hybrid_override_pattern"] * (num_layers // LAYERS)
    # "n_layer" is the name of GPT-2. With "first_k_dense_replace" no layer has experts, as in the toy.
    numbers = [name for name in ("num_hidden_layers", "n_layer", "first_k_dense_replace") if name in config]
    return deeper | dict.fromkeys(numbers, num_layers)
