"""Tests a deployment of stand-in servers, on this host and over ssh: up, status, scale, restarts, and no process left.
"""

import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment import Deployment, eventually, marked, served_by, server_pid
from sshd import Sshd, why_not

Make = Callable[..., Deployment]


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with Sshd(tmp_path_factory.mktemp("sshd")) as running:
        yield running


@pytest.fixture(params=["local", "ssh"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Makes deployments on the backend. Removes everything that a failed test leaves."""
    made: list[Deployment] = []
    settings: dict[str, Any] = {}
    if request.param == "ssh":
        if reason := why_not():
            pytest.skip(reason)
        settings = request.getfixturevalue("sshd").settings()

    def one(**document: Any) -> Deployment:
        made.append(Deployment(tmp_path, **(settings | document)))
        return made[-1]

    yield one
    for deployment in made:
        deployment.clean_up()


def test_a_deployment_comes_up_answers_and_ends_at_ctrl_c(make: Make) -> None:
    deployment = make(decode={"replicas": 2, "cores": ["0", "1"]})
    deployment.start_ready()
    rows = deployment.rows()
    assert {name: row["state"] for name, row in rows.items()} == dict.fromkeys(
        ["controller", "prefill-0", "decode-0", "decode-1", "router"], "ready")
    assert served_by(deployment.url(), 4) == {"decode-0", "decode-1"}
    assert "kv_load_failure_policy is recompute" in deployment.text()
    assert json.loads(deployment.call("status", "--json").stdout)["nodes"] == list(rows.values())
    lines = deployment.call("status").stdout.splitlines()
    assert lines[1].split() == ["name", "host", "role", "state", "url", "pid", "since", "detail"]
    assert len(lines) == 7
    deployment.signal(signal.SIGINT)
    assert deployment.wait_end() == 0
    deployment.none_left(within_s=2.0)


def test_other_users_see_no_secret_of_a_node_on_this_host(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, model="toy", env={"TOKEN": "hidden-7"}, prefill={"env": {"OTHER": "hidden-8"}})
    deployment.mark = "TOKEN=hidden-7"
    try:
        deployment.start_ready()
        running = marked("hidden-7")
        assert len(running) >= 8, "a guard and a command each"
        assert not [words for words in running.values() if "hidden" in words]
        assert not marked("hidden-8").keys() - running.keys()
        folder = tmp_path / "run" / "tested"
        assert folder.stat().st_mode & 0o777 == 0o700
        for name, least in {"cluster": 2, "prefill-0": 2, "decode-0": 2, "router": 2}.items():
            assert (folder / f"{name}.key").stat().st_mode & 0o777 == 0o600
            assert len(marked(f"KVFERRY_CLUSTER_KEY_FILE={folder}/{name}.key")) >= least
    finally:
        deployment.clean_up()


def test_nothing_outlives_a_launcher_that_is_killed(make: Make) -> None:
    deployment = make(decode={"flags": ["--stubborn"]})
    deployment.start_ready()
    assert len(marked(deployment.mark)) > 4
    deployment.signal(signal.SIGKILL)
    deployment.wait_end()
    deployment.none_left()


def test_a_node_that_dies_is_started_again_at_the_same_url(make: Make) -> None:
    deployment = make()
    deployment.start_ready()
    before = deployment.rows()["decode-0"]
    os.kill(server_pid(deployment, "decode-0"), signal.SIGKILL)
    eventually(lambda: deployment.rows()["decode-0"]["restarts"] == 1, deployment.text)
    eventually(lambda: deployment.status()["ready"], deployment.text)
    after = deployment.rows()["decode-0"]
    assert after["url"] == before["url"]
    assert "restart 1 of 3: ended by SIGKILL (kill -9, or" in deployment.text()
    assert served_by(deployment.url(), 1) == {"decode-0"}


def test_the_controller_and_the_front_door_are_started_again_where_they_were(make: Make) -> None:
    deployment = make()
    deployment.start_ready()
    before = deployment.rows()
    own = [pid for pid, words in marked(deployment.mark).items() if "bin/kvferry controller" in words
           and "guard.py" not in words and "ssh" not in words]
    router = [pid for pid, words in marked(deployment.mark).items() if "router.py --host" in words]
    for pid in (*own, *router):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: [deployment.rows()[name]["restarts"] for name in ("controller", "router")] == [1, 1],
               deployment.text)
    eventually(lambda: deployment.status()["ready"], deployment.text)
    assert {name: row["url"] for name, row in deployment.rows().items()} == {
        name: row["url"] for name, row in before.items()}
    assert served_by(deployment.url(), 1) == {"decode-0"}


def test_a_controller_whose_log_is_off_is_started_again_too(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    deployment.env |= {"KVFERRY_LOG": "off"}
    try:
        deployment.start_ready()
        before = deployment.rows()["controller"]
        (controller,) = (pid for pid, words in marked(deployment.mark).items() if "bin/kvferry controller" in words
                         and "guard.py" not in words)
        os.kill(controller, signal.SIGKILL)
        eventually(lambda: deployment.rows()["controller"]["restarts"] == 1
                   and deployment.rows()["controller"]["state"] == "ready", deployment.text)
        assert deployment.rows()["controller"]["url"] == before["url"]
    finally:
        deployment.clean_up()


def test_a_node_that_can_not_start_fails_with_its_reason_and_the_others_go_on(make: Make) -> None:
    deployment = make(restart=1, prefill={"flags": ["--die-at-start"]})
    deployment.start()
    eventually(lambda: "prefill failed" in deployment.text(), deployment.text)
    rows = deployment.rows()
    assert rows["prefill-0"]["detail"] == "ended with status 1: RuntimeError: this model does not fit"
    eventually(lambda: deployment.rows()["decode-0"]["state"] == "ready", deployment.text)
    deployment.signal(signal.SIGTERM)
    assert deployment.wait_end() == 0
    deployment.none_left()


def test_it_ends_with_a_reason_when_every_server_has_failed(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, restart=0, prefill={"flags": ["--die-at-start"]},
                            decode={"flags": ["--die-at-start"]})
    try:
        deployment.start()
        assert deployment.wait_end() == 1
        assert ("no prefill or decode server runs any more: prefill-0 ended with status 1: RuntimeError: this model "
                f"does not fit ({tmp_path}/run/tested/logs/prefill-0.log)") in deployment.text()
        deployment.none_left()
    finally:
        deployment.clean_up()


def test_it_goes_on_without_file_descriptors(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    try:
        deployment.start_ready()
        assert deployment.process is not None
        up, before, decode = deployment.process.pid, deployment.rows(), server_pid(deployment, "decode-0")
        _, most = resource.prlimit(up, resource.RLIMIT_NOFILE)
        resource.prlimit(up, resource.RLIMIT_NOFILE, (3, most))  # descriptors that the process has already stay open
        assert "is not up" in deployment.call("status", check=False).stderr
        os.kill(decode, signal.SIGKILL)
        line = "the nodes keep running, but this host has an error: Too many open files\n"
        eventually(lambda: line in deployment.text() and ".state.json" in deployment.text(), deployment.text)
        resource.prlimit(up, resource.RLIMIT_NOFILE, (most, most))
        eventually(lambda: deployment.status()["ready"], deployment.text)
        assert deployment.text().count(line) == 1
        after = deployment.rows()
        assert {name: row["pid"] for name, row in after.items() if name != "decode-0"} == {
            name: row["pid"] for name, row in before.items() if name != "decode-0"}
        deployment.signal(signal.SIGINT)
        assert deployment.wait_end() == 0
        deployment.none_left()
    finally:
        deployment.clean_up()


def test_scale_adds_nodes_and_takes_them_while_requests_run(make: Make) -> None:
    deployment = make(drain_timeout_s=3)
    deployment.start_ready()
    url = deployment.url()
    said = deployment.call("scale", "decode=3", "prefill=2").stdout
    assert said.splitlines()[0] == "decode: 1 to 3, added decode-1, decode-2; prefill: 1 to 2, added prefill-1"
    assert served_by(url, 6) == {"decode-0", "decode-1", "decode-2"}
    deployment.call("scale", "decode=1", "--no-wait")
    while "draining" in {row["state"] for row in deployment.rows().values()}:
        assert served_by(url, 3)  # no request is refused while servers are drained
        time.sleep(0.05)
    eventually(lambda: len(deployment.rows()) == 5, deployment.text)
    assert served_by(url, 3) == {"decode-0"}
    again = deployment.call("scale", "decode=2").stdout
    assert "added decode-3" in again  # a removed node's name is not used again
    assert deployment.call("scale", "decode=many", check=False).stderr == (
        "launch/cluster: 'decode=many' is not prefill=N or decode=N with a whole number N of at most 9 digits\n")


def test_down_ends_it_from_elsewhere_and_a_second_up_is_refused(make: Make) -> None:
    deployment = make()
    deployment.start_ready()
    second = deployment.call("up", check=False)
    assert second.returncode == 1
    assert "deployment 'tested' is already up (process " in second.stderr
    deployment.call("down")
    assert deployment.wait_end(5.0) == 0
    deployment.none_left(within_s=2.0)
    assert deployment.call("status", check=False).stderr == (
        "launch/cluster: deployment 'tested' is not up on this host, or does not answer; launch/cluster up FILE starts "
        "it\n")
