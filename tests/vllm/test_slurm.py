"""Tests sbatch on a Slurm of one machine: the job starts a deployment of real vLLM servers, serves, and ends cleanly.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployment import eventually
from kvferry_launch.node.vllm import KvConnector
from kvferry_launch.testbed.reference import Reference
from real_deployment import READY_WITHIN_S, assert_answers_are_right, expected, real
from slurm_machine import SlurmMachine, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[SlurmMachine]:
    (tmp_path / "slurm").mkdir()
    with SlurmMachine(tmp_path / "slurm") as machine:
        yield machine


@pytest.mark.long
def test_sbatch_starts_serves_and_ends_clean(
        kvferry_connector: KvConnector, reference: Reference, toy: Path, slurm: SlurmMachine, tmp_path: Path) -> None:
    del kvferry_connector
    wanted = expected(reference)
    deployment = real(tmp_path, toy, on="slurm", slurm={"nodes": 1, "time": "30"})
    deployment.env |= slurm.env
    try:
        file = tmp_path / "job.sbatch"
        deployment.call("render", "--output", str(file))
        job = subprocess.run(["sbatch", "--parsable", str(file)], env=deployment.env, capture_output=True, text=True,
                             check=True).stdout.strip()
        output = tmp_path / "run" / "tested" / "logs" / "slurm.out"
        eventually(lambda: output.exists() and "ready: " in output.read_text(),
                   lambda: output.read_text() if output.exists() else "no output yet", READY_WITHIN_S)
        assert_answers_are_right(deployment, wanted)
        deployment.remember()
        slurm.output("scancel", job)
        eventually(lambda: not slurm.output("squeue", "--noheader"), output.read_text)
        deployment.none_left()
        assert output.read_text().splitlines()[-1] == "deployment 'tested' has stopped"
    finally:
        slurm.output("scancel", "--user=root")
        deployment.clean_up()
