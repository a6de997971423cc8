"""Runs a deployment as one sbatch or mpirun job, prints the job's output, and ends the job when this process ends."""

import json
import select
import shlex
import subprocess
import time
from typing import Any

from kvferry_launch.cluster import mpi, slurm
from kvferry_launch.cluster.child import Child
from kvferry_launch.cluster.control import ask
from kvferry_launch.cluster.plan import OWN_TOOLS, Planner
from kvferry_launch.cluster.schema import SpecError
from kvferry_launch.cluster.spec import Spec, run_folder
from kvferry_launch.process import DEATH_SIGNALS, noted_signals

STOP_GRACE_S = 60.0
FOLLOW_S = 0.2


def run(spec: Spec, command: str) -> int:
    """Runs a launch/cluster command that submits a Slurm job; prints the job's output until the job ends."""
    return follow(spec, [*OWN_TOOLS.script("cluster"), command, str(spec.file)])


def run_mpi(spec: Spec, token: str) -> int:
    (run_folder(spec) / f"ranks-{token}").mkdir(parents=True, exist_ok=True)
    try:
        return follow(spec, mpi.command(spec, token))
    finally:
        mpi.remove_orders(spec, token)


def follow(spec: Spec, command: list[str]) -> int:
    """Runs the job's command, prints its output and returns its exit status. For a Slurm job, returns 0 if a signal to
    this process came before the command ended. A guard process ends the command if this process is killed.
    """
    interrupts = noted_signals(*DEATH_SIGNALS)
    guard = [*OWN_TOOLS.guard(), "--grace", str(STOP_GRACE_S), "--"]
    child = Child(f"{spec.on}-job", [*guard, *command], spec.logs / f"{spec.on}-job.log")
    print(shlex.join(command), flush=True)
    child.start()
    asked_at = 0.0
    while True:
        status = child.exit_status
        for line in child.lines():
            print(line, flush=True)
        if status is not None:
            return 0 if interrupts and spec.on == "slurm" else status
        if interrupts and not asked_at:
            asked_at = time.monotonic()
            if spec.on == "slurm" or ask(run_folder(spec), {"do": "down"}) is None:
                child.close()
        if asked_at and (len(interrupts) > 1 or time.monotonic() - asked_at > STOP_GRACE_S):
            child.end_now()
        select.select([], [], [], FOLLOW_S)


def ask_inside(spec: Spec, what: dict[str, Any]) -> dict[str, Any] | None:
    """Sends a request to the `up` process of a Slurm job. Returns the answer, or None if there is none. Errors:
    SpecError if `up` refuses the request.

    srun starts the command that sends the request on the host of the `up` process, because processes on other hosts
    can't connect to the Unix socket of `up`.
    """
    job = slurm.running_job(spec)
    try:
        host = json.loads((run_folder(spec) / "state.json").read_text())["host"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    if job is None:
        return None
    srun = slurm.inside(Planner(spec, {host: host}), host, job)
    done = subprocess.run([*srun, *OWN_TOOLS.script("cluster"), "ask", str(run_folder(spec)), json.dumps(what)],
                          capture_output=True, text=True, check=False)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        return None
    if not isinstance(answer, dict):
        return None
    if "error" in answer:
        raise SpecError(str(answer["error"]))
    return answer
