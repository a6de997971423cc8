"""Tests the command kvferry_sim: its last line, its file, replays, wrong arguments, Ctrl-C."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from kvferry_launch.paths import RELEASE

BINARY = os.environ.get("KVFERRY_SIM", str(RELEASE / "bin" / "kvferry_sim"))


def sim(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BINARY, *args], capture_output=True, text=True, timeout=120, check=False)


def test_a_run_ends_with_its_promises_and_tells_what_happened(tmp_path: Path) -> None:
    file = tmp_path / "sim.json"
    ended = sim("--schedules", "400", "--seed", "11", "--jobs", "1", "--json", str(file))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "400 schedules, 0 broken promises"
    told = json.loads(file.read_text())
    assert told["schedules"] == 400
    assert told["broken"] == []
    assert told["counters"]["preemptions"] > 0
    again = sim("--schedules", "400", "--seed", "11", "--jobs", "4", "--json", str(file))
    assert again.returncode == 0
    assert json.loads(file.read_text())["counters"] == told["counters"], "the same seeds differ"


def test_a_replay_prints_the_schedules_last_events_and_the_same_ones_each_time() -> None:
    first = sim("--replay", "5")
    assert first.returncode == 0
    assert len(first.stdout.splitlines()) > 5
    assert first.stdout == sim("--replay", "5").stdout
    assert first.stdout.splitlines()[-1] == "1 schedules, 0 broken promises"


def test_states_are_read_between_nodes_of_unlike_shapes_in_both_directions(tmp_path: Path) -> None:
    file = tmp_path / "sim.json"
    ended = sim("--schedules", "5000", "--seed", "21", "--json", str(file))
    assert ended.returncode == 0, ended.stderr
    happened = json.loads(file.read_text())["counters"]
    for what in ("states_joined", "states_split", "states_declined", "states_pushed", "lies_refused"):
        assert happened[what] > 0, what


def test_what_can_happen_and_never_did_is_a_failure() -> None:
    ended = sim("--schedules", "3", "--expect-all")
    assert ended.returncode == 1
    assert "never happened: " in ended.stderr


@pytest.mark.parametrize("arguments", [(), ("--schedules", "0"), ("--schedules", "many"), ("--jobs", "0"), ("--what",)])
def test_a_bad_argument_is_one_sentence(arguments: tuple[str, ...]) -> None:
    ended = sim(*arguments)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stderr.startswith("kvferry_sim: ")


def test_ctrl_c_ends_with_what_was_run_so_far() -> None:
    with subprocess.Popen([BINARY, "--schedules", "100000000"], stdout=subprocess.PIPE, text=True) as running:
        time.sleep(1)
        running.send_signal(signal.SIGINT)
        out, _ = running.communicate(timeout=30)
    assert running.returncode == 130
    last = out.splitlines()[-1]
    assert last.endswith(" schedules, 0 broken promises")
    assert 0 < int(last.split()[0]) < 100000000
