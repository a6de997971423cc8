"""Tests that UCX is loaded at run time: no binary links it, it is found beside the module or by its variable, and a
host without it, or without RDMA, is told what is missing.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kvferry_launch.paths import KVFERRY, RELEASE

PACKAGE = RELEASE / "python" / "kvferry"
PROGRAM = """
import sys
from pathlib import Path
from kvferry.transport import Transport
with Transport(path=sys.argv[1]) as transport:
    print(transport.describe())
print(*{line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libucp.so" in line})
"""


def run(path: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "UCX_TLS"}
    return subprocess.run([sys.executable, "-c", PROGRAM, path], env=environment | variables, capture_output=True,
                          text=True, check=False, timeout=60)


def loaded(**variables: str) -> Path:
    """Returns the path of the UCX that a process loads."""
    done = run("ucx", UCX_TLS="all", **variables)  # it may use TCP, since this host may have no RDMA
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("binary", [KVFERRY, *PACKAGE.glob("_core*.so")], ids=lambda path: path.name)
def test_nothing_links_ucx(binary: Path) -> None:
    needed = subprocess.run(["readelf", "-d", binary], capture_output=True, text=True, check=True).stdout
    assert "libzmq.so" in needed
    assert "libuc" not in needed


def test_a_host_without_ucx_is_told_what_to_install_and_uses_other_paths() -> None:
    done = run("ucx", KVFERRY_UCX_LIBRARY="/nowhere/libucp.so.0")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    for part in ("UCX can't be used: /nowhere/libucp.so.0: cannot open", "pip install libucx-cu13", "Debian: libucx0",
                 "KVFERRY_UCX_LIBRARY"):
        assert part in last
    done = run("auto", KVFERRY_UCX_LIBRARY="/nowhere/libucp.so.0", UCX_TLS="tcp")  # UCX_TLS asks for UCX
    assert done.returncode == 0, done.stderr
    assert "TCP" in done.stdout
    assert "backend ucx is not used" in done.stdout + done.stderr


@pytest.mark.skipif(any(Path("/sys/class/infiniband").glob("*")), reason="this host has RDMA")
def test_a_host_without_rdma_is_told_what_lets_ucx_use_tcp_and_uses_other_paths() -> None:
    done = run("ucx")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    for part in ("no RDMA device", "UCX_TLS=all", "with the risk that a peer ends this process", "paths auto and tcp"):
        assert part in last
    assert done.stderr.count("RDMA device") == 1, "it is said once, by the exception"
    done = run("auto")
    assert done.returncode == 0, done.stderr
    assert "TCP" in done.stdout
    assert "ucx" not in (done.stdout + done.stderr).lower(), "nobody has asked for UCX"


def test_a_library_that_is_not_ucx_is_refused() -> None:
    assert "the UCX library has no function ucp_" in run("ucx", KVFERRY_UCX_LIBRARY="libc.so.6").stderr


def test_the_package_beside_the_module_comes_before_the_systems(tmp_path: Path) -> None:
    system = loaded()
    shutil.copytree(PACKAGE, tmp_path / "kvferry")
    beside = tmp_path / "libucx" / "lib"
    beside.mkdir(parents=True)
    for part in ("ucm", "ucs", "uct", "ucp"):
        shutil.copy(system.with_name(f"lib{part}.so.0").resolve(), beside / f"lib{part}.so.0")
    assert loaded(PYTHONPATH=str(tmp_path)) == beside / "libucp.so.0"
    assert loaded(PYTHONPATH=str(tmp_path), KVFERRY_UCX_LIBRARY=str(system)) == system
