"""Tests that a family of tests/models gets as many layers as the proof asks for, whatever its configuration calls them.
"""

import json
from pathlib import Path

import pytest
from families import FAMILIES, LAYERS
from proof_models import _deepened

DEEP = 8 * LAYERS


@pytest.mark.parametrize("family", FAMILIES)
def test_all_that_has_an_entry_for_each_layer_is_deepened(family: str) -> None:
    toy = FAMILIES[family].config
    deep = _deepened(toy, DEEP)
    assert set(deep) == set(toy)
    text, of_toy = deep.get("text_config", deep), toy.get("text_config", toy)
    numbers = {name: text[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if name in text}
    assert numbers
    assert set(numbers.values()) == {DEEP}
    for name, value in of_toy.items():
        if (isinstance(value, list) or name.endswith("_pattern")) and len(value) == LAYERS:
            assert text[name] == value * 8, name
    assert _deepened(toy, LAYERS) == toy


@pytest.mark.parametrize("family", ["gpt2", "blip2", "llama", "granite-hybrid"])
def test_transformers_reads_so_many_layers(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(_deepened(FAMILIES[family].config, DEEP)))
    assert transformers.AutoConfig.from_pretrained(tmp_path).get_text_config().num_hidden_layers == DEEP
