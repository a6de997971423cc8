"""Tests launch/cluster with real vLLM: it serves the same text as the plain server, and leaves no processes behind.

Most tests run on this host. The last is the short form of tests/cluster/run: with namespaces as hosts, under load.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cluster_namespaces
import pytest
from deployment import Deployment, eventually, marked
from kvferry_launch.node.vllm import KvConnector
from kvferry_launch.paths import REPO
from kvferry_launch.testbed.pair import own_cores
from kvferry_launch.testbed.reference import Reference
from real_deployment import FLAGS, READY_WITHIN_S, ask, assert_answers_are_right, end, expected, real

Make = Callable[..., Deployment]


@pytest.fixture
def make(kvferry_connector: KvConnector, toy: Path, tmp_path: Path) -> Iterator[Make]:
    del kvferry_connector
    made: list[Deployment] = []

    def one(**document: Any) -> Deployment:
        made.append(real(tmp_path, toy, **document))
        return made[-1]

    yield one
    for deployment in made:
        deployment.clean_up()


def ask_reference(reference: Reference) -> None:
    expected(reference)


@pytest.mark.long  # test_quickstart already has a deployment on this host, behind launch/proxy
def test_a_deployment_serves_and_ends_clean(reference: Reference, make: Make) -> None:
    deployment = make()
    deployment.start_ready(READY_WITHIN_S)
    assert_answers_are_right(deployment, expected(reference))
    end(deployment)


@pytest.mark.long  # tests/cluster/run --quick already kills servers
def test_a_killed_server_is_started_again(reference: Reference, make: Make) -> None:
    wanted = expected(reference)
    deployment = make()
    deployment.start_ready(READY_WITHIN_S)
    engine = [pid for pid, words in marked(deployment.mark).items() if "-m vllm" in words and "prefill-0" in words
              and "--engine-id" not in words]
    os.kill(engine[0], signal.SIGKILL)
    eventually(lambda: deployment.rows()["prefill-0"]["restarts"] == 1, deployment.text)
    eventually(lambda: deployment.status()["ready"], deployment.text, READY_WITHIN_S)
    assert_answers_are_right(deployment, wanted)
    end(deployment)


@pytest.mark.long  # tests/cluster/run --quick already adds and drains a server
def test_a_decode_server_is_added_and_drained_again(reference: Reference, make: Make) -> None:
    wanted = expected(reference)
    core = own_cores()[1]
    deployment = make(decode={"cores": [core, core], "flags": FLAGS}, drain_timeout_s=60)
    deployment.start_ready(READY_WITHIN_S)
    deployment.call("scale", "decode=2", within_s=READY_WITHIN_S)
    assert_answers_are_right(deployment, wanted)
    deployment.call("scale", "decode=1", within_s=READY_WITHIN_S)
    assert set(deployment.rows()) == {"controller", "prefill-0", "decode-0", "router"}
    assert "is removed although its drain failed" not in deployment.text()
    assert "node 'decode-1' can be stopped" in deployment.text()
    ask(deployment.url())
    end(deployment)


@pytest.mark.long  # tests/cluster/run --quick already uses this router
def test_the_proxy_is_a_front_door_too(reference: Reference, make: Make) -> None:
    wanted = expected(reference)
    deployment = make(router={"kind": "proxy"})
    deployment.start_ready(READY_WITHIN_S)
    assert_answers_are_right(deployment, wanted)
    end(deployment)


def test_a_cluster_loses_gains_and_drains_nodes_without_a_failed_request(
        kvferry_connector: KvConnector, reference: Reference, tmp_path: Path) -> None:
    del kvferry_connector, reference
    figures = tmp_path / "cluster.json"
    done = subprocess.run([sys.executable, str(REPO / "tests" / "cluster" / "run"), "--quick", "--json", str(figures)],
                          capture_output=True, text=True, timeout=1800, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(figures.read_text())
    phases = {phase["name"]: phase for phase in found["phases"]}
    assert len(phases) == 8
    for name, phase in phases.items():
        assert phase["tally"]["requests"] > 0 or name == "the end", name
    if found["mode"] == "local":
        pytest.skip(f"passed with all nodes on this host only: {cluster_namespaces.why_not()}")
