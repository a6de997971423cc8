"""The proof's command: one short run with a kill, and what it says to nonsense. The whole of it takes half an hour."""

import json
import subprocess
import sys
from pathlib import Path

from kvferry_launch.paths import REPO

PROOF = REPO / "tests" / "proof" / "run"


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(PROOF), *flags], capture_output=True, text=True, timeout=600,
                          check=False)


def test_a_configuration_whose_prefill_server_is_killed_has_no_complaint(tmp_path: Path) -> None:
    figures = tmp_path / "proof.json"

    done = run("--requests", "16", "--only", "one prefill killed", "--json", str(figures))

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith(" 0 complaints")
    (outcome,) = json.loads(figures.read_text())
    assert outcome["kills"] == 1
    assert outcome["right"] + outcome["aborted"] == outcome["requests"] == 16
    assert outcome["right"] > 0


def test_nonsense_is_one_sentence() -> None:
    nobody = run("--only", "no such thing")
    few = run("--requests", "1")

    assert nobody.returncode == few.returncode == 1
    assert nobody.stderr == "tests/proof/run: --only no such thing fits no configuration; --list names them\n"
    assert few.stderr.startswith("tests/proof/run: --requests is 1; allowed: at least 13")


def test_the_list_names_at_least_ten_configurations() -> None:
    assert len(run("--list").stdout.splitlines()) >= 10
