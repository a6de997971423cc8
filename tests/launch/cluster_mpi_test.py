"""Tests a deployment by mpirun: each rank becomes the node that rank 0 assigns to it, and all ranks end together."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployment import Deployment, eventually, marked, own_keys, served_by, server_pid

pytestmark = pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun not installed (Debian: openmpi-bin)")


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    options = ["--oversubscribe", "--bind-to", "none", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    made = Deployment(tmp_path, on="mpi", mpi={"ranks": 4, "options": options})
    yield made
    made.clean_up()


def test_ranks_become_nodes_and_end_at_ctrl_c(deployment: Deployment) -> None:
    deployment.start_ready()
    assert {name: row["host"] for name, row in deployment.rows().items()} == {
        "controller": "rank-0", "prefill-0": "rank-1", "decode-0": "rank-2", "router": "rank-0"}
    assert served_by(deployment.url(), 2) == {"decode-0"}
    assert own_keys(deployment) == ["decode-0", "prefill-0"]
    deployment.signal(signal.SIGINT)
    assert deployment.wait_end() == 0
    deployment.none_left()
    assert not list((deployment.folder / "run" / "tested").glob("ranks-*"))


def test_nothing_outlives_a_launcher_that_is_killed(deployment: Deployment) -> None:
    deployment.start_ready()
    deployment.signal(signal.SIGKILL)
    deployment.wait_end()
    deployment.none_left()


def test_nothing_outlives_an_mpirun_that_is_killed(deployment: Deployment) -> None:
    deployment.start_ready()
    for pid, words in marked(str(deployment.file)).items():
        if words.startswith("mpirun "):
            os.kill(pid, signal.SIGKILL)
    assert deployment.wait_end() != 0
    deployment.none_left()


def test_a_free_rank_takes_another_node_and_gives_it_back(deployment: Deployment) -> None:
    deployment.document["drain_timeout_s"] = 2
    deployment.write()
    deployment.start_ready()
    assert "added decode-1" in deployment.call("scale", "decode=2").stdout
    assert served_by(deployment.url(), 2) == {"decode-0", "decode-1"}
    refused = deployment.call("scale", "decode=3", check=False).stderr
    assert refused == ("launch/cluster: there is no free MPI rank for another decode node: all 3 ranks but the first "
                       "run one; raise mpi.ranks and start the deployment again\n")
    deployment.call("scale", "decode=1")
    assert "added prefill-1" in deployment.call("scale", "prefill=2").stdout
    assert deployment.rows()["prefill-1"]["host"] == "rank-3"


def test_a_node_that_dies_is_started_again_on_its_rank(deployment: Deployment) -> None:
    deployment.start_ready()
    os.kill(server_pid(deployment, "decode-0"), signal.SIGKILL)
    eventually(lambda: deployment.rows()["decode-0"]["restarts"] == 1, deployment.text)
    eventually(lambda: deployment.status()["ready"], deployment.text)
    assert served_by(deployment.url(), 1) == {"decode-0"}
