"""`launch/cluster up` for nodes that are child processes: on this host, over ssh, in a Slurm job, on MPI ranks."""

import contextlib
import fcntl
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from kvferry_launch.cluster.control import ControlServer
from kvferry_launch.cluster.keys import Keys
from kvferry_launch.cluster.member import FAILED
from kvferry_launch.cluster.plan import RECOMPUTE, Planner
from kvferry_launch.cluster.schema import SpecError
from kvferry_launch.cluster.spec import Spec, run_folder
from kvferry_launch.cluster.start import Starter
from kvferry_launch.cluster.status import StatusView
from kvferry_launch.cluster.supervise import Supervisor
from kvferry_launch.node.preflight import kvferry_binary
from kvferry_launch.paths import command_name
from kvferry_launch.process import DEATH_SIGNALS, noted_signals, write_whole

LOOP_S = 0.1
TROUBLE_S = 1.0  # length of the pause after an error of this host
TELL_EVERY_S = 60.0  # shortest time between two lines about the same error


def locked(folder: Path) -> TextIO:
    """Locks the deployment's folder until the returned file is closed. Errors: SpecError if another `up` has the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # the folder has the cluster key and, with MPI, commands with environment variables
    lock = (folder / "lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        raise SpecError(f"deployment '{folder.name}' is already up ({lock.read().strip() or 'starting'}); "
                        f"{command_name('cluster')} down ends it") from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock


class Deployment:
    """One run of `launch/cluster up`, from the start of the first node to the end of the last one. run() returns the
    exit status.
    """

    def __init__(self, spec: Spec, as_json: bool, hosts: dict[str, str] | None = None, run: str = "") -> None:
        self.spec = spec
        self.folder = run_folder(spec)
        # Under MPI and Slurm this process has no terminal, so the table is refreshed in place only for local and ssh.
        self._view = StatusView(as_json, live=spec.on in ("local", "ssh"))
        self._interrupts: list[int] = []
        self._down = False
        self._state = ""
        # Maps a line about an error of this host to the time at which the line was last printed.
        self._told: dict[str, float] = {}
        planner = Planner(spec, hosts)
        binary = kvferry_binary(sys.executable)
        self._lacks_binary = planner.has_member_keys and binary is None
        planner.has_member_keys &= binary is not None
        self._keys = Keys(self.folder, [binary, "keygen"] if binary and planner.has_member_keys else [])
        self.supervisor = Supervisor(Starter(planner, run), self._keys, self._view.say)

    def run(self) -> int:
        with locked(self.folder):
            self.spec.logs.mkdir(parents=True, exist_ok=True)
            self._interrupts = noted_signals(*DEATH_SIGNALS)
            self._keys.begin([member.node for member in self.supervisor.members])
            server = ControlServer(self.folder, self._answer)
            self._view.say(f"# {RECOMPUTE}")
            if self._lacks_binary:
                self._view.say("# this host has no kvferry binary to make a key for each node, so all nodes get the "
                               "cluster key")
            self._view.say(f"# logs are in {self.spec.logs}")
            try:
                failed = self._loop(server)
            finally:
                self._stop()
                server.close()
                (self.folder / "state.json").unlink(missing_ok=True)
        return 1 if failed else 0

    def _loop(self, server: ControlServer) -> bool:
        """Runs the deployment. Returns False after a signal or the command `down`, and True as soon as no server can
        run any more.
        """
        while not self._interrupts and not self._down:
            try:
                self.supervisor.tick()
                self._show()
                self.supervisor.tell_ready()
                if reason := self.supervisor.hopeless:
                    self._view.say(reason)
                    return True
                server.serve(LOOP_S)
            except BrokenPipeError:  # stdout was closed, so nothing can be shown any more
                raise
            except OSError as error:
                self._tell_error(error)
                time.sleep(TROUBLE_S)
        return False

    def _tell_error(self, error: OSError) -> None:
        """Prints an error of this host, such as too few file descriptors, at most once in TELL_EVERY_S."""
        place = f" ({error.filename})" if error.filename else ""
        line = f"the nodes keep running, but this host has an error: {error.strerror or error}{place}"
        if time.monotonic() - self._told.get(line, float("-inf")) > TELL_EVERY_S:
            self._told[line] = time.monotonic()
            with contextlib.suppress(OSError):  # stdout may be a file on a disk that is full
                self._view.say(line)

    def _stop(self) -> None:
        self._view.say(f"deployment '{self.spec.name}' is stopping")
        self.supervisor.stop(self._show, lambda: len(self._interrupts) > 1)
        self._show()
        self._view.say(f"deployment '{self.spec.name}' has stopped")

    def _show(self) -> None:
        rows = self.supervisor.rows()
        self._view.show(rows)
        state = json.dumps(self._status(rows))
        if state != self._state:
            try:
                write_whole(self.folder / "state.json", state)
                self._state = state
            except OSError as error:
                self._tell_error(error)

    def _status(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"name": self.spec.name, "on": self.spec.on, "ready": self.supervisor.ready,
                "url": self.supervisor.front_url, "pid": os.getpid(), "host": socket.gethostname(),
                "job": os.environ.get("SLURM_JOB_ID") if self.spec.on == "slurm" else None,
                "failed": [row["name"] for row in rows if row["state"] == FAILED], "nodes": rows}

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("do") == "status":
            return self._status(self.supervisor.rows())
        if request.get("do") == "scale":
            said = self.supervisor.scale({str(role): int(number) for role, number in request["to"].items()})
            self._view.say(f"# scale: {said}")
            return {"text": said}
        if request.get("do") == "down":
            self._down = True
            return {"text": "stopping"}
        raise SpecError(f"the request '{request.get('do')}' is not one of status, scale, down")


def wait_until_gone(folder: Path, timeout_s: float) -> bool:
    """Waits until no `up` holds the folder's lock. Returns False if one still holds the lock after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            locked(folder).close()
            return True
        except SpecError:
            time.sleep(0.1)
    return False
