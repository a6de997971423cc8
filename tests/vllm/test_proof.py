"""Tests the command of the proof: one short run, and its errors for wrong arguments. The whole proof takes 13 minutes.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from configurations import MAX_TOKENS
from kvferry_launch.paths import REPO
from kvferry_launch.testbed.prompts import PromptSet
from kvferry_launch.testbed.reference import Reference

PROOF = REPO / "tests" / "proof" / "run"
REQUESTS = 16


def ask_reference(reference: Reference) -> None:
    """Returns the plain server's answers to the prompts of the configuration that the short run uses, with the default
    seed.
    """
    reference.generations(PromptSet(seed=100, count=REQUESTS).prompts(), MAX_TOKENS)


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(PROOF), *flags], capture_output=True, text=True, timeout=600,
                          check=False)


@pytest.mark.parametrize(("configuration", "kills"), [
    ("one server alone", 0), *(pytest.param(name, 1, marks=pytest.mark.long) for name in (
        "one prefill killed", "state beside attention", "windows of two sizes",
        "latent attention"))])
def test_a_configuration_has_no_complaint(
        reference: Reference, tmp_path: Path, configuration: str, kills: int) -> None:
    del reference
    figures = tmp_path / "proof.json"

    done = run("--requests", str(REQUESTS), "--only", configuration, "--json", str(figures))

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith(" 0 complaints")
    (outcome,) = json.loads(figures.read_text())
    assert outcome["kills"] == kills
    assert outcome["right"] + outcome["aborted"] == outcome["requests"] == REQUESTS
    assert outcome["right"] > 0


def test_nonsense_is_one_sentence() -> None:
    nobody = run("--only", "no such thing")
    few = run("--requests", "1")

    assert nobody.returncode == few.returncode == 1
    assert nobody.stderr == "tests/proof/run: --only no such thing fits no configuration; --list names them\n"
    assert few.stderr.startswith("tests/proof/run: --requests is 1; allowed: at least 17")


def test_the_list_names_at_least_ten_configurations() -> None:
    assert len(run("--list").stdout.splitlines()) >= 10
