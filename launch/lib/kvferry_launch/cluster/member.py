"""One node of a running deployment: reads the node's output, keeps its state, decides when the node is restarted."""

import math
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry_launch.cluster.child import Child
from kvferry_launch.cluster.plan import Found, Node

SERVES = re.compile(r"kvferry \w+ node serves at (\S+)")
SILENT = re.compile(r"kvferry \w+ node does not answer at ")
LISTENS = re.compile(r"kvferry controller listening on (tcp://\S+)")
HTTP = re.compile(r"\bHTTP on (\S+)( \(HTTPS\))?$")
# Matches a line that may say why a node ended. Warnings and the lines of Slurm don't say that.
COMPLAINT = re.compile(r"^(?!.*warning|srun: |slurmstepd: )"
                       r"(.*(error\b|exception\b|refused|denied|can't|cannot)|kvferry.*: |launch/\w+: )", re.IGNORECASE)
# Matches an error of kvferry. Such a line explains more than the errors of vLLM that follow in the log.
OWN_REASON = re.compile(r"(?:^(?:\(\w+ pid=\d+\) )?|KvFerryError: )(kvferry: .*)")
EXCEPTION = re.compile(r"(?:^|\] )((?:\w+\.)*\w+(?:Error|Exception): .*)")
ROOT_CAUSE = "root cause"  # vLLM's last exceptions only say that the log has the root cause above them
SIGNAL_HINTS = {"SIGKILL": " (kill -9, or the host ran out of memory)", "SIGSEGV": " (a crash)",
                "SIGABRT": " (a crash)"}
BACK_OFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)
REVOKED = "its member key was revoked"
# A node whose key was revoked is ended after this time. While the node runs, its next message lets the controller
# remove it; a node that has ended is removed only after 2.5 s of silence.
REVOKED_ENDS_AFTER_S = 2.0
FORGIVEN_AFTER_S = 300.0  # if a node was ready for this long, the count of its restarts begins at 0 again

WAITING = "waiting"
STARTING = "starting"
READY = "ready"
UNREADY = "unready"
DRAINING = "draining"
STOPPING = "stopping"
RESTARTING = "restarting"
FAILED = "failed"
STOPPED = "stopped"


def why_ended(status: int, complaint: str, last_line: str) -> str:
    """Returns a text that says how a node's process ended. `status`: the exit status. If signal N ended the process,
    the status is 128 + N (from guard.py) or -N (from Popen).
    """
    try:
        name = signal.Signals(-status if status < 0 else status - 128).name
    except ValueError:
        return f"ended with status {status}: {complaint or last_line or 'it printed nothing'}"
    # A process that a signal ends prints no reason, so the text does not present its last line of output as one.
    rest = f": {complaint}" if complaint else f"; its last line was: {last_line}" if last_line else ""
    return f"ended by {name}{SIGNAL_HINTS.get(name, '')}{rest}"


@dataclass
class Member:
    node: Node
    restarts_max: int
    ready_timeout_s: float
    child: Child | None = None
    state: str = WAITING
    url: str = ""
    detail: str = ""
    since: float = field(default_factory=time.time)
    restarts: int = 0
    is_late: bool = False  # True if the next start is a restart, or if `scale` added the node
    leaving: bool = False
    revoked_at: float | None = None
    keys: list[str] = field(default_factory=list)  # the lines with keys and members that were sent to the guard
    address: str = ""  # the endpoint for nodes if this node is the controller and has reported it, otherwise ""
    _due: float = 0.0
    _ready_at: float = 0.0
    _started_at: float = 0.0
    _complaint: str = ""
    _exception: str = ""
    _own_reason: str = ""

    def become(self, state: str, detail: str = "") -> None:
        if (state, detail) != (self.state, self.detail):
            if state != self.state:
                self.since = time.time()
            self.state, self.detail = state, detail

    @property
    def wants_start(self) -> bool:
        """True if the node has to be started now, for the first time or again after its process ended."""
        running = self.child is not None and self.child.running
        return (not running and not self.leaving and self.state in (WAITING, RESTARTING)
                and time.monotonic() >= self._due)

    @property
    def port(self) -> int | None:
        """The port at which the node serves, or served before its last process ended. None if the node has not served
        yet, or if its last process ended before it was ready.
        """
        found = re.search(r":(\d+)/?$", self.address or self.url)
        return int(found[1]) if found else None

    def start(self, command: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.child = Child(self.node.name, command, log, env)
        self.keys = []
        self._complaint = self._exception = self._own_reason = ""
        self._started_at = time.monotonic()
        self.is_late = True
        self.become(STARTING, self.detail if self.restarts else "")
        try:
            self.child.start()
        except OSError as error:
            self._end(f"can't be started: {error.strerror or error}")

    def tell_keys(self, lines: list[str]) -> None:
        """Sends the lines, which have keys and members, to the guard, except for those that the previous call since
        start() had too.
        """
        if self.child is not None:
            for line in lines:
                if line not in self.keys:
                    self.child.tell(line)
            self.keys = lines

    def revoke(self) -> None:
        """Begins the node's end after its key was revoked: the router drops the node, look() ends its process after
        REVOKED_ENDS_AFTER_S, and the node is not restarted.
        """
        self.revoked_at = time.monotonic()
        self.become(FAILED if self.child is None else STOPPING, REVOKED)

    @property
    def is_revoked(self) -> bool:
        return self.revoked_at is not None

    def read(self) -> None:
        """Reads the node's new output, and updates the state from the reports in it."""
        if self.child is None:
            return
        for line in self.child.lines():
            if own := OWN_REASON.search(line):
                self._own_reason = own[1]
            elif COMPLAINT.search(line):
                self._complaint = line
                if (found := EXCEPTION.search(line)) and ROOT_CAUSE not in line:
                    self._exception = found[1]
            if self.node.role == "controller":
                self._read_controller(line)
            elif found := SERVES.search(line):
                self.url = found[1]
                self._ready()
            elif SILENT.search(line) and self.state == READY:
                self.become(UNREADY, "its server does not answer /health")

    def look(self) -> None:
        """Updates the state if the node has ended. Ends a node that has not become ready in time, whose key was
        revoked, or that does not end although it was told to. Sets the count of restarts to 0 once the node has been
        ready for FORGIVEN_AFTER_S.
        """
        if self.child is None or self.child.exit_status is None:
            late = time.monotonic() - self._started_at > self.ready_timeout_s
            if self.state == STARTING and late and self.child is not None:
                self._complaint = f"not ready after {self.ready_timeout_s:.0f} s (ready_timeout_s)"
                self.child.close()
            if self.state == READY and self.restarts and time.monotonic() - self._ready_at > FORGIVEN_AFTER_S:
                self.restarts = 0
            if self.child is not None and time.monotonic() - (self.revoked_at or math.inf) > REVOKED_ENDS_AFTER_S:
                self.child.close()
            if self.child is not None and self.child.overdue:
                self.child.end_now()
            return
        reason = self._own_reason or (self._exception if ROOT_CAUSE in self._complaint else "") or self._complaint
        self._end(why_ended(self.child.exit_status, reason, self.child.last_line))

    def _end(self, why: str) -> None:
        """Records that the node's process has ended or could not be started, and plans the restart, if there is one."""
        self.child = None
        if self.leaving:
            self.become(STOPPED, why if self.state == DRAINING else "")
            return
        served = self._ready_at > 0.0
        self._ready_at = 0.0
        if not served:
            # Another process may have taken the old port, so the next start gets the port in the deployment's file
            # again (0: any free port).
            self.url = self.address = ""
        if self.is_revoked or self.restarts >= self.restarts_max:
            self.become(FAILED, REVOKED if self.is_revoked else why)
            return
        self._due = time.monotonic() + BACK_OFF_S[min(self.restarts, len(BACK_OFF_S) - 1)]
        self.restarts += 1
        self.become(RESTARTING, f"restart {self.restarts} of {self.restarts_max}: {why}")

    def found(self) -> Found:
        """Returns the controller's addresses. This node must be the controller."""
        return Found(self.address, self.url)

    def row(self) -> dict[str, Any]:
        return {"name": self.node.name, "role": self.node.role, "host": self.node.place.name, "state": self.state,
                "url": self.address or self.url, "pid": self.child.pid if self.child else None,
                "since": time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(self.since)), "restarts": self.restarts,
                "detail": self.detail}

    def _read_controller(self, line: str) -> None:
        if found := HTTP.search(line):
            scheme = "https" if found[2] else "http"
            self.url = f"{scheme}://{self.node.place.address}:{found[1].rpartition(':')[2]}"
        elif found := LISTENS.search(line):
            self.address = f"tcp://{self.node.place.address}:{found[1].rpartition(':')[2]}"
            self._ready()

    def _ready(self) -> None:
        self._ready_at = time.monotonic()
        if not self.leaving and not self.is_revoked:
            self.become(READY)
