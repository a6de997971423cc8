"""Tests kvferry doctor on a sound host, on hosts that each have one fault, which the doctor must name, and on a live
deployment.
"""

import contextlib
import json
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvferry_launch.paths import KVFERRY
from nodes_by_hand import Node

SOUND = {
    "proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n",
    "proc/self/limits": "Limit                     Soft Limit           Hard Limit           Units     \n"
                        "Max open files            1024                 1048576              files     \n"
                        "Max locked memory         unlimited            unlimited            bytes     \n",
    "proc/self/cgroup": "0::/pod\n",
    "sys/fs/cgroup/pod/memory.max": "17179869184\n",
    "sys/fs/cgroup/pod/memory.current": "1048576\n",
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
    "sys/class/net/eth0/operstate": "up\n",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never deny force\n",
    "proc/sys/kernel/yama/ptrace_scope": "0\n",
    "dev/shm/other": "",
}


@pytest.fixture
def host(tmp_path: Path) -> Path:
    for name, text in SOUND.items():
        put(tmp_path, name, text)
    return tmp_path


def put(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def examine(*options: str | Path, **env: str) -> dict[str, Any]:
    """Returns the output of --json. Checks that the exit status agrees with it."""
    done = subprocess.run([KVFERRY, "doctor", "--json", *options], capture_output=True, text=True, timeout=60,
                          env={"PATH": "/usr/bin:/bin", **env}, check=False)
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (1 if found["problems"] else 0), done.stderr
    return found


def test_a_sound_host_has_no_finding(host: Path) -> None:
    found = examine("--root", host)
    assert found["findings"] == []
    assert len(found["checks"]) == 10


def limits(name: str, hard: str) -> Callable[[Path], dict[str, str]]:
    def apply(root: Path) -> dict[str, str]:
        text = re.sub(rf"({name} +\S+ +)\S+", rf"\g<1>{hard}", SOUND["proc/self/limits"])
        put(root, "proc/self/limits", text)
        return {}
    return apply


def file(name: str, text: str) -> Callable[[Path], dict[str, str]]:
    def apply(root: Path) -> dict[str, str]:
        put(root, name, text)
        return {}
    return apply


def variable(name: str, value: str) -> Callable[[Path], dict[str, str]]:
    return lambda root: {name: value}


def without_shared_memory(root: Path) -> dict[str, str]:
    (root / "dev/shm/other").unlink()
    (root / "dev/shm").rmdir()
    return {}


def readable_key(root: Path) -> dict[str, str]:
    put(root, "key", "k" * 64)
    (root / "key").chmod(0o644)
    return {"KVFERRY_CLUSTER_KEY_FILE": str(root / "key")}


PROBLEMS = {
    "memory": (file("proc/meminfo", "MemAvailable: 524288 kB\n"),
               "does not fit into the 512 MiB of free memory of this host"),
    "container": (file("sys/fs/cgroup/pod/memory.max", "268435456\n"),
                  "255 MiB of free memory below this container's memory limit"),
    "pool": (variable("KVFERRY_POOL_BYTES", "64GiB"), "a pool of 65536 MiB does not fit"),
    "shared memory": (without_shared_memory, "there is no /dev/shm"),
    "descriptors": (limits("Max open files", "1024"), "a process may open 1024 files"),
    "locked memory": (limits("Max locked memory", "65536"), "so mlx5_0 can't register a pool of 1024 MiB"),
    "RDMA port": (file("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n"),
                  "port 1 of mlx5_0 is not active (1: DOWN)"),
    "UCX over TCP": (variable("UCX_TLS", "tcp,self,sm"),
                     "leaves out RDMA, so UCX uses TCP although this host has mlx5_0"),
    "UCX device": (variable("UCX_NET_DEVICES", "mlx5_9:1"), "UCX_NET_DEVICES names mlx5_9"),
    "key file": (readable_key, "has mode 0644"),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_broken_host_is_named(host: Path, problem: str) -> None:
    breaks, words = PROBLEMS[problem]
    found = examine("--root", host, **breaks(host))
    assert [one["kind"] for one in found["findings"]] == ["problem"]
    assert words in found["findings"][0]["what"]
    assert found["findings"][0]["advice"]


HINTS = {
    "huge pages": (file("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always advise [never] deny\n"),
                   "pools have pages of 4 KiB"),
    "CMA": (file("proc/sys/kernel/yama/ptrace_scope", "1\n"), "path cma can't be used"),
    "leftovers": (file("dev/shm/psm_0123", "left"), "1 files in /dev/shm"),
}


@pytest.mark.parametrize("hint", HINTS)
def test_a_hint_is_told_and_is_no_failure(host: Path, hint: str) -> None:
    breaks, words = HINTS[hint]
    found = examine("--root", host, **breaks(host))
    assert [one["kind"] for one in found["findings"]] == ["hint"]
    assert words in found["findings"][0]["what"]


def test_shared_memory_that_a_process_has_mapped_is_no_leftover(host: Path) -> None:
    put(host, "dev/shm/psm_0123", "in use")
    put(host, "proc/77/maps", "7f00-7f01 rw-s 00000000 00:1a 5 /dev/shm/psm_0123\n")
    assert examine("--root", host)["findings"] == []


def test_lines_for_people_say_what_to_do(host: Path) -> None:
    put(host, "proc/meminfo", "MemAvailable: 524288 kB\n")
    done = subprocess.run([KVFERRY, "doctor", "--root", host], capture_output=True, text=True, env={}, check=False)
    assert done.returncode == 1
    assert done.stdout.startswith("PROBLEM  memory: a pool of 1024 MiB does not fit into the 512 MiB")
    assert "\n         To do: set a smaller pool_bytes" in done.stdout
    assert done.stdout.endswith("\n10 checks, 1 problems, 0 hints\n")


# ---- tests with a running deployment ----
@contextlib.contextmanager
def deployment(folder: Path, *options: str) -> Iterator[tuple[str, str]]:
    """Runs a controller. Yields its endpoint and the path of its stream."""
    stream = folder / "stream"
    with subprocess.Popen([KVFERRY, "controller", "--bind", "tcp://127.0.0.1:0", "--stream", f"unix://{stream}",
                           "--state", str(folder / "state"), *options],
                          stdout=subprocess.PIPE, text=True, env={}) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"listening on (\S+)", process.stdout.readline())
            assert found is not None
            yield found[1], str(stream)
        finally:
            process.terminate()


@pytest.fixture
def listener() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_deployment_in_order_has_no_finding(host: Path, listener: str) -> None:
    with deployment(host) as (controller, stream):
        nodes = [Node(stream, name, role, f"http://{listener}", endpoint=f"tcp://{listener}", version="")
                 for name, role in (("p", "kv_producer"), ("d", "kv_consumer"))]
        found = examine("--root", host, "--controller", controller)
        assert (len(nodes), found["findings"], len(found["checks"])) == (2, [], 16)


def test_a_deployment_that_cannot_work_is_named(host: Path) -> None:
    with deployment(host) as (controller, stream):
        node = Node(stream, "p", "kv_producer", "http://127.0.0.1:1", endpoint="tcp://127.0.0.1:1", version="0.0.9")
        found = examine("--root", host, "--controller", controller)["findings"]
        said = {one["check"]: one["what"] for one in found}
        node.close()
        assert said["roles"] == "namespace default has no node for decode"
        assert said["addresses"].startswith("node p can't be reached at tcp://127.0.0.1:1: ")
        assert said["servers"].startswith("the server of node p can't be reached at http://127.0.0.1:1: ")
        assert "0.0.9" in said["versions"]


def test_a_controller_without_nodes_and_one_that_is_not_there_are_named(host: Path) -> None:
    with deployment(host) as (controller, _):
        assert [one["what"] for one in examine("--root", host, "--controller", controller)["findings"]] == [
            "no node is registered"]
    found = examine("--root", host, KVFERRY_CONTROLLER="tcp://127.0.0.1:1")["findings"]
    assert [one["check"] for one in found] == ["controller"]
