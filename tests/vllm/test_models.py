"""Makes a part of the table of model families and features on real vLLM: its outcomes must be those of the document."""

import json
import subprocess
import sys
from typing import Any

import markdown_table
import pytest
import torch
from kvferry_launch.node.vllm import KvConnector
from kvferry_launch.paths import LOGS, REPO
from processor import has_fp8_kernels

# a model with attention only, one whose layers share KV, one with state only, and hybrids with two kinds of state
FAMILIES = ("qwen3", "gemma3n", "mamba2", "granite-hybrid", "lfm2")
FEATURES = ("preemption", "bfloat16", "fp8-kv", "drafts-on-decode")
DEADLINE_S = 500.0


@pytest.fixture(scope="module")
def outcomes(kvferry_connector: KvConnector) -> dict[str, dict[str, dict[str, Any]]]:
    del kvferry_connector
    words = [word for name in FAMILIES for word in ("--only", name)]
    words += [word for name in FEATURES for word in ("--feature", name)]
    with (LOGS / "tests" / "models.log").open("w") as log:
        said = subprocess.run([sys.executable, str(REPO / "tests" / "models" / "run"), "--json", *words],
                              stdout=subprocess.PIPE, stderr=log, text=True, timeout=DEADLINE_S, check=False)
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(said.stdout)
    return found


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_outcome_is_that_of_the_document(family: str, feature: str, outcomes: dict[str, Any]) -> None:
    if feature == "bfloat16" and torch.cpu._is_amx_tile_supported():
        pytest.skip("AMX kernels interleave K and V, which is refused")
    if feature == "fp8-kv" and not has_fp8_kernels():
        pytest.skip("vLLM's fp8 KV cache needs AVX-512 or AMX")
    found, written = outcomes[family][feature], markdown_table.read(markdown_table.TABLE.read_text())[family][feature]
    assert found["outcome"] == written.outcome.value, f"{found['text']}; see {LOGS / 'models'}"
