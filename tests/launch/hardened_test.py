"""Tests the binaries of the release build: they are position-independent, their relocations are read-only from the
start, and their stack is not executable.
"""

import subprocess
from pathlib import Path

import pytest
from kvferry_launch.paths import KVFERRY, RELEASE

MODULES = sorted((RELEASE / "python" / "kvferry").glob("_core*.so"))


def readelf(option: str, binary: Path) -> str:
    return subprocess.run(["readelf", "-W", option, binary], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("binary", [KVFERRY, *MODULES], ids=lambda path: path.name)
def test_a_bug_of_the_memory_finds_no_writable_table_of_functions(binary: Path) -> None:
    segments, dynamic = readelf("-l", binary), readelf("-d", binary)
    assert "GNU_RELRO" in segments
    assert "NOW" in next(line for line in dynamic.splitlines() if "(FLAGS_1)" in line)
    stack = next(line for line in segments.splitlines() if "GNU_STACK" in line)
    assert "RWE" not in stack
    assert "DYN" in readelf("-h", binary)  # the type DYN means that the kernel loads the binary at a random address


def test_the_program_is_a_position_independent_executable() -> None:
    assert "PIE" in next(line for line in readelf("-d", KVFERRY).splitlines() if "(FLAGS_1)" in line)
