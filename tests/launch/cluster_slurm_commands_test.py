"""Tests what launch/cluster makes of the answers of Slurm's commands, with stand-ins for these commands."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from kvferry_launch.cluster import job, slurm, spec
from kvferry_launch.cluster.control import ControlServer
from kvferry_launch.cluster.schema import SpecError

REFUSED = "decode.cores has 1 entries, and all of them are in use; each node needs an entry of its own"


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> spec.Spec:
    """Returns a deployment whose job has the id 7, and puts the folder of the stand-ins on PATH."""
    monkeypatch.setenv("KVFERRY_DEPLOYMENTS", str(tmp_path / "run"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    made = spec.make({"name": "tested", "model": "x", "on": "slurm"}, tmp_path / "tested.yaml")
    folder = spec.run_folder(made)
    folder.mkdir(parents=True)
    (folder / "job").write_text("7")
    (folder / "state.json").write_text('{"host": "h1"}')
    return made


def stand_in(tmp_path: Path, name: str, script: str) -> None:
    file = tmp_path / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def test_a_refusal_of_up_inside_the_job_is_told(deployment: spec.Spec, tmp_path: Path) -> None:
    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "scale":
            raise SpecError(REFUSED)
        return {"text": "fine"}

    stand_in(tmp_path, "squeue", "echo RUNNING")
    stand_in(tmp_path, "srun", 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"')
    server = ControlServer(spec.run_folder(deployment), answer)
    serving = threading.Thread(target=lambda: [server.serve(20.0) for _ in range(2)], daemon=True)
    serving.start()
    with pytest.raises(SpecError, match=REFUSED):
        job.ask_inside(deployment, {"do": "scale"})
    assert job.ask_inside(deployment, {"do": "status"}) == {"text": "fine"}
    serving.join()
    server.close()


@pytest.mark.parametrize("said", ["null", "[1]", "nonsense", ""])
def test_what_is_no_answer_is_none(deployment: spec.Spec, tmp_path: Path, said: str) -> None:
    stand_in(tmp_path, "squeue", "echo RUNNING")
    stand_in(tmp_path, "srun", f"echo '{said}'")
    assert job.ask_inside(deployment, {"do": "status"}) is None
    (spec.run_folder(deployment) / "state.json").write_text("[]")
    assert job.ask_inside(deployment, {"do": "status"}) is None


@pytest.mark.parametrize(("last", "status", "says"), [
    ("echo COMPLETED", 0, "# Slurm job 7 is COMPLETED"), ("echo FAILED", 1, "# Slurm job 7 is FAILED"),
    ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", 1,
     "# Slurm lists job 7 no more, so how the job ended is not known"),
    ("true", 1, "# Slurm lists job 7 no more, so how the job ended is not known")])
def test_only_a_job_that_is_known_to_have_completed_counts_as_completed(
        deployment: spec.Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
        last: str, status: int, says: str) -> None:
    monkeypatch.setattr(slurm, "POLL_S", 0.01)
    monkeypatch.setattr(slurm, "noted_signals", lambda *_: [])  # pytest needs its own handlers
    stand_in(tmp_path, "sbatch", "echo 7")
    stand_in(tmp_path, "squeue", f"if [ -e {tmp_path}/asked ]; then {last}; else touch {tmp_path}/asked; "
                                 "echo RUNNING; fi")
    assert slurm.submit_and_follow(deployment) == status
    assert capsys.readouterr().out.splitlines()[1:] == ["# Slurm job 7 is RUNNING", says]
    assert slurm.running_job(deployment) is None


def test_a_squeue_that_fails_says_nothing_about_the_job(deployment: spec.Spec, tmp_path: Path) -> None:
    stand_in(tmp_path, "squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    assert slurm.job_state("7") == "UNKNOWN"
    assert slurm.running_job(deployment) == "7"
