"""Tests each kind of KV that vLLM serves on a CPU: tokens from loaded KV are the same as from vLLM without a connector.

kvferry's report says what was loaded, so KV that vLLM computed again can't be taken for loaded KV.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kvferry_launch.node.vllm import KvConnector
from kvferry_launch.paths import LOGS
from kvferry_launch.testbed.answers import Generation, Report, first_mismatch
from kvferry_launch.testbed.servers import Controller

PROGRAM = Path(__file__).with_name("model_kinds.py")
CHUNK = 64
LENGTHS = (200, 65, 129, 31, 150)
STATE = {"mamba2": 32, "granite": 64}  # tokens in a block; a state is kept at the end of each block
ALL = ("fp8", "bfloat16", "shared", "n-gram", *STATE)


@pytest.fixture(scope="module")
def answers(kvferry_connector: KvConnector) -> Iterator[dict[str, dict[str, Any]]]:
    """Yields the output of the program model_kinds.py, by kind."""
    del kvferry_connector
    controller = Controller("model-kinds-controller", log_folder=LOGS / "tests")
    controller.start()
    try:
        controller.wait_ready()
        with (LOGS / "tests" / "model-kinds.log").open("w") as log:
            found = subprocess.run([sys.executable, str(PROGRAM), controller.address], stdout=subprocess.PIPE,
                                   stderr=log, text=True, timeout=300, check=True)
    finally:
        controller.stop()
    printed = [json.loads(line) for line in found.stdout.splitlines() if line.startswith('{"kind"')]
    yield {one["kind"]: one for one in printed}


@pytest.mark.parametrize("kind", ALL)
def test_loaded_kv_gives_the_plain_engines_tokens(kind: str, answers: dict[str, dict[str, Any]]) -> None:
    if kind == "bfloat16" and torch.cpu._is_amx_tile_supported():
        pytest.skip("AMX kernels interleave K and V, which is refused")
    found = {name: [Generation(**one) for one in spoken] for name, spoken in answers[kind].items() if name != "kind"}
    assert set(found) == {"plain", "computed", "loaded", "handed over"}, f"see {LOGS / 'tests' / 'model-kinds.log'}"
    chunk = STATE.get(kind, CHUNK)
    whole = [(length - 1) // chunk * chunk for length in LENGTHS]
    expected = {"computed": [0] * len(LENGTHS), "loaded": whole,
                "handed over": whole if kind in STATE else [length - 1 for length in LENGTHS]}
    resumed = []
    for name, loaded in expected.items():
        reports = [report for report in map(Report.of, found[name]) if report is not None]
        assert [report.admissions[0].loaded for report in reports] == loaded, name
        resumed += [one.loaded for report in reports for one in report.admissions if one.resumed]
    if kind in STATE:
        assert any(resumed), "nobody was preempted and got KV back"
    wrong = {name: [str(one) for one in map(first_mismatch, found["plain"], found[name]) if one]
             for name in expected}
    assert not any(wrong.values()), wrong
