"""Removes a node while requests run: the router drops the node, the controller drains the node, and the node stops
after its last request.
"""

import argparse
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from kvferry_launch.cluster.child import Child
from kvferry_launch.cluster.member import DRAINING, STOPPED, STOPPING, Member
from kvferry_launch.node import serving
from kvferry_launch.paths import KVFERRY, no_binary

IDLE_AT_LEAST_S = 2.0  # time that a server has to report twice that it is idle, even if drains took all the time
SETTLE_S = 6.0  # vllm-router drops a worker 5 s after the worker's last announcement


class Leaving:
    """The removal of one node. step() must be called repeatedly until the state of `member` is STOPPED.

    `drain`: the command that drains the node, and ends when the node may be stopped. If the command fails, or if the
    node's process ends before the command, `tell` prints a line, and the node is removed anyway. A node without a URL
    is not drained, because it serves no requests.
    """

    def __init__(self, member: Member, drain: list[str], env: dict[str, str], log: Path,
                 tell: Callable[[str], None]) -> None:
        self.member = member
        member.leaving = True
        self._settled_at = time.monotonic() + (SETTLE_S if member.url else 0.0)
        self._tell = tell
        self._task = Child(f"{member.node.name}-leaving", drain, log, env) if member.url else None
        member.become(DRAINING)

    def step(self) -> None:
        if self.member.state == STOPPED and self.member.detail:
            self._tell(f"{self.member.node.name} is removed, although it was not drained: it {self.member.detail}")
            self.abandon()
        if self.member.state != DRAINING or time.monotonic() < self._settled_at:
            return
        if self._task is not None:
            if not self._task.started:
                self._task.start()
            self._task.tell(".")
            if lines := [line for line in self._task.lines() if line]:
                self.member.become(DRAINING, lines[-1])
            if self._task.exit_status is None:
                return
            if self._task.exit_status != 0:
                self._tell(f"{self.member.node.name} is removed although its drain failed: "
                           f"{self._task.last_line or 'it printed nothing'}")
        self.member.become(STOPPING)
        if self.member.child is not None:
            self.member.child.close()

    def abandon(self) -> None:
        """Ends the drain's command. The supervisor calls this when the whole deployment stops, step() if the node's
        process has ended.
        """
        if self._task is not None and self._task.started:
            self._task.end_now()


def drain_node(arguments: argparse.Namespace) -> int:
    """Drains the nodes of a server, one for each data-parallel rank and all at the same time, and then waits until the
    server has no requests. All that together takes at most the time limit, or IDLE_AT_LEAST_S more.

    Runs on the controller's host, before the server is stopped. Prints errors. Returns 0 if there was no error.
    """
    binary = str(KVFERRY) if KVFERRY.exists() else shutil.which("kvferry")
    if binary is None:
        print(no_binary(), flush=True)
        return 1
    deadline = time.monotonic() + arguments.timeout
    drains = [subprocess.Popen([binary, "drain", name, "--force", "--controller", arguments.controller,
                                "--namespace", arguments.namespace, "--timeout", str(arguments.timeout)])
              for name in arguments.names]
    statuses = [drain.wait() for drain in drains]
    has_failed = any(statuses)
    if not serving.wait_idle(arguments.url, max(deadline - time.monotonic(), IDLE_AT_LEAST_S)):
        print(f"requests still run at {arguments.url} {arguments.timeout:.0f} s after the drain began", flush=True)
        has_failed = True
    return 1 if has_failed else 0
