"""Tests a deployment as a Slurm job, on a real Slurm of one machine: the job starts, serves, scales and ends cleanly.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment import CLUSTER, Deployment, eventually, marked, own_keys, served_by
from slurm_machine import SlurmMachine, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmMachine]:
    with SlurmMachine(tmp_path_factory.mktemp("slurm")) as machine:
        yield machine


@pytest.fixture
def deployment(slurm: SlurmMachine, tmp_path: Path) -> Iterator[Deployment]:
    made = Deployment(tmp_path, on="slurm", slurm={"nodes": 1, "time": "10"})
    made.env |= slurm.env
    yield made
    made.clean_up()
    slurm.output("scancel", "--user=root")
    eventually(lambda: not slurm.output("squeue", "--noheader"), made.text)


def jobs(slurm: SlurmMachine) -> str:
    return slurm.output("squeue", "--noheader")


def row_states(deployment: Deployment) -> set[str]:
    return {row["state"] for row in deployment.rows().values()}


def test_up_submits_follows_and_cancels_at_ctrl_c(slurm: SlurmMachine, deployment: Deployment) -> None:
    deployment.start_ready()
    assert len(jobs(slurm).splitlines()) == 1
    assert served_by(deployment.url(), 2) == {"decode-0"}
    assert deployment.call("scale", "decode=2").returncode == 0
    assert served_by(deployment.url(), 2) == {"decode-0", "decode-1"}
    assert own_keys(deployment) == ["decode-0", "decode-1", "prefill-0"]
    deployment.signal(signal.SIGINT)
    assert deployment.wait_end() == 0
    assert not jobs(slurm)
    deployment.none_left()


def test_a_launcher_that_is_killed_takes_the_job_along(slurm: SlurmMachine, deployment: Deployment) -> None:
    deployment.start_ready()
    deployment.signal(signal.SIGKILL)
    deployment.wait_end()
    eventually(lambda: not jobs(slurm), lambda: jobs(slurm))
    deployment.none_left()


def test_the_file_that_render_writes_is_a_job_of_its_own(slurm: SlurmMachine, deployment: Deployment) -> None:
    file = deployment.folder / "job.sbatch"
    deployment.call("render", "--output", str(file))
    job = submit(deployment, file)
    eventually(lambda: is_ready(deployment), lambda: slurm_output(deployment))
    assert served_by(deployment.url(), 2) == {"decode-0"}
    slurm.output("scancel", job)
    eventually(lambda: not jobs(slurm), lambda: jobs(slurm))
    deployment.none_left()
    assert slurm_output(deployment).splitlines()[-1] == "deployment 'tested' has stopped"


def test_down_ends_the_job(slurm: SlurmMachine, deployment: Deployment) -> None:
    file = deployment.folder / "job.sbatch"
    deployment.call("render", "--output", str(file))
    submit(deployment, file)
    eventually(lambda: is_ready(deployment), lambda: slurm_output(deployment))
    deployment.call("down")
    eventually(lambda: not jobs(slurm), lambda: jobs(slurm))
    deployment.none_left()


def test_a_step_that_dies_is_started_again(slurm: SlurmMachine, deployment: Deployment) -> None:
    deployment.start_ready()
    step = [line.split()[0] for line in slurm.output("squeue", "--steps", "--noheader",
                                                     "--format=%i %j").splitlines() if line.endswith("decode-0")]
    subprocess.run(["scancel", *step], env=os.environ | slurm.env, check=True)
    eventually(lambda: deployment.rows()["decode-0"]["restarts"] == 1, deployment.text)
    eventually(lambda: row_states(deployment) == {"ready"}, deployment.text)
    assert served_by(deployment.url(), 1) == {"decode-0"}
    assert marked(deployment.mark)


def submit(deployment: Deployment, file: Path) -> str:
    done = subprocess.run(["sbatch", "--parsable", str(file)], env=deployment.env, capture_output=True, text=True,
                          check=True)
    return done.stdout.strip()


def is_ready(deployment: Deployment) -> bool:
    done = subprocess.run([*CLUSTER, "status", str(deployment.file), "--json"], capture_output=True, text=True,
                          check=False, env=deployment.env)
    found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {"ready": False}
    return bool(found["ready"])


def slurm_output(deployment: Deployment) -> str:
    file = deployment.folder / "run" / "tested" / "logs" / "slurm.out"
    return file.read_text(errors="replace") if file.exists() else "no output yet"
