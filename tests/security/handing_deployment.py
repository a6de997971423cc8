"""A controller and nodes that hand over KV, and have cluster keys or keys of their own, for tests of both."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Protocol

from kvferry.tickets import MEMBERS, signer_of
from kvferry_launch.paths import KVFERRY
from kvferry_launch.process import free_port

HERE = Path(__file__).parent
DEADLINE_S = 60.0
REVOKED_WITHIN_S = 1.0
LOADED = 64  # tokens of a hand-off's prompt that a decode server needs not compute


class Asked(Protocol):
    """A node that answers the questions of handing_node.py."""

    def ask(self, question: dict[str, Any]) -> Any: ...


class Process:
    """A process that answers each line of JSON with one. Threads may ask at the same time: each gets its own answer."""

    def __init__(self, script: str, *arguments: object) -> None:
        # UCX_TLS lets UCX use TCP: a host of tests has no RDMA.
        environment = {"UCX_TLS": "all"} | os.environ if "ucx" in arguments else None
        self.process = subprocess.Popen([sys.executable, HERE / script, *map(str, arguments)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, env=environment)
        self._asking = threading.Lock()
        assert self._answer() == "ready"

    def ask(self, question: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        with self._asking:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process has ended"
        return json.loads(line)


class Traffic:
    """Hands prompts over from one node to the other."""

    def __init__(self, prefill: Asked, decode: Asked) -> None:
        self._prefill, self._decode = prefill, decode
        self._ends = threading.Event()
        self.num_handed_over = self.num_computed = 0
        self.failures: list[Any] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Traffic":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(DEADLINE_S)

    def _run(self) -> None:
        number = 0
        while not self._ends.wait(0.02):  # a hand-off that is not fetched stays in the pool for a minute
            number += 1
            try:
                params = self._prefill.ask({"prefill": number})
                answer = self._decode.ask({"decode": number, "params": params})
            except (AssertionError, OSError, ValueError) as error:
                self.failures.append(repr(error))
                return
            if answer == {"loaded": LOADED, "right": True}:
                self.num_handed_over += 1
            elif answer == {"loaded": 0, "right": True}:
                self.num_computed += 1  # a message was lost with its connection at step 2
            else:
                self.failures.append(answer)

    def goes_on(self) -> None:
        """Waits for three more hand-offs."""
        wanted, deadline = self.num_handed_over + 3, time.monotonic() + DEADLINE_S
        while self.num_handed_over < wanted:
            assert not self.failures, self.failures
            assert time.monotonic() < deadline
            time.sleep(0.01)


class Deployment:
    """A controller and two nodes, each of which has a copy of the key, as on hosts of their own. With `members` the
    nodes have keys of their own, and there is a third node `other`. `path`: the nodes' setting.
    """

    def __init__(self, folder: Path, ended: contextlib.ExitStack, members: bool = False, path: str = "tcp") -> None:
        self.folder = folder
        self.path = path
        self.http = f"127.0.0.1:{free_port()}"
        self.run("kvferry keygen cluster.key")
        nodes = ["prefill", "decode", *(["other"] if members else [])]
        if members:
            for name in nodes:
                self.run(f"kvferry keygen --add-node {name} cluster.key")
        self.copies = [folder / "controller" / "cluster.key",
                       *(folder / name / (f"{name}.key" if members else "cluster.key") for name in nodes)]
        for copy in self.copies:
            copy.parent.mkdir()
        self.copy_to(self.copies)
        of_controller, *of_nodes = self.copies
        self.controller = subprocess.Popen(
            [KVFERRY, "controller", "--bind", "tcp://127.0.0.1:0", "--stream", "none", "--state", "none", "--http",
             self.http, "--cluster-key-file", of_controller], stdout=subprocess.PIPE, text=True)
        ended.callback(kill, self.controller)
        assert self.controller.stdout is not None
        found = re.search(r"listening on (\S+)", self.controller.stdout.readline())
        assert found is not None
        self.endpoint = found[1]
        self.nodes = {key_file.parent.name: Process("handing_node.py", self.endpoint, key_file, key_file.parent.name,
                                                    path) for key_file in of_nodes}
        for node in self.nodes.values():
            ended.callback(kill, node.process)
        self.prefill, self.decode = self.nodes["prefill"], self.nodes["decode"]

    def run(self, line: str) -> None:
        """Runs a command as an operator does, in the folder with the first copy of the key."""
        words = line.partition("#")[0].split()
        assert words[0] == "kvferry"
        subprocess.run([KVFERRY, *words[1:]], cwd=self.folder, check=True, capture_output=True)

    def copy_to(self, copies: list[Path]) -> None:
        for copy in copies:
            shutil.copy2(self.folder / copy.name, copy)
            if (members := self.folder / MEMBERS).exists():
                replaced = copy.with_name("copied")
                shutil.copy2(members, replaced)
                replaced.rename(copy.with_name(MEMBERS))

    def ask(self, command: str, key_file: Path) -> subprocess.CompletedProcess[str]:
        """Runs a command that asks the controller."""
        words = [*command.split(), "--controller", self.endpoint, "--cluster-key-file", key_file]
        return subprocess.run([KVFERRY, *words], capture_output=True, text=True, timeout=DEADLINE_S)

    def status(self, key_file: Path) -> subprocess.CompletedProcess[str]:
        return self.ask("status --json", key_file)

    def http_status(self, key_file: Path, path: str = "/status", body: bytes | None = None) -> int:
        """Returns the HTTP status of a request with the token of the key in a file."""
        request = urllib.request.Request(f"http://{self.http}{path}", data=body, headers={
            "Authorization": f"Bearer {signer_of(str(key_file)).http_token()}"})
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
