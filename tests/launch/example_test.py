"""Tests the installed C++ package from another project: find_package(kvferry), include, link, run."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from kvferry_launch.paths import RELEASE, REPO

EXAMPLE = REPO / "launch" / "examples" / "move_blocks"
BUILD = Path(os.environ.get("KVFERRY_BUILD", RELEASE))
"""The build that this test installs."""


def run(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Installs kvferry and returns the folder."""
    folder = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", BUILD, "--prefix", folder)
    return folder


def test_another_project_moves_blocks(prefix: Path, tmp_path: Path) -> None:
    assert len((EXAMPLE / "main.cpp").read_text().splitlines()) <= 60
    run("cmake", "-G", "Ninja", "-S", EXAMPLE, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}")
    assert str(REPO) not in (tmp_path / "build.ninja").read_text().replace(str(EXAMPLE), "")
    run("cmake", "--build", tmp_path)
    said = run(tmp_path / "move_blocks").splitlines()
    assert said[-1] == "every byte is right"
    assert sorted(said[:-1]) == ["the parent says: 2 blocks pushed", "the parent says: 4 blocks pulled"]


def test_every_installed_header_finds_what_it_includes(prefix: Path) -> None:
    root = prefix / "include"
    headers = list(root.rglob("*.h"))
    assert root / "kvferry" / "transport" / "transport.h" in headers
    assert {header.relative_to(root).parts[0] for header in headers} == {"kvferry"}
    assert root / "kvferry" / "transport" / "transfer_table.h" not in headers, "private headers stay private"
    for header in headers:
        for included in re.findall(r'^#include "([^"]+)"', header.read_text(), re.MULTILINE):
            assert (root / included).exists(), f"{header.relative_to(root)} includes {included}, which is not installed"


def test_the_installed_binary_runs(prefix: Path) -> None:
    assert run(prefix / "bin" / "kvferry", "--version").startswith("kvferry")
