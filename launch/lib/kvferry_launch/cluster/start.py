"""Turns a node's command into the command with which this host starts the node: directly, over ssh, by srun, or through
an MPI rank. This module does no I/O.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from kvferry_launch.cluster.plan import (
    FIRST_RANK,
    OWN_TOOLS,
    RECOMPUTE,
    Found,
    Node,
    Place,
    Planner,
    environment,
    placements,
)
from kvferry_launch.cluster.spec import Spec, run_folder

GRACE_S = 10
SILENCE_S = 30
SSH_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=5", "-o",
               "ServerAliveCountMax=3")


@dataclass(frozen=True)
class Starter:
    """Turns a node's command into the command with which this host starts the node. The value of `on` decides how."""

    planner: Planner
    run: str = "RUN"  # token that distinguishes this MPI run from other runs of the deployment

    @property
    def spec(self) -> Spec:
        return self.planner.spec

    def start_node(self, node: Node, command: list[str]) -> tuple[list[str], dict[str, str]]:
        """Returns the command with which this host starts a node, and the environment variables to set for the command.
        """
        return self.start_with(self.planner.env(node), node.place, node.name, command, node.role == "router",
                               self.planner.key_to_send(node))

    def start_with(self, env: dict[str, str], place: Place, name: str, command: list[str],
                   with_stdin: bool = False, key_file: str = "") -> tuple[list[str], dict[str, str]]:
        """Does the same as start() for a command that needs the environment variables `env`. Also returns the
        environment variables that the caller must set for the returned command.

        If `on` is local, the caller must set all of `env`, because other users could read the variables if they were
        arguments of the command. Otherwise there are none to set, because the returned command sets the variables.
        """
        if self.spec.on == "local":
            return self.start(place, name, command, with_stdin), env
        return self.start(place, name, [*environment(env), *command], with_stdin, key_file), {}

    def start(self, place: Place, name: str, command: list[str], with_stdin: bool = False, key_file: str = ""
              ) -> list[str]:
        """Returns the command with which this host starts a node. Closing the returned command's stdin stops the node,
        because guard.py reads that stdin or, for an MPI rank other than the first, the command `mpi-relay`.

        `key_file`: the file to which guard.py writes the node's key, which it reads from stdin; only used over ssh.
        """
        if self.spec.on == "local":
            return [*self.guard(0, with_stdin), *command]
        if self.spec.on == "ssh":
            return [*self.ssh(place), self.remote([*self.guard(SILENCE_S, with_stdin, key_file), *command])]
        if self.spec.on == "slurm":
            return [*self.srun(place, name), *self.guard(SILENCE_S, with_stdin), *command]
        if self.spec.on == "mpi":
            if place.name == FIRST_RANK:
                return [*self.guard(0, with_stdin), *command]
            rank = run_folder(self.spec) / f"ranks-{self.run}" / place.name
            return [*OWN_TOOLS.script("cluster"), "mpi-relay", str(rank), "--", *command]
        raise AssertionError(f"with 'on' {self.spec.on}, launch/cluster does not start single nodes")

    def guard(self, silence_s: int, with_stdin: bool, key_file: str = "") -> list[str]:
        return [*self.planner.tools.guard(), "--grace", str(GRACE_S),
                *(["--silence", str(silence_s)] if silence_s else []), *(["--stdin"] if with_stdin else []),
                *(["--key-file", key_file] if key_file else []), "--"]

    def ssh(self, place: Place) -> list[str]:
        raw = self.spec.raw["ssh"]
        user = ["-l", raw["user"]] if raw["user"] else []
        return ["ssh", *SSH_OPTIONS, *map(str, raw["options"]), *user, "--", place.name]

    def remote(self, words: list[str]) -> str:
        """Joins the words to one argument for ssh, which passes the argument to the user's shell on the host."""
        path = self.planner.tools.path
        return (f"cd {shlex.quote(path)} && " if path else "") + f"exec {shlex.join(words)}"

    def srun(self, place: Place, name: str) -> list[str]:
        """Returns the srun words that start a Slurm step with one task on one host. All steps share the job's
        resources.
        """
        return ["srun", f"--job-name={name}", "--nodes=1", "--ntasks=1", f"--nodelist={place.name}", "--overlap",
                "--cpu-bind=none", "--mem=0", "--unbuffered", "--kill-on-bad-exit=1",
                *map(str, self.spec.raw["slurm"]["srun_options"])]


def dry_run_of(planner: Planner) -> Iterator[str]:
    """Yields the commands that `up` would run, host by host, with comments. PORT and HTTP_PORT stand for ports that the
    controller's host will choose.
    """
    starter = Starter(planner)
    nodes = planner.all()
    address = nodes[0].place.address
    raw = planner.spec.raw["controller"]
    found = Found(f"tcp://{address}:{raw['port'] or 'PORT'}", f"http://{address}:{raw['http'] or 'HTTP_PORT'}")
    yield f"# deployment {planner.spec.name} on {planner.spec.on}: {len(nodes)} nodes"
    yield f"# {RECOMPUTE}"
    for place, here in placements(nodes):
        yield f"# {place.name} ({place.address})" if place.name != place.address else f"# {place.name}"
        for node in here:
            words, env = starter.start_node(node, planner.command(node, found))
            yield f"# {node.name}"
            yield shlex.join([*environment(env), *words])
