"""Tests the peers' programs of `kvferry bench controller`: their load, how they read answers, their lines of output."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kvferry_launch.paths import KVFERRY, REPO

pytest.importorskip("numpy")
PEERS = REPO / "launch" / "bench" / "peers"
DEADLINE_S = 120

FAKE = """
from controller_load import LOOKUP_KEYS, keys_at
from controller_peer import Directory, Layout, main

class Dict(Directory):
    def __init__(self):
        self.holders = {}
    def prepare_events(self, is_store, some, batch_keys):
        return [(is_store, worker, keys_at(prefix, position, batch_keys).tolist()) for worker, prefix, position in some]
    def take(self, prepared):
        for is_store, worker, keys in prepared:
            for key in keys:
                (set.add if is_store else set.discard)(self.holders.setdefault(key, set()), worker)
    def prepare_lookup(self, prefix, position):
        return keys_at(prefix, position, LOOKUP_KEYS).tolist()
    def lookup(self, prepared):
        return set.intersection(*(self.holders.get(key, set()) for key in prepared))
    def found(self, answer):
        return {worker: LOOKUP_KEYS for worker in answer}

class First(Dict):
    def found(self, answer):
        return {min(answer): LOOKUP_KEYS}

class Liar(Dict):
    def found(self, answer):
        return {worker: LOOKUP_KEYS - 1 for worker in answer}

class Broken(Dict):
    way = "remote"
    def __init__(self):
        raise RuntimeError("no server here\\nsecond line")

main(lambda: "1.0", [Layout("true", [Dict, Broken]), Layout("first", [First]), Layout("liar", [Liar], "lies"),
                     Layout("broken", [Broken])], hashes_max=65536)
"""


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PEERS))


def test_the_load_is_that_of_the_cpp_side() -> None:
    import controller_load as load

    digest = 0
    for worker, prefix, position in load.batches(0, 200):
        keys = load.keys_at(prefix, position, load.BATCH_KEYS).tolist()
        digest = load.scramble(digest ^ load.scramble(worker) ^ keys[0] ^ load.scramble(keys[-1]))
    assert digest == 4149750175108327567  # expected by bench/controller/controller_peers_test.cpp too


def test_a_program_tells_figures_and_what_the_answers_are_worth(tmp_path: Path) -> None:
    program = tmp_path / "fake.py"
    program.write_text(FAKE)
    done = subprocess.run([sys.executable, str(program)], input='{"hashes": 100000, "repeat": 1, "seconds": 0.05}\n',
                          capture_output=True, text=True, timeout=DEADLINE_S, check=True,
                          env={"PYTHONPATH": str(PEERS), "PATH": "/usr/bin:/bin"})
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    peers = {line["peer"]["engine"]: line["peer"] for line in lines if "peer" in line}
    assert list(peers) == ["true", "first", "liar"]
    for entry in peers.values():
        assert set(entry) == {"engine", "version", "figures", "notes"}
        assert entry["version"] == "1.0"
        for name in ("lookup_128_per_s", "lookup_128_us_p50", "lookup_128_us_p99", "event_hashes_per_s"):
            assert entry["figures"][name] > 0, name
        assert entry["figures"]["hashes"] == 65536
        assert "measured with 65536 hashes instead of 100000" in entry["notes"]
    assert "Broken is not measured: no server here" in peers["true"]["notes"]
    assert "WRONG" not in peers["true"]["notes"]
    assert "partial" not in str(peers["true"]["figures"])
    assert "name only one of the two holders" in peers["first"]["notes"]
    assert "100.0 % of answers are WRONG" in peers["liar"]["notes"]
    assert any("loading" in line.get("step", "") for line in lines)
    assert lines[-1]["error"] == "no server here"  # the only way to reach this peer fails


def test_depths_are_those_of_unbroken_prefixes() -> None:
    import controller_peer as peer

    assert peer.depths([{1, 2}, {1}, {1, 2, 3}]) == {1: 3, 2: 1}
    assert peer.depths([set(), {1}]) == {}


def test_the_driver_reports_a_peer_and_leaves_out_one_that_cant_be_installed(tmp_path: Path) -> None:
    binary = shutil.copy(os.environ.get("KVFERRY_BINARY", str(KVFERRY)), tmp_path / "kvferry")
    venv = tmp_path / "kvferry-cache" / "kvferry" / "bench-venv"
    (venv / "bin").mkdir(parents=True)
    (venv / ".kvferry-controller_redis").write_text("installed\n")
    told = {"engine": "fake", "version": "7", "figures": {"remote_per_s_per_core": 8000.0}, "notes": ""}
    python = venv / "bin" / "python"
    python.write_text(f"#!/bin/sh\nread -r spec\necho '{json.dumps({'peer': told})}'\necho '{{\"done\": true}}'\n")
    python.chmod(0o755)
    file = tmp_path / "figures.json"
    done = subprocess.run([binary, "bench", "controller", "--hashes", "65536", "--repeat", "1", "--peers",
                           "dynamo,redis", "--json", str(file)], capture_output=True, text=True, timeout=DEADLINE_S,
                          check=False, env={"XDG_CACHE_HOME": str(tmp_path / "kvferry-cache"), "PYTHON": "false",
                                            "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())
    assert figures["peers"] == [told]
    assert list(figures["peers_missing"]) == ["dynamo"]
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: dynamo is left out: the command 'false -m venv")
    assert "fake 7, remote" in done.stdout
