"""Tests how a node's output changes the node's state, and which line of it is reported as the reason of the node's end.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from deployment import eventually
from kvferry_launch.cluster import leaving, member, spec
from kvferry_launch.cluster.keys import Keys
from kvferry_launch.cluster.member import Member
from kvferry_launch.cluster.plan import Node, Place, Planner
from kvferry_launch.cluster.start import Starter
from kvferry_launch.cluster.supervise import Supervisor


def made(role: str, restarts_max: int = 2) -> Member:
    return Member(Node(f"{role}-0", role, Place("host", "10.0.0.1")), restarts_max, ready_timeout_s=60.0)


def run(one: Member, tmp_path: Path, code: str) -> None:
    """Runs a node until it has ended and Member has noticed the end."""
    one.start([sys.executable, "-c", code], tmp_path / "log")
    eventually(lambda: one.child is not None and one.child.exit_status is not None)
    one.read()
    one.look()


@pytest.mark.parametrize(("lines", "reason"), [
    (["RuntimeError: no memory", "cleaning up"], "RuntimeError: no memory"),
    (["/x/launch/a.py:139: FutureWarning: error"], "/x/launch/a.py:139: FutureWarning: error"),
    (["ValueError: bad", "a.py:1: UserWarning: error"], "ValueError: bad"),
    (["launch/prefill: --model /x is not a folder", "bye"], "launch/prefill: --model /x is not a folder"),
    (["kvferry: key 'x' is unknown", "bye"], "kvferry: key 'x' is unknown"),
    (["(EngineCore pid=7) kvferry: no answer", "RuntimeError: Engine core failed."], "kvferry: no answer"),
    (["ERROR 11-23 [core.py:1] kvferry._core.KvFerryError: kvferry: no answer", "RuntimeError: failed"],
     "kvferry: no answer"),
    (["(Worker pid=7) ERROR 11-26 [b.py:1] FileNotFoundError: [Errno 2] No such file or directory: '/bin/sh'",
      "(EngineCore pid=6) ERROR 11-26 [c.py:1]     raise ValueError(text)",
      "(EngineCore pid=6) ERROR 11-26 [c.py:1] Exception: Worker failed. See stack trace for root cause.",
      "RuntimeError: Engine core failed. See root cause above."],
     "FileNotFoundError: [Errno 2] No such file or directory: '/bin/sh'"),
    (["RuntimeError: Engine core failed. See root cause above."],
     "RuntimeError: Engine core failed. See root cause above."),
    (["WARNING [a.py:1] kvferry: hand-offs are not signed", "RuntimeError: failed"], "RuntimeError: failed"),
    (["\x1b[31mERROR\x1b[0m here", "srun: error: vm: task 0: Exited with exit code 1"], "ERROR here"),
    ([], "it printed nothing"),
])
def test_the_last_complaint_is_the_reason(lines: list[str], reason: str, tmp_path: Path) -> None:
    one = made("prefill")
    run(one, tmp_path, f"import sys\nfor line in {lines!r}: print(line)\nsys.exit(3)")
    assert one.detail == f"restart 1 of 2: ended with status 3: {reason}"


@pytest.mark.parametrize(("end", "why"), [
    ("os.kill(os.getpid(), 9)", "ended by SIGKILL (kill -9, or the host ran out of memory); its last line was: "
                                "node registered"),
    ("sys.exit(128 + 9)", "ended by SIGKILL (kill -9, or the host ran out of memory); its last line was: "
                          "node registered"),
    ("print('CUDA error: 7', flush=True); os.abort()", "ended by SIGABRT (a crash): CUDA error: 7"),
    ("sys.exit(255)", "ended with status 255: node registered"),
])
def test_a_signal_is_told_by_its_name(end: str, why: str, tmp_path: Path) -> None:
    one = made("prefill")
    run(one, tmp_path, f"import os, sys\nprint('node registered', flush=True)\n{end}")
    assert one.detail == f"restart 1 of 2: {why}"


def test_what_can_not_be_started_is_tried_again_and_told(tmp_path: Path) -> None:
    one = made("prefill", restarts_max=1)
    one.start(["/no/such/ssh"], tmp_path / "log")
    assert (one.state, one.detail) == ("restarting", "restart 1 of 1: can't be started: No such file or directory")
    one.start([sys.executable], tmp_path)
    assert (one.state, one.detail) == ("failed", "can't be started: Is a directory")


@pytest.mark.parametrize(("controller", "address", "servers", "says"), [
    ("failed", "", ["waiting", "waiting"], "no prefill or decode server runs any more: controller no luck ("),
    ("failed", "", ["failed", "restarting"], "no prefill or decode server runs any more: controller no luck ("),
    ("ready", "tcp://c:1", ["failed", "failed"], "no prefill or decode server runs any more: prefill-0 no luck ("),
    ("failed", "", ["ready", "restarting"], ""),
    ("failed", "tcp://c:1", ["failed", "restarting"], ""),
    ("restarting", "", ["waiting", "failed"], ""),
    ("failed", "", [], "no prefill or decode server runs any more: controller no luck ("),
    ("ready", "tcp://c:1", [], ""),
])
def test_a_deployment_is_given_up_when_no_server_can_run(controller: str, address: str, servers: list[str], says: str
                                                         ) -> None:
    roles = {role: {"replicas": len(servers) // 2} for role in ("prefill", "decode")}
    made = supervisor(Path("none"), **roles)
    for one, state in zip(made.members, [controller, *servers], strict=False):
        one.become(state, "no luck")
    made.controller.address = address
    assert made.hopeless.startswith(says) if says else not made.hopeless


def supervisor(folder: Path, **document: Any) -> Supervisor:
    made = spec.make({"name": "a", "model": "x"} | document, Path("demo.yaml"))
    return Supervisor(Starter(Planner(made)), Keys(folder, []), print)


def test_a_node_whose_key_was_revoked_ends_soon_and_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "REVOKED_ENDS_AFTER_S", 0.3)
    one = made("decode")
    one.start([sys.executable, "-uc", "print('kvferry decode node serves at http://a:1'); input()"], tmp_path / "log")
    eventually(lambda: one.read() or one.state == "ready")
    one.revoke()
    one.look()
    assert one.state == "stopping"
    assert one.child is not None
    assert one.child.running
    eventually(lambda: one.read() or one.look() or one.state == "failed")
    assert (one.detail, one.wants_start, one.restarts) == ("its member key was revoked", False, 0)
    waiting = made("decode")
    waiting.revoke()
    assert (waiting.state, waiting.detail) == ("failed", "its member key was revoked")


def test_a_line_that_is_longer_than_the_pipe_arrives_whole(tmp_path: Path) -> None:
    one = made("decode")
    one.start([sys.executable, "-uc", "import time; time.sleep(0.3); print(len(input()), input())"], tmp_path / "log")
    assert one.child is not None
    one.child.tell("x" * 300_000)
    one.child.tell(".")
    one.child.tell("end")
    found: list[str] = []
    eventually(lambda: bool(found) or found.extend(one.child.lines() if one.child else []) or bool(found))
    assert found == ["300000 end"]


def test_servers_that_start_later_than_others_are_known(tmp_path: Path) -> None:
    deployment = supervisor(tmp_path)
    deployment.scale({"decode": 2})
    first, added = deployment.member("decode")
    assert (first.is_late, added.is_late) == (False, True)
    run(first, tmp_path, "raise SystemExit(1)")
    assert first.is_late


def test_it_is_given_up_after_its_restarts_and_waits_between_them(tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "BACK_OFF_S", (0.2, 0.4))
    one = made("decode")
    for state in ("restarting", "restarting", "failed"):
        run(one, tmp_path, "raise SystemExit(1)")
        assert one.state == state
        assert not one.wants_start
        if state != "failed":
            eventually(lambda: one.wants_start, within_s=2.0)


def test_a_port_is_asked_for_again_only_if_it_served(tmp_path: Path) -> None:
    one = made("decode")
    run(one, tmp_path, "print('kvferry decode node serves at http://10.0.0.1:8201')")
    assert (one.port, one.url) == (8201, "http://10.0.0.1:8201")
    run(one, tmp_path, "print('launch/decode: can not listen on 10.0.0.1:8201')")
    assert one.port is None


def test_a_servers_ranks_are_drained_at_once_within_one_time_limit(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "kvferry"
    binary.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\nsleep 1\n[ "$2" != decode-0_dp1 ]\n')
    binary.chmod(0o755)
    monkeypatch.setattr(leaving, "KVFERRY", binary)
    limits: list[float] = []
    monkeypatch.setattr(leaving.serving, "wait_idle", lambda url, limit: limits.append(limit) or url == "http://idle")
    names = [f"decode-0_dp{rank}" for rank in range(4)]

    def drained(url: str, names: list[str], timeout: float) -> int:
        return leaving.drain_node(argparse.Namespace(names=names, url=url, controller="tcp://c:1", namespace="blue",
                                                     timeout=timeout))

    begin = time.monotonic()
    assert drained("http://idle", names, 30.0) == 1, "one of the drains failed"
    assert time.monotonic() - begin < 3.0
    assert sorted((tmp_path / "calls").read_text().splitlines()) == [
        f"drain {name} --force --controller tcp://c:1 --namespace blue --timeout 30.0" for name in names]
    assert 27.0 < limits[0] < 29.5, "the drains took a second of the limit"
    assert drained("http://idle", names[:1], 0.5) == 0
    assert limits[1] == leaving.IDLE_AT_LEAST_S
    assert drained("http://busy", names[:1], 30.0) == 1


def test_a_node_that_dies_while_it_is_drained_is_told_and_its_drain_ends(tmp_path: Path) -> None:
    one = made("decode")
    one.start([sys.executable, "-uc", "print('kvferry decode node serves at http://a:1'); input(); "
               "raise SystemExit('RuntimeError: lost')"], tmp_path / "log")
    eventually(lambda: one.read() or one.state == "ready")
    told: list[str] = []
    going = leaving.Leaving(one, [sys.executable, "-c", "input()"], {}, tmp_path / "leaving.log", told.append)
    going._settled_at = 0.0
    going.step()
    assert one.child is not None and going._task is not None and going._task.running
    one.child.tell("die")

    def ended() -> bool:
        one.read()
        one.look()
        return one.state == "stopped"

    eventually(ended)
    going.step()
    assert told == ["decode-0 is removed, although it was not drained: it ended with status 1: RuntimeError: lost"]
    eventually(lambda: going._task is not None and not going._task.running)


@pytest.mark.parametrize("more,scheme", [("", "http"), (" (HTTPS)", "https")])
def test_the_controllers_lines_become_addresses_that_others_reach(tmp_path: Path, more: str, scheme: str) -> None:
    one = made("controller")
    one.start([sys.executable, "-uc", f"import time\nprint('2026-01-01 kvferry[1] info HTTP on 0.0.0.0:81{more}')\n"
               "print('kvferry controller listening on tcp://0.0.0.0:80')\ntime.sleep(60)"], tmp_path / "log")
    eventually(lambda: one.read() or one.state == "ready")
    assert (one.found().controller, one.found().http) == ("tcp://10.0.0.1:80", f"{scheme}://10.0.0.1:81")
    assert one.child is not None
    one.child.kill()


def test_silence_is_unready_and_an_answer_ready_again(tmp_path: Path) -> None:
    one = made("decode")
    say = "print('kvferry decode node serves at http://a:1'); input(); "
    one.start([sys.executable, "-uc", f"{say}print('kvferry decode node does not answer at http://a:1'); input(); "
               f"{say}"], tmp_path / "log")
    for state in ("ready", "unready", "ready"):
        eventually(lambda state=state: one.read() or one.state == state)
        assert one.child is not None
        time.sleep(0.05)
        one.child.tell("go on")
    one.child.kill()
