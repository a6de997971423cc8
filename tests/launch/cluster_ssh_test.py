"""Tests cases that only ssh has: connections that break or fall silent, unreachable hosts, other Python versions."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployment import Deployment, eventually, marked, served_by
from sshd import Sshd, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with Sshd(tmp_path_factory.mktemp("sshd")) as running:
        yield running


@pytest.fixture
def deployment(sshd: Sshd, tmp_path: Path) -> Iterator[Deployment]:
    made = Deployment(tmp_path, **sshd.settings())
    yield made
    made.clean_up()


def ssh_of(deployment: Deployment, node: str) -> int:
    """Returns the process id of the ssh client through which the deployment runs the node."""
    return next(pid for pid, words in marked(deployment.mark).items()
                if words.startswith("ssh ") and f"--engine-id {node} " in words)


def servers(deployment: Deployment, node: str) -> list[int]:
    return [pid for pid, words in marked(deployment.mark).items()
            if "server.py --model" in words and f'"engine_id": "{node}"' in words]


def test_a_broken_connection_ends_the_node_there_and_starts_it_again(deployment: Deployment) -> None:
    deployment.start_ready()
    before = servers(deployment, "decode-0")
    assert len(before) == 1
    os.kill(ssh_of(deployment, "decode-0"), signal.SIGKILL)
    eventually(lambda: deployment.rows()["decode-0"]["restarts"] >= 1, deployment.text)
    eventually(lambda: deployment.status()["ready"], deployment.text)
    assert len(servers(deployment, "decode-0")) == 1
    assert servers(deployment, "decode-0") != before
    assert served_by(deployment.url(), 1) == {"decode-0"}


def test_a_silent_connection_ends_the_node_there(deployment: Deployment) -> None:
    deployment.start_ready()
    ours = ssh_of(deployment, "decode-0")
    os.kill(ours, signal.SIGSTOP)  # like a cut cable: neither end gets any data, and neither end is notified
    eventually(lambda: not servers(deployment, "decode-0"), deployment.text, within_s=60.0)
    os.kill(ours, signal.SIGKILL)
    eventually(lambda: deployment.status()["ready"], deployment.text)


def test_a_host_that_does_not_let_us_in_is_told(deployment: Deployment) -> None:
    deployment.document["restart"] = 0
    deployment.document["ssh"]["options"][5] = "/no/such/key"
    deployment.write()
    deployment.start()
    assert deployment.wait_end() == 1
    assert "controller failed - -  ended with status 255: " in deployment.text()
    assert "Permission denied" in deployment.text()
    deployment.none_left()
