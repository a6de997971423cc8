"""Plans which nodes a deployment has, on which host each node runs, and with which command. This module does no I/O."""

import itertools
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry_launch.cluster.schema import SpecError
from kvferry_launch.cluster.spec import Role, Spec, run_folder
from kvferry_launch.node.cluster_key import KEY_ENV, KEY_NAME
from kvferry_launch.paths import IS_INSTALLED, REPO

ANY_HOST = "0.0.0.0"
LOOPBACK = "127.0.0.1"
ENGINE_ROLES = ("prefill", "decode")
RECOMPUTE = "KV that fails to load is recomputed: kv_load_failure_policy is recompute (vLLM's own default is fail)"
LOG_ENV = "KVFERRY_LOG"
WITH_HTTP_LINE = ("trace", "debug", "info")  # levels at which the controller logs its HTTP address, which `up` reads
FIRST_RANK = "rank-0"  # the MPI rank that supervises the deployment and runs the controller and the router


@dataclass(frozen=True)
class Place:
    """A host: its name for ssh or Slurm, and the address at which other nodes reach it. In an MPI run, `name` is the
    name of a rank, such as "rank-1", and `address` belongs to the rank's host.
    """

    name: str
    address: str


@dataclass(frozen=True)
class Node:
    """A controller, server or router of the deployment. During a run of `up`, no other node of the role ever gets the
    same `number`, not even after this node was removed.
    """

    name: str
    role: str
    place: Place
    number: int = 0
    cores: str | None = None


@dataclass(frozen=True)
class Found:
    """The controller's addresses. They are empty until the controller has reported them. In a dry run, as in the
    defaults, placeholders stand for unknown parts.
    """

    controller: str = "tcp://CONTROLLER_HOST:PORT"
    http: str = "http://CONTROLLER_HOST:HTTP_PORT"


@dataclass(frozen=True)
class Tools:
    """The Python interpreter and the checkout of kvferry (`path`) that a host uses. If `path` is empty, the interpreter
    has kvferry's wheel instead.
    """

    python: str
    path: str

    def script(self, name: str) -> list[str]:
        if self.path:
            return [self.python, str(Path(self.path) / "launch" / name)]
        return [self.python, "-m", "kvferry_launch", name]

    def guard(self) -> list[str]:
        if self.path:
            return self.script("lib/kvferry_launch/node/guard.py")
        return [self.python, "-m", "kvferry_launch.node.guard"]

    def state(self) -> Path:
        """Returns the folder for files that stay when a run ends. Without a checkout, its path is relative to the home
        folder.
        """
        return Path(self.path) / "build" if self.path else Path(".local/state/kvferry")


OWN_TOOLS = Tools(sys.executable, "" if IS_INSTALLED else str(REPO))
"""The interpreter that runs this process, and this process's own checkout, if it has one."""


def tools_of(spec: Spec) -> Tools:
    """Returns the tools that every host uses. Over ssh, these are the interpreter and the checkout that the
    deployment's file names (default: the path of this process's checkout); otherwise, this process's own.
    """
    if spec.on == "ssh":
        return Tools(spec.raw["ssh"]["python"], spec.raw["ssh"]["path"] or OWN_TOOLS.path)
    return OWN_TOOLS


class Planner:
    """Names the nodes and assigns each node to a host. A server gets the host with the fewest servers, of the hosts of
    its role or, if the role lists none, of the deployment; of several such hosts, the next one in turn. In an MPI run,
    it gets the first rank without a node.

    `hosts`: the hosts of the Slurm job or the MPI run, which replace the top-level `hosts` of the deployment's file.
    None: the deployment does not run in a Slurm job or an MPI run.
    """

    def __init__(self, spec: Spec, hosts: dict[str, str] | None = None) -> None:
        self.spec = spec
        # Whether each node but the controller has a member key. If not, nodes have the cluster key, or the key file
        # that their environment variables name.
        self.has_member_keys = not any(KEY_ENV in env for env in (spec.env, *(one.env for one in spec.roles.values())))
        self._hosts = hosts or spec.hosts
        self._numbers = {role: itertools.count() for role in ENGINE_ROLES}
        self.tools = tools_of(spec)

    def controller(self) -> Node:
        return Node("controller", "controller", self._named(self.spec.raw["controller"]["host"]))

    def router(self) -> Node | None:
        if self.spec.router["kind"] == "none":
            return None
        return Node("router", "router", self._named(self.spec.router["host"]))

    def engine(self, role: str, present: Sequence[Node]) -> Node:
        """Returns a new node of a role. `present`: nodes that exist, at least all prefill and decode nodes. Errors:
        SpecError.
        """
        own = self.spec.roles[role]
        number = next(self._numbers[role])
        # If decode uses the deployment's hosts, it skips as many of them as prefill has replicas, because prefill may
        # use the same hosts.
        shift = self.spec.roles["prefill"].replicas if role == "decode" and own.hosts is None else 0
        places = list((own.hosts or self._hosts).items())
        if not places:
            raise SpecError(f"{role}.hosts and hosts are missing; one of them must list the hosts of {role} servers")
        if self.spec.on == "mpi":  # each rank but the first runs at most one node
            taken = {node.place.name for node in present}
            places = [place for place in places if place[0] not in taken and place[0] != FIRST_RANK]
            if not places:
                raise SpecError(f"there is no free MPI rank for another {role} node: all {len(self._hosts) - 1} ranks "
                                "but the first run one; raise mpi.ranks and start the deployment again")
            number_of_place = 0
        else:
            # Roles that list no hosts use the same ones.
            roles = [role] if own.hosts else [one for one in ENGINE_ROLES if not self.spec.roles[one].hosts]
            used = Counter(node.place.name for node in present if node.role in roles)
            turn = [(number + shift + step) % len(places) for step in range(len(places))]
            number_of_place = min(turn, key=lambda one: used[places[one][0]])
        name, address = places[number_of_place]
        free = list(own.cores)  # entries that no node uses yet; the same entry may occur twice
        for node in present:
            if node.role == role and node.cores in free:
                free.remove(node.cores)
        if own.cores and not free:
            raise SpecError(f"{role}.cores has {len(own.cores)} entries, and all of them are in use; each node "
                            "needs an entry of its own")
        return Node(f"{role}-{number}", role, Place(name, address), number, free[0] if free else None)

    def all(self) -> list[Node]:
        nodes = [self.controller()]
        for role in ENGINE_ROLES:
            for _ in range(self.spec.roles[role].replicas):
                nodes.append(self.engine(role, nodes[1:]))
        router = self.router()
        return [*nodes, router] if router else nodes

    def _named(self, host: str | None) -> Place:
        """Returns the host with the name `host`, or the first host if `host` is None."""
        hosts = dict(self._hosts)
        for role in self.spec.roles.values():
            hosts |= role.hosts or {}
        if host is None:
            host = next(iter(self._hosts or hosts), None)
        if host is None:
            raise SpecError("no host is given for the controller or the router; list hosts, or give controller.host "
                            "and router.host")
        return Place(host, hosts.get(host, host))

    # ---- the nodes' commands and environment variables on the nodes' hosts ----

    def key(self, node: Node) -> dict[str, str]:
        """Returns the environment variable that names the node's key file. A host that is reached by ssh has a copy of
        the file in a folder of its own, not in the run folder, because that host may be the launcher's.
        """
        folder = run_folder(self.spec).resolve()
        if self.spec.on == "ssh":
            folder = self.tools.state() / "deployments" / self.spec.name / "keys"
        return {KEY_ENV: str(folder / key_name(node, self.has_member_keys))}

    def key_to_send(self, node: Node) -> str:
        """Returns the file on the node's host to which guard.py writes the node's key, or "" if no key is sent: the
        host shares the run folder, or the deployment's file names another key file.
        """
        file = self.key(node)[KEY_ENV]
        return file if self.spec.on == "ssh" and self.env(node).get(KEY_ENV) == file else ""

    def bind_host(self) -> str:
        return LOOPBACK if self.spec.on == "local" else ANY_HOST

    def env(self, node: Node) -> dict[str, str]:
        """Returns the environment variables of the node's command, in addition to the variables of the node's host."""
        if node.role == "controller":
            level = self.spec.env.get(LOG_ENV, os.environ.get(LOG_ENV, "info"))
            return {**self.key(node), **self.spec.env, **({} if level in WITH_HTTP_LINE else {LOG_ENV: "info"})}
        role = self.spec.roles.get(node.role)
        cores = {"VLLM_CPU_OMP_THREADS_BIND": node.cores} if node.cores else {}
        return {**self.key(node), **self.spec.env, **cores, **(role.env if role else {})}

    def command(self, node: Node, found: Found, port: int | None = None, update_group: str = "") -> list[str]:
        """Returns the node's command. `port`: the port at which the node served before its restart, so that the node
        keeps its address; None: the port in the deployment's file. `update_group`: the value of the setting of this
        name for a server that starts later than others, or "". Such a server may have missed updates of weights, so it
        must not share KV with servers that reset their caches after such an update.
        """
        if node.role == "controller":
            return self._controller(found if port else None)
        if node.role == "router":
            return self._router(node, found, port)
        return self._engine(node, self.spec.roles[node.role], found, port, update_group)

    def drain(self, node: Node, found: Found, url: str) -> list[str]:
        """Returns the command that drains a server's nodes before the server is removed. The command runs on the
        controller's host.
        """
        spec = self.spec
        size = spec.roles[node.role].data_parallel
        names = [node.name] if size == 1 else [f"{node.name}_dp{rank}" for rank in range(size)]
        return [*self.tools.script("cluster"), "drain-node", *names, "--url", url, "--controller", found.controller,
                "--namespace", spec.namespace, "--timeout", str(spec.drain_timeout_s)]

    def _controller(self, found: Found | None) -> list[str]:
        raw = self.spec.raw["controller"]
        port, http = raw["port"], raw["http"]
        if found is not None:
            port, http = found.controller.rpartition(":")[2], found.http.rpartition(":")[2]
        state = raw["state"] if raw["state"] == "none" else str(self.spec.resolve(raw["state"]))
        return [*self.tools.script("controller"), "--bind",
                f"tcp://{self.bind_host()}:{port}", "--", "--http", f"{self.bind_host()}:{http}", "--state", state]

    def _engine(self, node: Node, role: Role, found: Found, port: int | None, update_group: str) -> list[str]:
        words = [*self.tools.script(node.role), "--report", "--model", self.spec.model, "--controller",
                 found.controller, "--host", self.bind_host(), "--port", str(port or role.port), "--engine-id",
                 node.name, "--kv-role", role.kv_role]
        if self.spec.on != "local":
            words += ["--advertise-host", node.place.address]
        extra = {"namespace": self.spec.namespace} | role.extra
        if update_group:
            extra["update_group"] = update_group
        words += [word for key, value in extra.items() for word in ("--extra", f"{key}={as_json(value)}")]
        if self.spec.vllm:
            words += ["--server", shlex.join(self.spec.vllm)]
        flags = role.vllm_flags()
        return [*words, "--", *flags] if flags else words

    def _router(self, node: Node, found: Found, port: int | None) -> list[str]:
        raw = self.spec.router
        words = [*self.tools.script("cluster"), "front", "--kind", raw["kind"], "--host",
                 self.bind_host(), "--port", str(port or raw["port"]), "--advertise-host", node.place.address,
                 "--controller", found.http, "--namespace", self.spec.namespace]
        if raw["command"]:
            words += ["--command", shlex.join(map(str, raw["command"]))]
        return [*words, "--", *map(str, raw["flags"])] if raw["flags"] else words


def key_name(node: Node, has_member_keys: bool) -> str:
    return f"{node.name}.key" if has_member_keys and node.role != "controller" else KEY_NAME


def environment(env: dict[str, str]) -> list[str]:
    return ["env", *(f"{name}={value}" for name, value in env.items())] if env else []


def as_json(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def placements(nodes: list[Node]) -> Iterator[tuple[Place, list[Node]]]:
    """Yields each host together with the list of its nodes."""
    for name in dict.fromkeys(node.place.name for node in nodes):
        here = [node for node in nodes if node.place.name == name]
        yield here[0].place, here
