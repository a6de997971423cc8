"""Writes the sbatch file of a deployment, submits the Slurm job and follows it. Inside the job, `up` starts each node
by srun.
"""

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

from kvferry_launch.cluster.plan import OWN_TOOLS, RECOMPUTE, Place, Planner
from kvferry_launch.cluster.schema import SpecError
from kvferry_launch.cluster.spec import Spec, run_folder
from kvferry_launch.cluster.start import Starter, dry_run_of
from kvferry_launch.paths import command_name
from kvferry_launch.process import copy_from, noted_signals

GONE = "GONE"  # not a state of Slurm: Slurm has removed the job, as it does some minutes after the job's end
ENDED = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL",
         "DEADLINE", GONE}
POLL_S = 1.0
STOP_BEFORE_LIMIT_S = 60


def sbatch_script(spec: Spec) -> str:
    """Returns the sbatch file of a job that runs `up`. scancel, the time limit and `launch/cluster down` end it."""
    raw = spec.raw["slurm"]
    replicas = sum(role.replicas for role in spec.roles.values())
    lines = [f"--job-name=kvferry-{spec.name}", f"--nodes={raw['nodes'] or max(1, replicas)}",
             f"--output={output_of(spec)}", "--open-mode=truncate",
             # Slurm sends SIGTERM a minute before the time limit, so that `up` has time to stop the nodes.
             f"--signal=B:TERM@{STOP_BEFORE_LIMIT_S}",
             *(f"--{name}={raw[name]}" for name in ("partition", "account", "time") if raw[name]),
             *map(str, raw["options"])]
    inside = [*OWN_TOOLS.script("cluster"), "up", str(spec.file), "--on", "slurm", "--in-job"]
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in lines), f"# {RECOMPUTE}",
                      *([f"cd {shlex.quote(OWN_TOOLS.path)}"] if OWN_TOOLS.path else []),
                      f"exec {shlex.join(inside)}", ""])


def output_of(spec: Spec) -> Path:
    return spec.logs / "slurm.out"


def job_hosts() -> dict[str, str]:
    """Returns the hosts of the Slurm job that this process is part of. Maps each host's name to itself, because the
    name is also the address at which other hosts reach the host. Errors: SpecError.
    """
    listed = os.environ.get("SLURM_JOB_NODELIST")
    if not listed:
        raise SpecError("this process is not inside a Slurm job, because SLURM_JOB_NODELIST is not set; "
                        f"{command_name('cluster')} up FILE --on slurm submits a job")
    done = subprocess.run(["scontrol", "show", "hostnames", listed], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SpecError(f"scontrol can't list the hosts '{listed}' of this Slurm job: {done.stderr.strip()}")
    return {name: name for name in done.stdout.split()}


def dry_run(spec: Spec) -> list[str]:
    """Returns the sbatch file and the commands of the job, with placeholders for the names of the job's hosts."""
    nodes = spec.raw["slurm"]["nodes"] or max(1, sum(role.replicas for role in spec.roles.values()))
    planner = Planner(spec, {f"HOST{index}": f"HOST{index}" for index in range(nodes)})

    return [f"# sbatch {sbatch_file(spec)}, a file with these lines:", *sbatch_script(spec).splitlines(),
            "# commands inside the job:", *dry_run_of(planner)]


def sbatch_file(spec: Spec) -> Path:
    return run_folder(spec) / "job.sbatch"


def submit_and_follow(spec: Spec) -> int:
    """Submits the job and prints its output until the job ends. SIGTERM or SIGINT cancels the job. Returns 0 if the job
    completed or such a signal came before its end, otherwise 1.
    """
    wants_end = noted_signals(signal.SIGTERM, signal.SIGINT)
    output = output_of(spec)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)
    sbatch_file(spec).write_text(sbatch_script(spec))
    done = subprocess.run(["sbatch", "--parsable", str(sbatch_file(spec))], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"{command_name('cluster')}: sbatch refused the job: {done.stderr.strip()}", flush=True)
        return 1
    job = done.stdout.strip().partition(";")[0]
    job_file(spec).write_text(job)
    print(f"# submitted Slurm job {job}; scancel {job}, Ctrl-C or {command_name('cluster')} down ends it", flush=True)
    state, offset, cancelled = "", 0, False
    while state not in ENDED:
        if wants_end and not cancelled:
            cancelled = cancel(job)
        now = job_state(job)
        if now != state:
            print(f"# Slurm job {job} is {now}" if now != GONE else
                  f"# Slurm lists job {job} no more, so how the job ended is not known", flush=True)
            state = now
        offset = copy_from(output, offset)
        time.sleep(POLL_S)
    copy_from(output, offset)
    job_file(spec).unlink(missing_ok=True)
    return 0 if state == "COMPLETED" or cancelled else 1


def job_file(spec: Spec) -> Path:
    return run_folder(spec) / "job"


def running_job(spec: Spec) -> str | None:
    """Returns the id of this deployment's job, or None if there is no job or the job has ended."""
    try:
        job = job_file(spec).read_text()
    except OSError:
        return None
    return job if job_state(job) not in ENDED else None


def cancel(job: str) -> bool:
    subprocess.run(["scancel", job], check=False)
    return True


def job_state(job: str) -> str:
    """Returns the job's state as squeue reports it, GONE if squeue lists no such job, or UNKNOWN if squeue failed."""
    done = subprocess.run(["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"],
                          capture_output=True, text=True, check=False)
    if done.returncode != 0 and "Invalid job id" not in done.stderr:
        return "UNKNOWN"
    return done.stdout.strip() or GONE


def inside(planner: Planner, host: str, job: str) -> list[str]:
    """Returns the srun words to put before the words of a command, so that the command runs on a host of the job."""
    return [*Starter(planner).srun(Place(host, host), "control"), f"--jobid={job}"]
