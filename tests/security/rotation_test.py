"""Replaces the cluster key of a controller and two nodes by the commands of operations.md, while they hand over KV."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from documents import fenced_commands
from kvferry.tickets import HANDOFF, signer_of
from kvferry_launch.paths import KVFERRY, REPO
from kvferry_launch.process import free_port

HERE = Path(__file__).parent
DEADLINE_S = 60.0
REVOKED_WITHIN_S = 1.0
LOADED = 64  # tokens of a hand-off's prompt that a decode server needs not compute


class Process:
    """A process that answers each line of JSON with one."""

    def __init__(self, script: str, *arguments: object) -> None:
        self.process = subprocess.Popen([sys.executable, HERE / script, *map(str, arguments)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)
        assert self._answer() == "ready"

    def ask(self, question: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
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

    def __init__(self, prefill: Process, decode: Process) -> None:
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
    """A controller and two nodes, each of which has a copy of the key, as on hosts of their own."""

    def __init__(self, folder: Path, ended: contextlib.ExitStack) -> None:
        self.folder = folder
        self.http = f"127.0.0.1:{free_port()}"
        self.copies = [folder / name / "cluster.key" for name in ("controller", "prefill", "decode")]
        for copy in self.copies:
            copy.parent.mkdir()
        self.run("kvferry keygen cluster.key")
        self.copy_to(self.copies)
        of_controller, of_prefill, of_decode = self.copies
        controller = subprocess.Popen(
            [KVFERRY, "controller", "--bind", "tcp://127.0.0.1:0", "--stream", "none", "--state", "none", "--http",
             self.http, "--cluster-key-file", of_controller], stdout=subprocess.PIPE, text=True)
        ended.callback(kill, controller)
        assert controller.stdout is not None
        found = re.search(r"listening on (\S+)", controller.stdout.readline())
        assert found is not None
        self.endpoint = found[1]
        self.prefill, self.decode = (Process("handing_node.py", self.endpoint, key_file, key_file.parent.name)
                                     for key_file in (of_prefill, of_decode))
        for node in (self.prefill, self.decode):
            ended.callback(kill, node.process)

    def run(self, line: str) -> None:
        """Runs a command as an operator does, in the folder with the first copy of the key."""
        words = line.partition("#")[0].split()
        assert words[0] == "kvferry"
        subprocess.run([KVFERRY, *words[1:]], cwd=self.folder, check=True, capture_output=True)

    def copy_to(self, copies: list[Path]) -> None:
        for copy in copies:
            shutil.copy2(self.folder / "cluster.key", copy)

    def status(self, key_file: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([KVFERRY, "status", "--json", "--controller", self.endpoint, "--cluster-key-file",
                               key_file], capture_output=True, text=True, timeout=DEADLINE_S)

    def http_status(self, key_file: Path) -> int:
        """Returns the HTTP status of a request with the token of the key in a file."""
        request = urllib.request.Request(f"http://{self.http}/status", headers={
            "Authorization": f"Bearer {signer_of(str(key_file)).http_token()}"})
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    pytest.importorskip("kvferry._core", reason="the Python module is not built")
    with contextlib.ExitStack() as ended:
        yield Deployment(tmp_path, ended)


def steps_of_the_document() -> list[str]:
    lines = fenced_commands((REPO / "launch/docs/operations.md").read_text())
    return [line for line in lines if re.match(r"kvferry keygen --(add|switch|retire) ", line)]


def test_a_key_is_replaced_without_a_failed_request_and_then_the_former_opens_nothing(deployment: Deployment,
                                                                                    tmp_path: Path) -> None:
    former = tmp_path / "former.key"
    shutil.copy2(tmp_path / "cluster.key", former)
    assert deployment.status(former).returncode == 0
    assert deployment.http_status(former) == 200
    steps = steps_of_the_document()
    assert [step.split()[2] for step in steps] == ["--add", "--switch", "--retire"]
    with Traffic(deployment.prefill, deployment.decode) as traffic:
        traffic.goes_on()
        for number, step in enumerate(steps):
            deployment.run(step)
            for copy in deployment.copies[number:] + deployment.copies[:number]:  # in another order each time
                deployment.copy_to([copy])
                time.sleep(REVOKED_WITHIN_S)
                traffic.goes_on()
        assert deployment.http_status(former) == 401
        assert deployment.status(former).returncode != 0
        for key_file in (deployment.copies[0], tmp_path / "cluster.key"):
            assert deployment.http_status(key_file) == 200
            names = {node["engine_id"] for node in json.loads(deployment.status(key_file).stdout)["nodes"]}
            assert names == {"prefill", "decode"}
    assert traffic.failures == []
    assert traffic.num_handed_over > 30


def test_a_former_key_opens_nothing_a_second_after_the_file_was_replaced(deployment: Deployment, tmp_path: Path
                                                                         ) -> None:
    """Replaces the key at once, as after a theft; one node does not get the new file."""
    _, of_prefill, of_decode = deployment.copies
    params = deployment.prefill.ask({"prefill": 1})
    assert deployment.decode.ask({"decode": 1, "params": params}) == {"loaded": LOADED, "right": True}
    params = deployment.prefill.ask({"prefill": 2})
    (tmp_path / "cluster.key").unlink()
    deployment.run("kvferry keygen cluster.key")
    deployment.copy_to([copy for copy in deployment.copies if copy != of_prefill])
    time.sleep(REVOKED_WITHIN_S)
    assert deployment.http_status(of_prefill) == 401
    assert deployment.decode.ask({"decode": 2, "params": params})["why"] == "a ticket with a wrong signature"
    forged = signer_of(str(of_decode)).signed(HANDOFF, params)
    assert deployment.decode.ask({"decode": 2, "params": forged}) == {"loaded": 0, "right": True}
    assert deployment.status(of_prefill).returncode != 0
    assert deployment.status(of_decode).returncode == 0
