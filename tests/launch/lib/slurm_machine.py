"""A real Slurm of one node on this machine: munged, slurmctld and slurmd, each with a configuration for the test."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from kvferry_launch.process import ManagedProcess, free_port, stop_all

DAEMONS = ("munged", "slurmctld", "slurmd")
SBIN = os.environ.get("PATH", "") + ":/usr/sbin"


def why_not() -> str | None:
    """Returns the reason why Slurm can't run on this machine, or None."""
    missing = [name for name in DAEMONS if shutil.which(name, path=SBIN) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: munge, slurm-wlm)"
    if os.geteuid() != 0:
        return "slurmd runs jobs of other users, so it wants root"
    return None


class SlurmMachine:
    """A running Slurm, for a `with` statement. `env`: the environment variables that sbatch, srun and other commands
    need.
    """

    def __init__(self, folder: Path, cpus: int = 8) -> None:
        self._folder = folder
        self.host = socket.gethostname().partition(".")[0]
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._munge = Path("/tmp") / f"munge-{os.getpid()}.socket"  # the path of the socket must be short
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        for name in ("state", "spool"):
            (folder / name).mkdir()
        (folder / "cgroup.conf").write_text("CgroupPlugin=autodetect\n")
        (folder / "slurm.conf").write_text(f"""ClusterName=tested
SlurmctldHost={self.host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={free_port()}
SlurmdPort={free_port()}
AuthType=auth/munge
AuthInfo=socket={self._munge}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=15
MpiDefault=none
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName={self.host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=tested Nodes={self.host} Default=YES MaxTime=INFINITE State=UP
""")
        config = ["-D", "-f", str(folder / "slurm.conf")]
        self._processes = [ManagedProcess(name, [self._binary(name), *flags], self.env, folder / f"{name}.log")
                           for name, flags in (
            ("munged", ["--foreground", "--force", f"--socket={self._munge}", f"--key-file={key}",
                        f"--log-file={folder}/munge.log", f"--pid-file={folder}/munge.pid",
                        f"--seed-file={folder}/munge.seed"]),
            ("slurmctld", config), ("slurmd", [*config, "-N", self.host]))]

    def __enter__(self) -> "SlurmMachine":
        try:
            for process in self._processes:
                process.start()
                if process.name == "munged":
                    self._wait(self._munge.exists)
            self._wait(lambda: self.output("sinfo", "--noheader", "--format=%T") == "idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # The daemon of a job outlives slurmd, so the jobs are ended first.
        self.output("scancel", "--state=RUNNING")
        self.output("scancel", "--state=PENDING")
        deadline = time.monotonic() + 40.0
        while self.output("squeue", "--noheader") and time.monotonic() < deadline:
            time.sleep(0.2)
        stop_all(reversed(self._processes))
        self._munge.unlink(missing_ok=True)

    def output(self, *command: str) -> str:
        done = subprocess.run(command, env=os.environ | self.env, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30.0
        while not condition():
            for process in self._processes:
                if process.exit_status is not None:
                    process.fail_if_dead()
            assert time.monotonic() < deadline, "\n".join(
                f"{process.name}: {process.tail()}" for process in self._processes if process.log.exists())
            time.sleep(0.1)

    @staticmethod
    def _binary(name: str) -> str:
        found = shutil.which(name, path=SBIN)
        assert found is not None
        return found
