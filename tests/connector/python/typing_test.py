"""Tests the types of the package: the committed stub of the C++ module is the generated one, and mypy finds no errors.
"""

import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]
STUB = REPO / "connector" / "python" / "kvferry" / "_core.pyi"


def test_the_stub_is_the_generated_one(tmp_path: Path) -> None:
    pytest.importorskip("kvferry._core", reason="the Python module is not built")
    pytest.importorskip("nanobind")
    made = tmp_path / "_core.pyi"
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "kvferry._core", "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert STUB.read_text() == made.read_text(), f"the module has changed; run: {' '.join(command[1:-1])} {STUB}"


def test_mypy_finds_nothing() -> None:
    pytest.importorskip("mypy")
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
