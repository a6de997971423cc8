"""Runs a deployment in one MPI run. Rank 0 supervises the deployment and runs the controller and the router; each
other rank runs at most one server at a time, when rank 0 orders it.

The ranks communicate through the deployment's run folder, which all hosts share. In the run folder each rank but
rank 0 has a folder of its own, with `here.json`, which names the rank's host, and files for the rank's N-th command:
`order-N.json` (the command), `out-N` (its output), `stop-N` (rank 0 wants the command to end), `exit-N` (its exit
status). MPI is used only to start the ranks on the hosts and to kill them together.
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from kvferry_launch.cluster.plan import FIRST_RANK, OWN_TOOLS
from kvferry_launch.cluster.schema import SpecError
from kvferry_launch.cluster.spec import Spec, run_folder
from kvferry_launch.cluster.start import GRACE_S
from kvferry_launch.process import (
    PR_SET_PDEATHSIG,
    _die_with_parent,
    copy_from,
    noted_signals,
    shell_status,
    write_whole,
)

RANK_NAMES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
SIZE_NAMES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
GATHER_WITHIN_S = 120.0
POLL_S = 0.1


def ranks_of(spec: Spec) -> int:
    return spec.raw["mpi"]["ranks"] or 1 + sum(role.replicas for role in spec.roles.values())


def command(spec: Spec, run: str) -> list[str]:
    """Returns the mpirun command that starts all ranks."""
    names = list(spec.hosts)
    each = -(-ranks_of(spec) // len(names)) if names else 0
    hosts = ["--host", ",".join(f"{name}:{each}" for name in names)] if names else []
    return ["mpirun", "-np", str(ranks_of(spec)), *hosts, *map(str, spec.raw["mpi"]["options"]),
            *OWN_TOOLS.script("cluster"), "mpi-rank", str(spec.file), "--run", run]


def from_environment(names: tuple[str, ...]) -> int:
    for name in names:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    raise SpecError(f"this process is no rank of an MPI run: none of the environment variables {', '.join(names)} is "
                    "set to a number; mpirun sets them")


def rank_folder(spec: Spec, run: str, rank: int) -> Path:
    return run_folder(spec) / f"ranks-{run}" / f"rank-{rank}"


def gather(spec: Spec, run: str, size: int) -> dict[str, str]:
    """Waits until all ranks have started, and returns the name of each rank's host. All hosts must be able to resolve
    these names. Only rank 0 calls this function. Errors: SpecError if a rank does not start in time.
    """
    deadline = time.monotonic() + GATHER_WITHIN_S
    hosts = {FIRST_RANK: socket.gethostname()}
    for rank in range(1, size):
        here = rank_folder(spec, run, rank) / "here.json"
        while not here.exists():
            if time.monotonic() > deadline:
                raise SpecError(f"rank {rank} of {size} did not start within {GATHER_WITHIN_S:.0f} s; all hosts must "
                                f"share the folder {here.parent.parent}")
            time.sleep(POLL_S)
        hosts[f"rank-{rank}"] = json.loads(here.read_text())["host"]
    return hosts


def end_ranks(spec: Spec, run: str) -> None:
    """Marks the run as ended, so that the other ranks end."""
    with contextlib.suppress(OSError):
        (run_folder(spec) / f"ranks-{run}" / "end").touch()


def remove_orders(spec: Spec, run: str) -> None:
    shutil.rmtree(run_folder(spec) / f"ranks-{run}", ignore_errors=True)


def serve_rank(spec: Spec, run: str, rank: int) -> int:
    """Runs on every rank except 0: runs the commands that rank 0 writes to the rank's folder, one at a time, until rank
    0 ends the run.
    """
    # The kernel ends this process when its parent, mpirun or mpirun's daemon, ends.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    folder = rank_folder(spec, run, rank)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "here.json", json.dumps({"host": socket.gethostname()}))
    serial = 1
    while not (folder.parent / "end").exists():
        order = folder / f"order-{serial}.json"
        if order.exists():
            obey(folder, serial, json.loads(order.read_text()))
            serial += 1
        time.sleep(POLL_S)
    return 0


def obey(folder: Path, serial: int, words: list[str]) -> None:
    """Runs one command until it ends, or until rank 0 wants it to end. The command's guard ends the command if this
    process ends first.
    """
    guard = [*OWN_TOOLS.guard(), "--grace", str(GRACE_S), "--"]
    with (folder / f"out-{serial}").open("wb") as out:
        process = subprocess.Popen([*guard, *words], stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT,
                                   start_new_session=True, preexec_fn=_die_with_parent)
    assert process.stdin is not None
    while process.poll() is None:
        if (folder / f"stop-{serial}").exists() or (folder.parent / "end").exists():
            process.stdin.close()
            process.wait()
            break
        time.sleep(POLL_S)
    write_whole(folder / f"exit-{serial}", str(process.returncode))


def relay(folder: Path, words: list[str]) -> int:
    """Runs on rank 0: lets another rank run a command, prints the command's output and returns its exit status.

    `folder`: the other rank's folder. SIGTERM or SIGINT to this process, or the end of its stdin, ends the command.
    """
    wants_end = noted_signals(signal.SIGTERM, signal.SIGINT)
    serial = 1
    while (folder / f"order-{serial}.json").exists():
        serial += 1
    write_whole(folder / f"order-{serial}.json", json.dumps(words))
    out, is_open, offset = folder / f"out-{serial}", True, 0
    done = folder / f"exit-{serial}"
    while True:
        is_over = done.exists()
        offset = copy_from(out, offset)
        if is_over:
            return shell_status(int(done.read_text()))
        if select.select([0] if is_open else [], [], [], POLL_S)[0]:
            is_open = bool(os.read(0, 4096))
        if not is_open or wants_end:
            (folder / f"stop-{serial}").touch()
