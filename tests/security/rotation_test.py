"""Replaces the cluster key of a controller and its nodes by the commands of operations.md, while they hand over KV."""

import contextlib
import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import fenced_commands
from handing_deployment import LOADED, REVOKED_WITHIN_S, Deployment, Traffic
from kvferry.tickets import HANDOFF, signer_of
from kvferry_launch.paths import REPO


@pytest.fixture
def deployment(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Deployment]:
    pytest.importorskip("kvferry._core", reason="the Python module is not built")
    with contextlib.ExitStack() as ended:
        yield Deployment(tmp_path, ended, members=getattr(request, "param", False))


def steps_of_the_document() -> list[str]:
    lines = fenced_commands((REPO / "launch/docs/operations.md").read_text())
    return [line for line in lines if re.match(r"kvferry keygen --(add|switch|retire) ", line)]


@pytest.mark.parametrize("deployment", [False, True], indirect=True, ids=["one-key", "members"])
def test_a_key_is_replaced_without_a_failed_request_and_then_the_former_opens_nothing(deployment: Deployment,
                                                                                    tmp_path: Path) -> None:
    former = tmp_path / "former.key"
    shutil.copy2(tmp_path / "cluster.key", former)
    assert deployment.status(former).returncode == 0
    assert deployment.http_status(former) == 200
    steps = steps_of_the_document()
    assert [step.split()[2] for step in steps] == ["--add", "--switch", "--retire"]
    with Traffic(deployment.prefill, deployment.decode) as traffic:
        traffic.goes_on()
        for number, step in enumerate(steps):
            deployment.run(step)
            for copy in deployment.copies[number:] + deployment.copies[:number]:  # in another order each time
                deployment.copy_to([copy])
                time.sleep(REVOKED_WITHIN_S)
                traffic.goes_on()
        assert deployment.http_status(former) == 401
        assert deployment.status(former).returncode != 0
        for key_file in (deployment.copies[0], tmp_path / "cluster.key"):
            assert deployment.http_status(key_file) == 200
            names = {node["engine_id"] for node in json.loads(deployment.status(key_file).stdout)["nodes"]}
            assert names == set(deployment.nodes)
    assert traffic.failures == []
    assert traffic.num_handed_over > 30


def test_a_former_key_opens_nothing_a_second_after_the_file_was_replaced(deployment: Deployment, tmp_path: Path
                                                                         ) -> None:
    """Replaces the key at once, as after a theft; one node does not get the new file."""
    _, of_prefill, of_decode = deployment.copies
    params = deployment.prefill.ask({"prefill": 1})
    assert deployment.decode.ask({"decode": 1, "params": params}) == {"loaded": LOADED, "right": True}
    params = deployment.prefill.ask({"prefill": 2})
    (tmp_path / "cluster.key").unlink()
    deployment.run("kvferry keygen cluster.key")
    deployment.copy_to([copy for copy in deployment.copies if copy != of_prefill])
    time.sleep(REVOKED_WITHIN_S)
    assert deployment.http_status(of_prefill) == 401
    assert deployment.decode.ask({"decode": 2, "params": params})["why"] == "a ticket with a wrong signature"
    forged = signer_of(str(of_decode)).signed(HANDOFF, params)
    assert deployment.decode.ask({"decode": 2, "params": forged}) == {"loaded": 0, "right": True}
    assert deployment.status(of_prefill).returncode != 0
    assert deployment.status(of_decode).returncode == 0
