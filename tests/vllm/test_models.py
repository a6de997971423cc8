"""Makes a part of the table of model families and features on real vLLM: its outcomes must be those of the document."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import markdown_table
import pytest
from kvferry_launch.node.vllm import KvConnector
from kvferry_launch.paths import LOGS, REPO
from processor import has_fp8_kernels

# a model with attention only, one whose layers share KV, one with state only, and hybrids with two kinds of state
FAMILIES = ("qwen3", "gemma3n", "mamba2", "granite-hybrid", "lfm2")
FEATURES = ("preemption", "bfloat16", "fp8-kv", "drafts-on-decode")
WHOLE_BLOCKS = ("whole-blocks", "whole-blocks-preempted")
DEADLINE_S = 500.0


@pytest.fixture(scope="module")
def outcomes(kvferry_connector: KvConnector) -> dict[str, dict[str, dict[str, Any]]]:
    del kvferry_connector
    # chunks of whole blocks are another path for each model, so one model is enough here
    return outcomes_of(FAMILIES, FEATURES, "models") | outcomes_of(("llama",), WHOLE_BLOCKS, "models-whole-blocks")


def outcomes_of(families: Sequence[str], features: Sequence[str], name: str) -> dict[str, dict[str, dict[str, Any]]]:
    words = [word for one in families for word in ("--only", one)]
    words += [word for one in features for word in ("--feature", one)]
    with (LOGS / "tests" / f"{name}.log").open("w") as log:
        said = subprocess.run([sys.executable, str(REPO / "tests" / "models" / "run"), "--json", *words],
                              stdout=subprocess.PIPE, stderr=log, text=True, timeout=DEADLINE_S, check=False)
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(said.stdout)
    return found


@pytest.mark.parametrize("family,feature", [
    *((family, feature) for feature in FEATURES for family in FAMILIES), *(("llama", one) for one in WHOLE_BLOCKS)])
def test_the_outcome_is_that_of_the_document(family: str, feature: str, outcomes: dict[str, Any]) -> None:
    if feature == "fp8-kv" and not has_fp8_kernels():
        pytest.skip("vLLM's fp8 KV cache needs AVX-512 or AMX")
    found, written = outcomes[family][feature], markdown_table.read(markdown_table.TABLE.read_text())[family][feature]
    assert found["outcome"] == written.outcome.value, f"{found['text']}; see {LOGS / 'models'}"
