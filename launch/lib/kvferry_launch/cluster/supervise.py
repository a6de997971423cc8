"""Supervises a running deployment: starts the nodes, restarts dead nodes, adds and removes nodes, stops all nodes."""

import json
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry_launch.cluster.keys import Keys
from kvferry_launch.cluster.leaving import Leaving
from kvferry_launch.cluster.member import FAILED, READY, RESTARTING, STOPPED, STOPPING, WAITING, Member
from kvferry_launch.cluster.plan import ENGINE_ROLES, Node
from kvferry_launch.cluster.schema import REPLICAS_MAX, SpecError
from kvferry_launch.cluster.start import Starter

HEARTBEAT_S = 3.0
STOP_LATE_S = 20.0


class Supervisor:
    """Keeps the nodes running. tick() must be called a few times a second. `tell` prints lines for users.

    All calls must come from the main thread, because the kernel sends SIGTERM to a child process when the thread that
    started the child ends.
    """

    def __init__(self, starter: Starter, keys: Keys, tell: Callable[[str], None]) -> None:
        self.starter = starter
        self.keys = keys
        self.planner = starter.planner
        self.spec = starter.spec
        self.members = [self._member(node) for node in self.planner.all()]
        self.leavings: list[Leaving] = []
        self.stopping = False
        self._tell = tell
        self._heartbeat_at = 0.0
        self._told_workers = ""
        self._told_ready = False

    @property
    def controller(self) -> Member:
        return self.members[0]

    def member(self, role: str) -> list[Member]:
        return [member for member in self.members if member.node.role == role]

    def rows(self) -> list[dict[str, Any]]:
        return [member.row() for member in self.members]

    @property
    def ready(self) -> bool:
        return all(member.state == READY or member.leaving for member in self.members)

    @property
    def front_url(self) -> str:
        routers = self.member("router")
        return routers[0].url if routers else ""

    @property
    def hopeless(self) -> str:
        """A sentence that says why no server can run any more: all servers have failed, or those that have not failed
        wait for a controller that has failed. "" if a server can still run.
        """
        servers = [member for role in ENGINE_ROLES for member in self.member(role)]
        if all(member.state == FAILED for member in servers):
            first = (servers or [self.controller])[0]
        elif all(member.state in (FAILED, WAITING, RESTARTING) for member in servers) and not self.controller.address:
            first = self.controller
        else:
            return ""
        if first.state != FAILED:
            return ""
        log = self.log_of(first.node)
        return f"no prefill or decode server runs any more: {first.node.name} {first.detail} ({log})"

    def tick(self) -> None:
        for member in self.members:
            member.read()
            member.look()
        for leaving in self.leavings:
            leaving.step()
        self.leavings = [leaving for leaving in self.leavings if leaving.member.state != STOPPED]
        gone = [member for member in self.members if member.state == STOPPED]
        self.members = [member for member in self.members if member.state != STOPPED]
        for member in gone:
            self._revoke_key(member)
        if not self.stopping:
            self._follow_keys()
            for member in self.members:
                if member.wants_start and (member is self.controller or self.controller.address):
                    self._start(member)
            self._tell_workers()
        if time.monotonic() - self._heartbeat_at > HEARTBEAT_S:
            self._heartbeat_at = time.monotonic()
            for member in self.members:
                if member.child is not None:
                    member.child.tell(".")

    def scale(self, wanted: dict[str, int]) -> str:
        """Begins to add or remove nodes, and returns a summary of the changes. rows() shows when the changes are
        complete. Errors: SpecError.
        """
        for role, number in wanted.items():
            if role not in ENGINE_ROLES or not 0 <= number <= REPLICAS_MAX:
                raise SpecError(f"{role}={number} is not prefill=N or decode=N with N from 0 to {REPLICAS_MAX}")
        said = []
        for role, number in wanted.items():
            there = [member for member in self.member(role) if not member.leaving]
            added = [self._add(role) for _ in range(number - len(there))]
            gone = [self._take(member) for member in reversed(there[number:])]
            said.append(f"{role}: {len(there)} to {number}"
                        + (f", added {', '.join(added)}" if added else "")
                        + (f", draining {', '.join(gone)}" if gone else ""))
        return "; ".join(said)

    def stop(self, tick: Callable[[], None], shorten_deadline: Callable[[], bool]) -> None:
        """Stops the router first, then the servers, and the controller last, so that servers can deregister with it.

        `tick` is called repeatedly while nodes stop. While `shorten_deadline` returns True, nodes that still run are
        ended without the rest of their grace period.
        """
        self.stopping = True
        for leaving in self.leavings:
            leaving.abandon()
        for roles in (("router",), ENGINE_ROLES, ("controller",)):
            group = [member for member in self.members if member.node.role in roles]
            for member in group:
                member.leaving = True
                if member.child is not None:
                    member.become(STOPPING)
                    member.child.close()
                else:
                    member.become(STOPPED)
            late = time.monotonic() + STOP_LATE_S
            while any(member.child is not None for member in group):
                for member in group:
                    member.read()
                    member.look()
                    if member.child is not None and shorten_deadline():
                        member.child.end_now()
                    if member.child is not None and time.monotonic() > late:
                        member.child.kill()
                tick()
                time.sleep(0.05)

    def log_of(self, node: Node) -> Path:
        return self.spec.logs / f"{node.name}.log"

    def _member(self, node: Node) -> Member:
        return Member(node, self.spec.restart, float(self.spec.ready_timeout_s))

    def _start(self, member: Member) -> None:
        found = self.controller.found()
        # A late server may have missed updates of weights. An update group of its own keeps it from sharing KV with
        # servers that had the updates.
        group = f"{member.node.name[:40]}-{secrets.token_hex(8)}" if member.is_late else ""
        own = self.planner.command(member.node, found, member.port, group)
        command, env = self.starter.start_node(member.node, own)
        member.start(command, self.log_of(member.node), env)
        if self.planner.key_to_send(member.node):
            member.tell_keys(self.keys.lines(member.node))
        if member.node.role == "router":
            self._told_workers = ""

    def _add(self, role: str) -> str:
        node = self.planner.engine(role, [member.node for member in self.members])
        self.keys.add([node])
        member = self._member(node)
        member.is_late = True
        self.members.insert(len(self.members) - len(self.member("router")), member)
        return node.name

    def _take(self, member: Member) -> str:
        node = member.node
        if member.child is None:
            member.leaving = True
            member.become(STOPPED)
        else:
            drain = self.planner.drain(node, self.controller.found(), member.url)
            command, env = self.starter.start_with(self.planner.env(self.controller.node), self.controller.node.place,
                                                   f"{node.name}-leaving", drain)
            self.leavings.append(Leaving(member, command, env, self.spec.logs / f"{node.name}-leaving.log", self._tell))
        return node.name

    def _revoke_key(self, member: Member) -> None:
        try:
            self.keys.remove(member.node)
        except SpecError as error:
            self._tell(f"the key of {member.node.name}, which has ended, could not be revoked and stays valid: {error}")

    def _follow_keys(self) -> None:
        """Sends keys that have changed to hosts without the run folder, and ends nodes whose keys were revoked."""
        if not self.keys.look():
            return
        for member in self.members:
            if self.planner.key_to_send(member.node):
                member.tell_keys(self.keys.lines(member.node))
            if self.keys.is_revoked(member.node) and not member.is_revoked and not member.leaving:
                member.revoke()

    def _tell_workers(self) -> None:
        """Sends the list of ready servers to the router if the list has changed or the router was restarted."""
        workers = {role: [member.url for member in self.member(role) if member.state == READY and not member.leaving]
                   for role in ENGINE_ROLES}
        line = "workers " + json.dumps(workers)
        for router in self.member("router"):
            if router.child is not None and line != self._told_workers:
                router.child.tell(line)
                self._told_workers = line

    def tell_ready(self) -> None:
        """Prints a line if all nodes are ready now and were not at the last call."""
        if self.ready != self._told_ready:
            self._told_ready = self.ready
            if self.ready:
                self._tell(f"ready: {self.front_url or 'there is no router, so clients use the URLs of the servers'}")
