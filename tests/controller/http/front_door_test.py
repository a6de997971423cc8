"""Tests the controller's HTTP paths for routers, /nodes and /pair. The nodes in these tests speak the controller's
protocol without kvferry's client.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nodes_by_hand import CHUNK, FINGERPRINT, Node

KVFERRY = Path(__file__).resolve().parents[3] / "build" / "release" / "bin" / "kvferry"
JSON = {"Content-Type": "application/json"}


def keys_of(tokens: list[int], extras: str = "") -> list[bytes]:
    """Computes the keys as transport/base/chunk_key.h defines them."""
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    parent = hashlib.sha256(b"\x01" + text(FINGERPRINT) + text(extras)).digest()[:16]
    keys = []
    for first in range(0, len(tokens) - CHUNK + 1, CHUNK):
        words = struct.pack(f"<{CHUNK}i", *tokens[first : first + CHUNK])
        parent = hashlib.sha256(b"\x02" + parent + text("") + words).digest()[:16]
        keys.append(parent)
    return keys


class Cluster:
    def __init__(self, address: str, path: str) -> None:
        self.address, self.path = address, path
        self.nodes: dict[str, Node] = {}

    def join(self, name: str, role: str, serves: str | None = "http://x:1", **more: str) -> Node:
        self.nodes[name] = Node(self.path, name, role, serves, **more)
        return self.nodes[name]

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://{self.address}{path}", timeout=10) as answer:
            return json.load(answer)

    def pair(self, **body: Any) -> tuple[int, Any]:
        request = urllib.request.Request(f"http://{self.address}/pair", data=json.dumps(body).encode(), headers=JSON)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as refusal:
            return refusal.code, json.load(refusal)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    path = tmp_path / "socket"
    command = [KVFERRY, "controller", "--bind", "tcp://127.0.0.1:0", "--http", "127.0.0.1:0", "--stream",
               f"unix://{path}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = None
        while found is None:
            line = process.stderr.readline()
            assert line, "the controller ended"
            found = re.search(r"HTTP on (\S+)", line)
        made = Cluster(found[1], str(path))
        try:
            yield made
        finally:
            for node in made.nodes.values():
                node.close()
            process.terminate()


PROMPT = list(range(100, 100 + 4 * CHUNK + 8))


def test_nodes_are_told_with_all_that_a_front_door_needs(cluster: Cluster) -> None:
    cluster.join("p", "kv_producer", "http://p:8100").load(3)
    cluster.join("old", "kv_consumer", None)
    answer = cluster.get("/nodes")
    assert 0 <= answer["uptime_ms"] <= cluster.get("/status")["uptime_ms"]
    told = {node["engine_id"]: node for node in answer["nodes"]}
    expected = {"namespace": "default", "engine_id": "p", "role": "kv_producer", "serves": "http://p:8100",
                "endpoint": "tcp://p:1", "draining": False, "load": 3, "chunks": 0, "fingerprint": FINGERPRINT,
                "version": "7.7.7", "host": "", "member": ""}
    assert expected.items() <= told["p"].items()
    assert (told["old"]["serves"], told["old"]["version"], told["old"]["load"]) == ("", "", 0)
    with urllib.request.urlopen(f"http://{cluster.address}/metrics", timeout=10) as page:
        metrics = page.read().decode()
    assert re.search(r'^kvferry_controller_node_load\{.*node="p".*\} 3$', metrics, re.MULTILINE)
    for name, role, version in (("p", "kv_producer", "7.7.7"), ("old", "kv_consumer", "")):
        labels = f'namespace="default",node="{name}",role="{role}",version="{version}"'
        assert f"\nkvferry_controller_node_info{{{labels}}} 1\n" in metrics
    assert {node["engine_id"]: node["serves"] for node in cluster.get("/status")["nodes"]} == {
        "p": "http://p:8100", "old": ""}


def test_metrics_have_what_moved_between_each_pair(cluster: Cluster) -> None:
    p, d = cluster.join("p", "kv_producer"), cluster.join("d", "kv_consumer")
    cluster.join("silent", "kv_both")
    p.report([["tcp://d:1", "shm", True, 500, 2, 0, 1, 10, 0]], [])
    # A node that reports a peer twice must not make two samples of one name: Prometheus would drop all of them.
    d.report([["tcp://p:1", "shm", False, 600, 0, 0, 1, 10, 0], ["tcp://p:1", "tcp", False, 100, 0, 0, 1, 10, 0],
              ["tcp://gone:\"1", "tcp", False, 9, 3, 0, 1, 10, 0]], [])
    with urllib.request.urlopen(f"http://{cluster.address}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    told = {line.partition("_transfer_")[2].rpartition(" ")[0]: line.rpartition(" ")[2] for line in lines
            if line.startswith("kvferry_controller_transfer_")}
    pairs = {'node="p",peer="d",direction="push"': ("500", "2"), 'node="d",peer="p",direction="pull"': ("700", "0"),
             'node="d",peer="tcp://gone:\\"1",direction="pull"': ("9", "3")}
    assert told == {f'{name}{{namespace="default",{pair}}}': value for pair, values in pairs.items()
                    for name, value in zip(("bytes_total", "failed_chunks_total"), values, strict=True)}


def test_the_last_node_of_a_kind_is_drained_only_with_force(cluster: Cluster) -> None:
    def drain(name: str, *flags: str) -> tuple[int, str]:
        done = subprocess.run([KVFERRY, "drain", name, "--no-wait", "--controller", f"unix://{cluster.path}", *flags],
                              capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    for name, role in (("p", "kv_producer"), ("d", "kv_consumer"), ("both", "kv_both")):
        cluster.join(name, role)
    assert drain("d") == (0, "")
    refused = ("is the last node for decode in namespace 'default'; start another node first, or drain this node with "
               "--force")
    assert drain("both") == (1, f"kvferry: node 'both' {refused}\n")
    assert drain("d", "--undo") == (0, "")
    assert drain("both") == (0, "")
    assert drain("p") == (1, f"kvferry: node 'p' {refused.replace('decode', 'prefill')}\n")
    assert drain("p", "--force") == (0, "")
    assert "has no node 'x'" in drain("x")[1]


def test_a_pair_is_who_holds_the_prompt_and_is_not_too_busy(cluster: Cluster) -> None:
    for name, role in (("p0", "kv_producer"), ("p1", "kv_producer"), ("d0", "kv_consumer"), ("d1", "kv_consumer")):
        cluster.join(name, role)
    cluster.nodes["p1"].holds(keys_of(PROMPT)[:3])
    cluster.nodes["d1"].holds(keys_of(PROMPT, "salt=s"))

    def tell_loads() -> None:  # Sends new loads. From then on, earlier choices are no longer added to the loads.
        for name, node in cluster.nodes.items():
            node.load(7 if name == "d0" else 0)

    tell_loads()
    status, pair = cluster.pair(token_ids=PROMPT)
    assert status == 200, pair
    assert pair == {"prefill": {"engine_id": "p1", "serves": "http://x:1", "endpoint": "tcp://p1:1",
                                "cached_tokens": 3 * CHUNK, "load": 0},
                    "decode": {"engine_id": "d1", "serves": "http://x:1", "endpoint": "tcp://d1:1",
                               "cached_tokens": 0, "load": 0},
                    "skip_prefill": False}
    salted = cluster.pair(token_ids=PROMPT, cache_salt="s")[1]
    assert (salted["decode"]["cached_tokens"], salted["skip_prefill"]) == (4 * CHUNK, True)
    tell_loads()
    by_keys = cluster.pair(keys=[key.hex() for key in keys_of(PROMPT)], namespace="default")[1]
    assert by_keys["prefill"]["cached_tokens"] == 3 * CHUNK
    assert cluster.pair(token_ids=PROMPT, exclude=["p1"])[1]["prefill"]["engine_id"] == "p0"
    tell_loads()
    assert cluster.pair(token_ids=[], loads={"p0": 5})[1]["prefill"]["engine_id"] == "p1"


def test_a_pair_is_found_by_the_weights_epochs_that_nodes_report(cluster: Cluster) -> None:
    for name, role in (("p0", "kv_producer"), ("p1", "kv_producer"), ("d0", "kv_consumer"), ("d1", "kv_consumer")):
        cluster.join(name, role)
    cluster.nodes["p1"].holds(keys_of(PROMPT, "epoch=2@blue")[:3])
    cluster.nodes["d1"].holds(keys_of(PROMPT, "epoch=1;salt=s"))
    assert cluster.pair(token_ids=PROMPT)[1]["prefill"]["cached_tokens"] == 0  # no node has reported an epoch yet
    for name, epoch in (("p0", ""), ("p1", "2@blue"), ("d1", "1")):
        cluster.nodes[name].report([], [], epoch)
    pair = cluster.pair(token_ids=PROMPT)[1]
    assert (pair["prefill"]["engine_id"], pair["prefill"]["cached_tokens"]) == ("p1", 3 * CHUNK)
    salted = cluster.pair(token_ids=PROMPT, cache_salt="s")[1]
    assert (salted["decode"]["engine_id"], salted["decode"]["cached_tokens"]) == ("d1", 4 * CHUNK)
    reports = {node["engine_id"]: node["report"] for node in cluster.get("/status")["nodes"]}
    assert reports["p1"]["weights_epoch"] == "2@blue"


def test_who_is_missing_is_told(cluster: Cluster) -> None:
    status, answer = cluster.pair(token_ids=PROMPT)
    assert status == 503
    no_prefill = "no prefill node (kv_producer or kv_both) of namespace 'default' accepts requests"
    assert answer["error"].startswith(no_prefill)
    cluster.join("p", "kv_producer")
    assert "no decode node" in cluster.pair(token_ids=PROMPT)[1]["error"]
    cluster.join("d", "kv_consumer", None)
    assert "1 without the setting 'serves'" in cluster.pair(token_ids=PROMPT)[1]["error"]
    assert "namespace 'x'" in cluster.pair(token_ids=PROMPT, namespace="x")[1]["error"]


@pytest.mark.parametrize(("body", "word"), [
    ({}, "token_ids is missing"),
    ({"token_ids": [-1]}, "token_ids[0] is -1"),
    ({"keys": "x"}, "keys is \"x\""),
    ({"keys": ["zz"]}, "keys[0] is"),
    ({"token_ids": [], "exclude": "d0"}, "exclude is"),
    ({"token_ids": [], "loads": {"d0": -1}}, "loads is"),
    ({"token_ids": [], "namespace": 7}, "namespace is 7"),
])
def test_nonsense_is_named(cluster: Cluster, body: dict[str, Any], word: str) -> None:
    status, answer = cluster.pair(**body)
    assert status == 400
    assert word in answer["error"]


def test_another_model_is_refused_with_the_field_and_both_values(cluster: Cluster) -> None:
    cluster.join("a", "kv_both")
    other = cluster.join("b", "kv_both", fingerprint=FINGERPRINT.replace("float32", "bfloat16"))
    assert b"kv_dtype (the KV cache's data type) is 'float32' here and 'bfloat16' there" in other.answer


def test_the_release_before_is_answered_byte_for_byte(cluster: Cluster) -> None:
    old = cluster.join("old", "kv_both", None)
    assert old.answer == b"\x94\x92\x01\x02\x01\xc3\x90"
    assert old.ask([[1, 4], 1, 0, []]) == b"\x94\x92\x01\x05\x01\x00\x90"


def test_what_a_call_costs(cluster: Cluster) -> None:
    """Prints the time of a call: use pytest -s."""
    for name, role in (("p0", "kv_producer"), ("d0", "kv_consumer")):
        cluster.join(name, role).load(0)
    long = list(range(8192))
    times = []
    body = json.dumps({"token_ids": long}).encode()
    for _ in range(50):
        begin = time.perf_counter()
        request = urllib.request.Request(f"http://{cluster.address}/pair", data=body, headers=JSON)
        with urllib.request.urlopen(request, timeout=10) as answer:
            answer.read()
        times.append(time.perf_counter() - begin)
    print(f"\n/pair of 8192 tokens, a connection each: median {sorted(times)[25] * 1e6:.0f} us")
    assert sorted(times)[25] < 1.0


@pytest.mark.parametrize(("accepted", "encoding"), [("br", None), ("gzip, deflate, br, zstd", "gzip"), ("", None)])
def test_answers_are_compressed_by_gzip_at_most(cluster: Cluster, accepted: str, encoding: str | None) -> None:
    """Brotli, which the HTTP library would prefer, takes seconds for the status of a thousand nodes."""
    request = urllib.request.Request(f"http://{cluster.address}/status", headers={"Accept-Encoding": accepted})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.headers["Content-Encoding"] == encoding
