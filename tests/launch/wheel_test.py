"""Tests the wheel: builds it from the checkout, installs it into an empty environment, and uses its parts there."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from kvferry_launch.paths import REPO


def run(*command: str) -> str:
    # Names the compiler c++, as CMake does by default, so that ccache finds the objects of the release build.
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False,
                          env={"CXX": "c++"} | os.environ)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_the_wheel_carries_module_and_binary(tmp_path: Path) -> None:
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path),
        str(REPO))
    (wheel,) = tmp_path.glob("kvferry-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "kvferry/vllm.py" in names
    assert any(name.startswith("kvferry/_core.") for name in names)
    assert "kvferry_launch/cluster/cli.py" in names
    needless = ("include/", "lib/", "kvferry_launch/setup/", "kvferry_launch/testbed/")
    assert not any(name.startswith(needless) for name in names), names

    run(sys.executable, "-m", "venv", str(tmp_path / "venv"))
    bin_folder = tmp_path / "venv" / "bin"
    run(str(bin_folder / "pip"), "install", "--no-deps", "--no-index", str(wheel))
    assert run(str(bin_folder / "kvferry"), "--version").strip().endswith("0.1.0")
    assert "controller" in run(str(bin_folder / "kvferry-launch"), "--help")
    started = run(str(bin_folder / "kvferry-launch"), "controller", "--dry-run")
    assert started.split()[0] == str(*tmp_path.glob("venv/lib/python3*/site-packages/kvferry/bin/kvferry"))
    program = "from kvferry._core import check_config; print(check_config('{}'))"
    settings = run(str(bin_folder / "python"), "-c", program)
    assert "'chunk_tokens': 256" in settings
