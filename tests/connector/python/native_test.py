"""Tests hosts that lack a shared library of the native module: one sentence names the library and its Debian package.
"""

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from kvferry.native import package_of
from kvferry_launch.paths import REPO


def test_missing_libraries_are_named_with_their_packages(tmp_path: Path) -> None:
    package = tmp_path / "kvferry"
    package.mkdir()
    for name in ("__init__.py", "native.py", "tickets.py"):
        shutil.copy(REPO / "connector/python/kvferry" / name, package)
    gone = [tmp_path / "libabsent.so.7", tmp_path / "libcrypto.so.99"]
    for library in gone:
        subprocess.run(["cc", "-shared", "-x", "c", "/dev/null", f"-Wl,-soname,{library.name}", "-o", library],
                       check=True)
    module = package / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run(["cc", "-shared", "-Wl,--no-as-needed", *map(str, gone), "-o", module], check=True)
    for library in gone:
        library.unlink()

    done = subprocess.run([sys.executable, "-c", "import kvferry.tickets"], cwd=tmp_path, env={"PYTHONPATH": "."},
                          capture_output=True, text=True, check=False)

    assert done.stderr.splitlines()[-1] == (
        "ImportError: kvferry's native module can't be loaded, because this host has no libabsent.so.7, "
        "libcrypto.so.99; on Debian: apt-get install libabsent7 libssl99")
    assert done.stderr.count("Error: ") == 1


@pytest.mark.skipif(shutil.which("dpkg") is None, reason="the host has no Debian packages")
def test_the_packages_are_those_that_debian_has() -> None:
    core = pytest.importorskip("kvferry._core", reason="the Python module is not built")
    listed = subprocess.run(["readelf", "-d", core.__file__], capture_output=True, text=True, check=True).stdout
    needed = [name for name in re.findall(r"\(NEEDED\).*\[(.*)\]", listed) if not re.match(r"lib(c|m)\.so|ld-", name)]
    assert "libzmq.so.5" in needed
    for library in needed:
        owners = subprocess.run(["dpkg", "--search", f"*/{library}"], capture_output=True, text=True, check=True).stdout
        assert package_of(library) in {line.partition(":")[0] for line in owners.splitlines()}
