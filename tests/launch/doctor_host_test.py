"""Tests kvferry doctor on a sound host, on hosts that each have one fault, which the doctor must name, and on a live
deployment.
"""

import contextlib
import json
import re
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvferry_launch.paths import KVFERRY
from nodes_by_hand import FINGERPRINT, Node

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
    assert len(found["checks"]) == 11


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


def too_little_for(pool: str, name: str, text: str) -> Callable[[Path], dict[str, str]]:
    return lambda root: file(name, text)(root) | {"KVFERRY_POOL_BYTES": pool}


PROBLEMS = {
    "memory": (too_little_for("1GiB", "proc/meminfo", "MemAvailable: 524288 kB\n"),
               "does not fit into the 512 MiB of free memory of this host"),
    "container": (too_little_for("1GiB", "sys/fs/cgroup/pod/memory.max", "268435456\n"),
                  "255 MiB of free memory below this container's memory limit"),
    "pool": (variable("KVFERRY_POOL_BYTES", "64GiB"), "a pool of 65536 MiB does not fit"),
    "shared memory": (without_shared_memory, "there is no /dev/shm"),
    "descriptors": (limits("Max open files", "1024"), "a process may open 1024 files"),
    "locked memory": (limits("Max locked memory", "65536"), "so mlx5_0 can't register a pool of 1024 MiB"),
    "RDMA port": (file("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n"),
                  "port 1 of mlx5_0 is not active (1: DOWN)"),
    "UCX over TCP": (variable("UCX_TLS", "tcp,self,sm"),
                     "leaves out RDMA, so UCX can't use mlx5_0 of this host"),
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
    "UCX with TCP": (variable("UCX_TLS", "all"), "UCX_TLS=all lets UCX use TCP"),
    "UCX not without TCP": (variable("UCX_TLS", "^cuda_ipc"), "UCX_TLS=^cuda_ipc lets UCX use TCP"),
    "CMA": (file("proc/sys/kernel/yama/ptrace_scope", "1\n"), "path cma can't be used"),
    "leftovers": (file("dev/shm/psm_0123", "left"), "1 files in /dev/shm"),
}


@pytest.mark.parametrize("hint", HINTS)
def test_a_hint_is_told_and_is_no_failure(host: Path, hint: str) -> None:
    breaks, words = HINTS[hint]
    found = examine("--root", host, **breaks(host))
    assert [one["kind"] for one in found["findings"]] == ["hint"]
    assert words in found["findings"][0]["what"]


def test_the_kernel_makes_huge_pages_for_who_asks(host: Path) -> None:
    """Linux does since 6.1, unless the setting is `deny`."""
    put(host, "proc/sys/kernel/osrelease", "6.1.0-18-amd64\n")
    put(host, "sys/kernel/mm/transparent_hugepage/shmem_enabled", "always advise [never] deny\n")
    assert examine("--root", host)["findings"] == []
    put(host, "sys/kernel/mm/transparent_hugepage/shmem_enabled", "always advise never [deny]\n")
    assert [one["kind"] for one in examine("--root", host)["findings"]] == ["hint"]


def test_shared_memory_that_a_process_has_mapped_is_no_leftover(host: Path) -> None:
    put(host, "dev/shm/psm_0123", "in use")
    put(host, "proc/77/maps", "7f00-7f01 rw-s 00000000 00:1a 5 /dev/shm/psm_0123\n")
    assert examine("--root", host)["findings"] == []


@pytest.mark.parametrize(("options", "says"), [
    ([], 4096), (["--pool-bytes", "0"], 4096), (["--pool-bytes", "2GiB"], 2048)])
def test_the_pool_is_by_default_what_a_server_takes(host: Path, options: list[str], says: int) -> None:
    put(host, "proc/meminfo", f"MemAvailable: {64 << 20} kB\n")
    put(host, "sys/fs/cgroup/pod/memory.max", "max\n")
    limits("Max locked memory", "65536")(host)
    found = examine("--root", host, *options)["findings"]
    assert [f"a pool of {says} MiB" in one["what"] for one in found] == [True]
    put(host, "proc/meminfo", "MemAvailable: 524288 kB\n")
    assert "memory" not in [one["check"] for one in examine("--root", host)["findings"]], "half of it is taken"


def test_lines_for_people_say_what_to_do(host: Path) -> None:
    put(host, "proc/meminfo", "MemAvailable: 524288 kB\n")
    done = subprocess.run([KVFERRY, "doctor", "--root", host, "--pool-bytes", "1GiB"], capture_output=True, text=True,
                          env={}, check=False)
    assert done.returncode == 1
    assert done.stdout.startswith("PROBLEM  memory: a pool of 1024 MiB does not fit into the 512 MiB")
    assert "\n         To do: set a smaller pool_bytes" in done.stdout
    assert done.stdout.endswith("\n11 checks, 1 problems, 0 hints\n")


def with_gpus(root: Path, libraries: str = "libcuda.so.1", **namespaces: int) -> None:
    """Gives the host NVIDIA's driver. `namespaces`: numbers of the process's namespaces, if not those of the host."""
    put(root, "proc/driver/nvidia/version", "NVRM version: 0\n")
    put(root, "etc/ld.so.cache", f"\0libc.so.6\0{libraries}\0")
    (root / "proc/self/ns").mkdir()
    for name, number in ({"ipc": 4026531839, "pid": 4026531836} | namespaces).items():
        (root / "proc/self/ns" / name).symlink_to(f"{name}:[{number}]")


def test_a_host_with_gpus_in_order_has_no_finding(host: Path) -> None:
    with_gpus(host)
    assert examine("--root", host)["findings"] == []


def test_the_network_cards_of_each_gpu_are_told(host: Path) -> None:
    with_gpus(host)
    assert examine("--root", host)["gpus"] == []
    devices = host / "sys/devices"
    for root, gpu, card in (("15", "1b", "mlx5_0"), ("97", "9d", "mlx5_6")):
        for place, files in ((gpu, {"class": "0x030200", "vendor": "0x10de"}), (f"{int(gpu, 16) - 3:02x}", {})):
            folder = f"pci0000:{root}/0000:{root}:01.0/0000:{place}:00.0"
            for name, text in ({"numa_node": "1"} | files).items():
                put(devices, f"{folder}/{name}", text)
            (host / "sys/bus/pci/devices").mkdir(parents=True, exist_ok=True)
            (host / f"sys/bus/pci/devices/0000:{place}:00.0").symlink_to(devices / folder)
        put(host, f"sys/class/infiniband/{card}/ports/1/state", "4: ACTIVE\n")
        (host / f"sys/class/infiniband/{card}/device").symlink_to(devices / folder)
    near = "(behind one PCIe switch with the GPU)"
    assert examine("--root", host)["gpus"] == [f"GPU 0000:1b:00.0, NUMA node 1: mlx5_0:1 {near}",
                                               f"GPU 0000:9d:00.0, NUMA node 1: mlx5_6:1 {near}"]
    chosen, _ = examine("--root", host, UCX_NET_DEVICES="mlx5_0:1")["gpus"]
    assert chosen.endswith("; UCX_NET_DEVICES=mlx5_0:1 has priority")


def test_the_drivers_library_is_also_found_in_the_loaders_path(host: Path, tmp_path: Path) -> None:
    with_gpus(host, libraries="")
    missing = examine("--root", host)["findings"]
    assert [(one["check"], one["kind"]) for one in missing] == [("CUDA IPC", "problem")]
    assert "does not find libcuda.so.1" in missing[0]["what"]
    put(tmp_path, "lib/libcuda.so.1", "")
    assert examine("--root", host, LD_LIBRARY_PATH=f"/none::{tmp_path}/lib")["findings"] == []


@pytest.mark.parametrize(("namespaces", "words"), [
    ({"ipc": 4026532201}, "has its own IPC namespace"), ({"pid": 4026532202}, "has its own PID namespace"),
    ({"ipc": 4026532201, "pid": 4026532202}, "has its own IPC and PID namespace"),
])
def test_a_container_that_other_containers_gpus_are_hidden_from_is_named(host: Path, namespaces: dict[str, int],
                                                                       words: str) -> None:
    with_gpus(host, **namespaces)
    found, = examine("--root", host)["findings"]
    assert (found["check"], found["kind"]) == ("CUDA IPC", "hint")
    assert words in found["what"]
    assert "--ipc=host --pid=host" in found["advice"]


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
        nodes[0].load(0, time.time_ns() // 1_000_000)
        found = examine("--root", host, "--controller", controller)
        assert (len(nodes), found["findings"], len(found["checks"])) == (2, [], 23)


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


def test_a_refused_node_and_unlike_fingerprints_of_a_model_are_named(host: Path, listener: str) -> None:
    other = FINGERPRINT.replace("kv_dtype=float32", "kv_dtype=fp8")
    with deployment(host) as (controller, stream):
        nodes = [Node(stream, name, "kv_both", f"http://{listener}", fingerprint, f"tcp://{listener}", "", name_space)
                 for name, fingerprint, name_space in (("a", FINGERPRINT, "default"), ("b", other, "mine"),
                                                       ("c", other.replace("toy", "big"), "big"),
                                                       ("refused", other, "default"))]
        problem, hint = examine("--root", host, "--controller", controller)["findings"]
        assert len(nodes) == 4
    assert (problem["check"], problem["kind"]) == (hint["check"], hint["kind"].replace("hint", "problem"))
    assert re.match(r"the controller has refused 1 registrations; the last one, \d+ s ago: node 'refused' cannot join "
                    r"namespace 'default': kv_dtype .* is 'float32' here and 'fp8' there ", problem["what"])
    assert problem["what"].endswith("use the same model and KV settings, or another namespace")
    assert hint["what"] == ("namespaces default (here) and mine (there) serve the model toy and can't share KV: "
                            "kv_dtype (the KV cache's data type) is 'float32' here and 'fp8' there")


# ---- tests of the paths between a prefill node p and a decode node d ----
NO_ANSWER = "the other node did not answer in time: it is dead or frozen, or its port is not reached"


def pull(peer: str, path: str, last: int, limit: int, best: int) -> list[Any]:
    return [peer, path, False, 1_000_000, 0, 0, last, limit, best]


@contextlib.contextmanager
def pair(folder: Path, host_of_p: str = "one", host_of_d: str = "two") -> Iterator[tuple[str, Node, Node, str, str]]:
    """Yields the controller's endpoint, both nodes and their endpoints."""
    with deployment(folder) as (controller, stream), socket.create_server(("127.0.0.1", 0)) as of_p, \
            socket.create_server(("127.0.0.2", 0)) as of_d:
        at_p, at_d = (f"{one.getsockname()[0]}:{one.getsockname()[1]}" for one in (of_p, of_d))
        p = Node(stream, "p", "kv_producer", f"http://{at_p}", endpoint=f"tcp://{at_p}", version="", host=host_of_p)
        d = Node(stream, "d", "kv_consumer", f"http://{at_d}", endpoint=f"tcp://{at_d}", version="", host=host_of_d)
        yield controller, p, d, f"tcp://{at_p}", f"tcp://{at_d}"
        p.close()
        d.close()


@pytest.mark.parametrize(("host_of_d", "path", "best"), [
    ("one", "shm", 2), ("two", "shm", 2), ("two", "ucx", 8), ("two", "ucx/tcp", 5), ("two", "tcp", 10)])
def test_paths_in_order_have_no_finding_and_are_shown(host: Path, host_of_d: str, path: str, best: int) -> None:
    with pair(host, host_of_d=host_of_d) as (controller, p, d, at_p, at_d):
        d.report([pull(at_p, path, 1, 10, best)],
                 [[NO_ANSWER, at_p, 1000, "no_answer"], [NO_ANSWER, "tcp://127.0.0.1:1", 1000, "no_answer"]])
        p.report([[at_d, path, True, 500, 0, 0, 1, 10, 0]], [])  # a push waits for the model, so it is not judged
        found = examine("--root", host, "--controller", controller)
        assert found["findings"] == []
        assert found["paths"] == [
            {"from": "p", "to": "d", "by": by, "path": path, "last_gb_per_s": 1, "best_gb_per_s": best,
             "limit_gb_per_s": 10} for by, best in (("pull", best), ("push", 0))]
        text = subprocess.run([KVFERRY, "doctor", "--root", host, "--controller", controller], capture_output=True,
                              text=True, env={}, check=False).stdout
        table = (rf"FROM +TO +BY +PATH +GB/S LAST +GB/S BEST +LIMIT +SHARE *\n"
                 rf"p +d +pull +{path} +1.00 +{best}.00 +10.00 +{best * 10}% *\n"
                 rf"p +d +push +{path} +1.00 +- +10.00 +-")
        assert re.search(table, text)


HERE = socket.gethostname()
LOST = "the connection to the other node broke during the transfer: refused"
SLOW = ("d pulls from p over ucx slowly: the fastest of the last large pulls had 3.00 GB/s, 30 % of the path's limit "
        "(10.00 GB/s)")
# For each fault: the host of d (that of p is "one"), the paths and failures that p and d report, which name the other
# node by its letter, and the finding.
BROKEN_PATHS: dict[str, tuple[str, tuple[list[Any], list[Any]], tuple[list[Any], list[Any]], tuple[str, str, str]]] = {
    "slow": ("two", ([], []), ([pull("p", "ucx", 2, 10, 3)], []), ("path speeds", "hint", SLOW)),
    "TCP on one host": ("one", ([], []), ([pull("p", "tcp", 2, 2, 2)], []),
                        ("paths on one host", "hint", "d pulls from p over tcp, although both are on one host")),
    "UCX over TCP on one host": ("one", ([], []), ([pull("p", "ucx/tcp", 2, 2, 2)], []),
                                 ("paths on one host", "hint",
                                  "d pulls from p over ucx/tcp, although both are on one host")),
    "UCX over TCP": (HERE, ([], []), ([pull("p", "ucx/tcp", 2, 2, 2)], []),
                     ("UCX over TCP", "problem",
                      "d pulls from p by UCX over TCP, although this host has an active RDMA port")),
    "one direction": ("two", ([], [[NO_ANSWER, "d", 1000, "no_answer"]]), ([pull("p", "tcp", 2, 2, 2)], []),
                      ("links", "problem", f"p does not reach d, although that node reaches it: {NO_ANSWER}")),
    "no direction": ("two", ([], []), ([], [[LOST, "p", 1000, "link_lost"]] * 2),
                     ("links", "problem", f"d does not reach p: {LOST}")),
}


def test_only_the_cause_of_a_failure_tells_that_a_node_is_not_reached(host: Path) -> None:
    with pair(host) as (controller, p, d, at_p, at_d):
        p.report([], [[NO_ANSWER, at_d, 1000, "too_slow"], [NO_ANSWER, at_d, 1000]])  # an older release names no cause
        assert examine("--root", host, "--controller", controller)["findings"] == []
        d.report([], [["words of another release", at_p, 1000, "no_answer"]])
        found, = examine("--root", host, "--controller", controller)["findings"]
        assert found["what"] == "d does not reach p: words of another release"


@pytest.mark.parametrize("broken", BROKEN_PATHS)
def test_a_path_that_is_not_in_order_is_named(host: Path, broken: str) -> None:
    host_of_d, of_p, of_d, finding = BROKEN_PATHS[broken]
    with pair(host, host_of_d=host_of_d) as (controller, p, d, at_p, at_d):
        for node, lists in ((p, of_p), (d, of_d)):
            node.report(*([[{"p": at_p, "d": at_d}.get(value, value) for value in row] for row in rows]
                          for rows in lists))
        found, = examine("--root", host, "--controller", controller)["findings"]
        assert (found["check"], found["kind"], found["what"]) == finding
        assert found["advice"]
        if broken == "UCX over TCP":
            put(host, "sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n")
            found, = examine("--root", host, "--controller", controller)["findings"]
            assert found["check"] == "RDMA ports"


@contextlib.contextmanager
def with_wrong_clock(stream: str, folder: Path, ahead_ms: int) -> Iterator[str]:
    """Passes one question on to the controller and changes the clock in its status, which ends with the clock. Yields
    the endpoint for the question.
    """
    def relay() -> None:
        with server.accept()[0] as asker, socket.socket(socket.AF_UNIX) as controller:
            controller.connect(stream)
            controller.sendall(asker.recv(4096))
            answer = controller.recv(1 << 20)
            while len(answer) < 4 or len(answer) < 4 + struct.unpack("<I", answer[:4])[0]:
                answer += controller.recv(1 << 20)
            wall_ms = struct.unpack(">Q", answer[-8:])[0]
            asker.sendall(answer[:-8] + struct.pack(">Q", wall_ms + ahead_ms))
            asker.recv(1)

    path = folder / "relay"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        thread = threading.Thread(target=relay)
        thread.start()
        yield f"unix://{path}"
        thread.join()
    path.unlink()


def test_clocks_that_differ_by_more_than_a_second_are_named(host: Path, listener: str) -> None:
    with deployment(host) as (_, stream):
        node = Node(stream, "a", "kv_both", f"http://{listener}", endpoint=f"tcp://{listener}", version="")
        for ahead_ms, kind, words in ((800, None, ""), (-4000, "hint", "behind"), (4000, "hint", "ahead of"),
                                      (700_000, "problem", "ahead of")):
            node.load(0, time.time_ns() // 1_000_000)
            with with_wrong_clock(stream, host, ahead_ms) as endpoint:
                found = examine("--root", host, "--controller", endpoint)["findings"]
            assert [(one["check"], one["kind"]) for one in found] == ([("clocks", kind)] if kind else []), ahead_ms
            for one in found:
                assert re.fullmatch(f"the clock of the controller is [0-9.]+ s {words} that of this host", one["what"])
        for ahead_ms, kind in ((-5000, "hint"), (3000, "hint"), (700_000, "problem")):
            node.load(0, time.time_ns() // 1_000_000 + ahead_ms)
            found = examine("--root", host, "--controller", f"unix://{stream}")["findings"]
            assert [(one["check"], one["kind"]) for one in found] == [("clocks", kind)]
            assert "the clock of node a is" in found[0]["what"]
        node.close()


def test_a_controller_without_nodes_and_one_that_is_not_there_are_named(host: Path) -> None:
    with deployment(host) as (controller, _):
        assert [one["what"] for one in examine("--root", host, "--controller", controller)["findings"]] == [
            "no node is registered"]
    found = examine("--root", host, KVFERRY_CONTROLLER="tcp://127.0.0.1:1")["findings"]
    assert [one["check"] for one in found] == ["controller"]
