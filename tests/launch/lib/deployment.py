"""A `launch/cluster up` under test: its YAML with stand-in servers, its output, and its processes, which carry a mark.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry_launch.cluster.control import ask
from kvferry_launch.node.guard import descendants
from kvferry_launch.paths import REPO

STANDINS = Path(__file__).parent / "standins"
SERVER = [sys.executable, str(STANDINS / "server.py")]
ROUTER = [sys.executable, str(STANDINS / "router.py")]
CLUSTER = [sys.executable, str(REPO / "launch" / "cluster")]
DEADLINE_S = 60.0


def eventually(condition: Callable[[], bool], what: Callable[[], str] = lambda: "", within_s: float = DEADLINE_S
               ) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:.0f} s: {what()}"
        time.sleep(0.1)


def started_at(pid: int) -> str:
    """Returns the start time of a process, which tells it from a later process with the same id; "" if there is no
    process or only a zombie.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def marked(mark: str) -> dict[int, str]:
    """Returns all processes, except this one, that have the mark in their environment or command. Zombies are not
    included.
    """
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
            if int(folder.name) != os.getpid() and words and mark.encode() in words + (folder / "environ").read_bytes():
                found[int(folder.name)] = words.replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
    return found


class Deployment:
    """The file of a deployment and, after start(), its `up`. The deployment's processes are found by `mark`, which is
    in their commands (as the model) and in their environment variables, on every "host" of this machine.
    """

    def __init__(self, folder: Path, **document: Any) -> None:
        self.mark = f"mark-{uuid.uuid4().hex[:12]}"
        self.folder = folder
        self.file = folder / "deployment.yaml"
        defaults = {"name": "tested", "model": self.mark, "vllm": SERVER, "env": {"KVFERRY_MARK": self.mark},
                    "router": {"command": ROUTER}}
        self.document = defaults | document
        self.write()
        self.env = os.environ | {"KVFERRY_DEPLOYMENTS": str(folder / "run")}
        self.log = folder / "up.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._seen: dict[int, str] = {}

    def remember(self) -> None:
        """Records the marked processes and their descendants, because vLLM's processes overwrite their own environment
        and command.
        """
        found = marked(self.mark)
        for one in {*found, *descendants(*found)}:
            self._seen[one] = started_at(one)

    def left(self) -> dict[int, str]:
        """Returns the deployment's processes that still run."""
        found = {pid: "seen before" for pid, since in self._seen.items() if since and started_at(pid) == since}
        return found | marked(self.mark)

    def write(self) -> None:
        self.file.write_text(json.dumps(self.document))  # JSON is valid YAML too

    def start(self) -> None:
        with self.log.open("wb") as out:
            self.process = subprocess.Popen([*CLUSTER, "up", str(self.file)], stdout=out, stderr=subprocess.STDOUT,
                                            stdin=subprocess.DEVNULL, env=self.env)

    def start_ready(self, within_s: float = DEADLINE_S) -> None:
        self.start()
        eventually(lambda: "ready: " in self.text() or not self.running, self.text, within_s)
        assert self.running, self.text()

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def text(self) -> str:
        """Returns the output of `up` and, if something failed, the logs."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def call(self, *words: str, check: bool = True, within_s: float = DEADLINE_S * 2
             ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([*CLUSTER, words[0], str(self.file), *words[1:]], capture_output=True, text=True,
                              check=False, env=self.env, timeout=within_s)
        assert not check or done.returncode == 0, done.stdout + done.stderr + self.text()
        return done

    def status(self) -> dict[str, Any]:
        """Asks as `launch/cluster status --json` does, but without a new process."""
        self.remember()
        found = ask(self.folder / "run" / str(self.document["name"]), {"do": "status"})
        assert found is not None, self.text()
        return found

    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in self.status()["nodes"]}

    def url(self) -> str:
        return str(self.status()["url"])

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.remember()
        self.process.send_signal(number)

    def wait_end(self, within_s: float = DEADLINE_S) -> int:
        assert self.process is not None
        return self.process.wait(within_s)

    def none_left(self, within_s: float = 30.0) -> None:
        eventually(lambda: not self.left(), lambda: f"{self.left()}\n{self.text()}", within_s)

    def clean_up(self) -> None:
        """Removes the processes that a failed test left. A test that passed leaves none."""
        self.remember()
        if self.process is not None and self.running:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(DEADLINE_S)
            self.process.kill()
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)


def get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=30.0) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def server_pid(deployment: Deployment, name: str) -> int:
    """Returns the process id of the stand-in server, not that of its guard."""
    return int(get(deployment.rows()[name]["url"])["pid"])


def served_by(url: str, requests: int) -> set[str]:
    """Sends `requests` requests through the router, and returns the names of the decode servers that answered."""
    return {str(get(url)["engine_id"]) for _ in range(requests)}


def own_keys(deployment: Deployment) -> list[str]:
    """Returns the names of the servers that have a key of their own in their environment and in a file."""
    rows = {name: row for name, row in deployment.rows().items() if row["role"] in ("prefill", "decode")}
    files = {name: Path(get(row["url"])["key_file"]) for name, row in rows.items()}
    return sorted(name for name, file in files.items()
                  if file.name == f"{name}.key" and file.read_text().splitlines()[1].startswith(f"{name} worker "))
