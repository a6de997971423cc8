"""Attacks a closed deployment of real processes: a controller and a node with a cluster key. There is no engine."""

import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvferry.tickets import signer_of
from kvferry_launch.paths import KVFERRY
from kvferry_launch.process import free_port

HERE = Path(__file__).parent
ANSWER_MAX = 64  # longest answer that an unknown peer may get, in bytes; ZeroMQ's greeting has this length
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"  # the beginning of ZeroMQ's greeting


@dataclass
class Deployment:
    endpoint: str
    http: str
    unix: Path
    key_file: Path
    state: Path
    controller: subprocess.Popen[str]
    node: subprocess.Popen[str]
    address: bytes

    def ask(self, *command: str, key_file: Path | None = None) -> subprocess.CompletedProcess[str]:
        keys = ["--cluster-key-file", str(key_file)] if key_file else []
        return subprocess.run([KVFERRY, *command, "--controller", self.endpoint, *keys], capture_output=True, text=True,
                              timeout=60)

    def check(self) -> None:
        """Checks that both processes run, that a member gets an answer in time, and that the node still has its chunk
        and its memory.
        """
        assert self.controller.poll() is None
        assert self.node.poll() is None
        started = time.monotonic()
        done = self.ask("status", "--json", key_file=self.key_file)
        assert done.returncode == 0, done.stderr
        assert time.monotonic() - started < 5
        nodes = json.loads(done.stdout)["nodes"]
        assert [(node["engine_id"], node["chunks"], node["leaving"]) for node in nodes] == [("stand-in", 1, False)]
        assert self.node.stdin is not None
        assert self.node.stdout is not None
        self.node.stdin.write("\n")
        self.node.stdin.flush()
        assert json.loads(self.node.stdout.readline()) == {"same": True, "status": "registered"}

    def ports(self) -> list[int]:
        """Returns the TCP ports of the two processes, without the HTTP port, whose refusals are longer texts."""
        found = [port for process in (self.controller, self.node) for port in listening_ports(process.pid)]
        assert len(found) >= 3
        found.remove(int(self.http.rpartition(":")[2]))
        return found


def listening_ports(pid: int) -> list[int]:
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if match := re.fullmatch(r"socket:\[(\d+)\]", str(fd.readlink())):
                inodes.add(match[1])
    rows = [line.split() for name in ("tcp", "tcp6")
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()]
    return [int(row[1].rsplit(":", 1)[1], 16) for row in rows if row[3] == "0A" and row[9] in inodes]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("closed")
    for part in (folder, folder.parent, folder.parent.parent):
        part.chmod(0o755)  # readable for all, because another user looks for the socket and the files in it
    key_file, unix, state = folder / "key", folder / "controller.sock", folder / "state"
    http = f"127.0.0.1:{free_port()}"
    subprocess.run([KVFERRY, "keygen", key_file], check=True, capture_output=True)
    controller = subprocess.Popen(
        [KVFERRY, "controller", "--bind", "tcp://127.0.0.1:0", "--stream", f"unix://{unix}", "--state", str(state),
         "--http", http, "--cluster-key-file", key_file], stdout=subprocess.PIPE, text=True)
    assert controller.stdout is not None
    found = re.search(r"listening on (\S+)", controller.stdout.readline())
    assert found is not None
    node = subprocess.Popen([sys.executable, HERE / "stand_in.py", found[1], key_file, "tcp"], text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert node.stdout is not None
    try:
        told = json.loads(node.stdout.readline())
        made = Deployment(found[1], http, unix, key_file, state, controller, node, bytes.fromhex(told["address"]))
        deadline = time.monotonic() + 20
        while '"chunks": 1' not in made.ask("status", "--json", key_file=key_file).stdout:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield made
    finally:
        for process in (node, controller):
            process.kill()
            process.communicate()


def answer_to(port: int, message: bytes) -> bytes:
    """Returns all bytes that an unknown peer gets within a second after it has sent this message."""
    got = b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as unknown_peer:
        with contextlib.suppress(OSError):
            unknown_peer.sendall(message)
            unknown_peer.shutdown(socket.SHUT_WR)
        unknown_peer.settimeout(1)
        with contextlib.suppress(OSError):
            while len(got) < 65536 and (more := unknown_peer.recv(65536)):
                got += more
    return got


def messages() -> dict[str, bytes]:
    dice = random.Random(20)
    null = GREETING + b"NULL".ljust(20, b"\0") + bytes(32)
    curve = GREETING + b"CURVE".ljust(20, b"\0") + bytes(32)
    return {
        "nothing": b"",
        "garbage": dice.randbytes(1 << 20),
        "zeros": bytes(1 << 16),
        "HTTP": b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n",
        "a hello of TCP without a secret": b"\x01" + bytes(7) + b"KVFERRY1" + bytes(24),
        "ZeroMQ without a mechanism": null + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER",
        "half of CURVE's hello": curve + b"\x04\xc8\x05HELLO\x01\x00" + bytes(100),
        "CURVE's hello of zeros": curve + b"\x04\xc8\x05HELLO\x01\x00" + bytes(192),
        "a message in plain": null + b"\x00\x06" + b"\x91\x92\x01\x0d",
    }


@pytest.mark.parametrize("what", list(messages()))
def test_an_unknown_peer_learns_nothing_and_ends_nobody(deployment: Deployment, what: str) -> None:
    for port in deployment.ports():
        got = answer_to(port, messages()[what])
        assert len(got) <= ANSWER_MAX, got
        assert b"kvferry" not in got.lower()
        assert not re.search(rb"\d\.\d", got)
    deployment.check()


def http_status(deployment: Deployment, path: str, body: bytes | None, **headers: str) -> int:
    request = urllib.request.Request(f"http://{deployment.http}{path}", data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refusal:
        assert b"stand-in" not in refusal.read()
        return refusal.code


QUESTIONS = {"/": None, "/nodes": None, "/status": None, "/overview": None, "/metrics": None, "/workers": None,
             "//nodes": None, "/%6eodes": None, "/healthz/../nodes": None, "/pair": b'{"token_ids": [1]}',
             "/query": b'{"model": "m", "token_ids": [1]}', "/query_by_hash": b'{"model": "m", "seq_hashes": [1]}',
             "/score": b'{"model": "m", "token_ids": [1]}', "/unregister": b'{"instance_id": "a"}'}


@pytest.mark.parametrize("path", list(QUESTIONS))
@pytest.mark.parametrize("token", ["none", "of another key", "in the address"])
def test_without_a_token_http_tells_nothing(deployment: Deployment, path: str, token: str) -> None:
    own = signer_of(str(deployment.key_file)).http_token("admin")
    headers = {"Authorization": "Bearer " + "0" * len(own)} if token == "of another key" else {}
    query = f"?token={own}" if token == "in the address" else ""
    assert http_status(deployment, path + query, QUESTIONS[path], **headers) == 401
    deployment.check()


@pytest.mark.parametrize("role", ["nobody", "reader"])
def test_only_an_admin_makes_the_controller_connect(deployment: Deployment, role: str) -> None:
    headers = {} if role == "nobody" else {
        "Authorization": f"Bearer {signer_of(str(deployment.key_file)).http_token()}"}
    with socket.create_server(("127.0.0.1", 0)) as victim:
        victim.settimeout(1)
        engine = json.dumps({"instance_id": "a", "endpoint": f"tcp://127.0.0.1:{victim.getsockname()[1]}",
                             "modelname": "m", "block_size": 16}).encode()
        assert http_status(deployment, "/register", engine, **headers) == (401 if role == "nobody" else 403)
        with pytest.raises(TimeoutError):
            victim.accept()
    deployment.check()


def test_silent_connections_keep_nobody_waiting(deployment: Deployment) -> None:
    with contextlib.ExitStack() as stack:
        for port in deployment.ports():
            for _ in range(200):
                unknown_peer = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
                unknown_peer.send(GREETING[:random.Random(port).randrange(len(GREETING))])
        deployment.check()
    deployment.check()


@pytest.mark.parametrize("command", [("status",), ("drain", "stand-in", "--force"), ("clear",), ("quota", "0"),
                                     ("purge", "--producer", "stand-in")])
@pytest.mark.parametrize("has_key", [False, True])
def test_without_the_key_no_command_is_executed(deployment: Deployment, tmp_path: Path, command: tuple[str, ...],
                                                has_key: bool) -> None:
    key_file = tmp_path / "key"
    subprocess.run([KVFERRY, "keygen", key_file], check=True, capture_output=True)
    done = deployment.ask(*command, key_file=key_file if has_key else None)
    assert done.returncode != 0, done.stdout
    deployment.check()


@pytest.mark.parametrize("key", ["none", "another"])
def test_without_the_key_no_node_registers(deployment: Deployment, tmp_path: Path, key: str) -> None:
    key_file = tmp_path / "key"
    subprocess.run([KVFERRY, "keygen", key_file], check=True, capture_output=True)
    client = ("import sys; from kvferry.controller import Client\n"
              "with Client(sys.argv[1], engine_id='x', fingerprint='model', cluster_key_file=sys.argv[2]) as c:\n"
              "    sys.exit(0 if c.wait_registered(1) else 3)")
    shown = str(key_file) if key == "another" else ""
    done = subprocess.run([sys.executable, "-c", client, deployment.endpoint, shown], capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 3, done.stderr
    deployment.check()


def test_without_the_secret_nobody_touches_memory(deployment: Deployment) -> None:
    """The attacker has the address with another secret, and a made-up descriptor of the region."""
    forged = re.sub(rb"\xb0.{16}", b"\xb0" + bytes(16), deployment.address, flags=re.DOTALL)
    assert forged != deployment.address
    puller = ("import sys; from kvferry.transport import Direction, Transport\n"
              "memory = bytearray(65536)\n"
              "with Transport(path='tcp', listen_host='127.0.0.1') as t:\n"
              "    own = t.register(memory); peer = t.connect(bytes.fromhex(sys.argv[1]))\n"
              "    t.submit(peer, Direction.PUSH, own, own.exported, [(0, 0, 65536)])\n"
              "    print([(e.ok, e.code) for e in t.wait(10)])")
    done = subprocess.run([sys.executable, "-c", puller, forged.hex()], capture_output=True, text=True, timeout=60)
    assert "True" not in done.stdout, done.stdout
    deployment.check()


NOBODY = 65534


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user_reads_no_key_no_state_and_gives_no_order(deployment: Deployment) -> None:
    probe = """
import os, socket, sys
for path in sys.argv[1:3]:
    try:
        os.listdir(path) if os.path.isdir(path) else open(path)
        print("read", path)
    except PermissionError:
        pass
names = [line.split()[-1] for line in open("/proc/net/unix") if "kvferry" in line.split()[-1]]
for name in {*names, sys.argv[3]}:
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        s = socket.socket(socket.AF_UNIX, kind)
        s.settimeout(1)
        try:
            s.connect(name.replace("@", chr(0), 1) if name.startswith("@") else name)
            s.send(bytes.fromhex("03000000929201") + b"\\x0d")
            answer = s.recv(100)
            if answer:
                print("got", len(answer), "bytes of", name)
        except OSError:
            pass
"""
    done = subprocess.run(["/usr/bin/python3", "-I", "-S", "-c", probe, deployment.key_file, deployment.state,
                           deployment.unix], capture_output=True, text=True, timeout=120, user=NOBODY, group=NOBODY,
                          extra_groups=[], cwd="/")
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
    deployment.check()
