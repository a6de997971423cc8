"""Tests the controller's HTTP listener: its pages, nonsensical requests, and clients that are slow or never read."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import re
import resource
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

KVFERRY = Path(__file__).resolve().parents[3] / "build" / "release" / "bin" / "kvferry"


@contextlib.contextmanager
def controller(host: str, *flags: str | Path) -> Iterator[str]:
    with subprocess.Popen([KVFERRY, "controller", "--bind", f"tcp://{host}:0", "--http", f"{host}:0", *flags],
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            found = None
            while found is None:
                line = process.stderr.readline()
                assert line, "the controller ended"
                found = re.search(r"HTTP on (\S+)", line)
            yield found[1]
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with controller("127.0.0.1") as found:
        yield found


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        return probe.connect_ex(("::1", 9)) == errno.ECONNREFUSED


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
def test_it_answers_over_ipv6() -> None:
    with controller("[::1]") as found:
        assert found.startswith("[::1]:")
        assert ask(found, "/healthz") == (200, "ok\n")


def ask(address: str, path: str, body: bytes | None = None, method: str | None = None,
        headers: dict[str, str] | None = None) -> tuple[int, str]:
    request = urllib.request.Request(f"http://{address}{path}", data=body, method=method, headers=headers or {})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        return refusal.code, refusal.read().decode()


def connect(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=20)


def test_what_is_refused_without_a_handler_is_named(address: str) -> None:
    for path, method, status, words in (("/" + "x" * 9000, "GET", 414, "longer than 8192 bytes"),
                                        ("/nodes", "DELETE", 404, "DELETE requests are not served")):
        found, text = ask(address, path, method=method)
        assert found == status
        assert words in text


def test_metrics_status_and_the_page_are_there(address: str) -> None:
    status, metrics = ask(address, "/metrics")
    assert status == 200
    for name in ("lookups_total", "nodes", "engines", "held_keys"):
        assert re.search(rf"^kvferry_controller_{name} \d", metrics, re.MULTILINE), name
    assert json.loads(ask(address, "/status")[1])["nodes"] == []
    assert json.loads(ask(address, "/overview")[1])["nodes"] == []
    assert ask(address, "/healthz") == (200, "ok\n")
    page = ask(address, "/")[1]
    assert "kvferry controller" in page
    assert not re.search(r"(src|href)=", page), "the page needs nothing from elsewhere"


def test_only_a_controller_with_a_state_folder_says_whether_its_state_is_on_disk(address: str, tmp_path: Path) -> None:
    def samples(at: str) -> list[str]:
        return re.findall(r"^kvferry_controller_state_(\w+) \d", ask(at, "/metrics")[1], re.MULTILINE)

    assert samples(address) == []
    with controller("127.0.0.1", "--state", tmp_path / "state") as kept:
        assert samples(kept) == ["durable", "log_bytes", "snapshot_bytes"]


@pytest.mark.parametrize(("path", "body", "word"), [
    ("/query", b"{nonsense", "not a JSON object of at most 8 levels"),
    ("/query", b"[1, 2]", "not a JSON object of at most 8 levels"),
    ("/query", b'{"model": 1}', "model is 1; allowed:"),
    ("/query_by_hash", b'{"model": "m", "seq_hashes": "x"}', "seq_hashes"),
    ("/score", b"{}", "model is missing"),
    ("/register", b'{"instance_id": "a"}', "endpoint is missing"),
    ("/register", b'{"instance_id": "a", "endpoint": "nowhere", "modelname": "m", "block_size": 16}', "endpoint"),
    ("/unregister", b"\xff\xfe", "not a JSON object"),
])
def test_nonsense_is_one_sentence(address: str, path: str, body: bytes, word: str) -> None:
    status, answer = ask(address, path, body)
    assert status == 400, answer
    assert word in json.loads(answer)["error"]


def test_with_a_key_each_request_needs_its_token(tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run([KVFERRY, "keygen", key], check=True, capture_output=True)
    reader, admin = ({"Authorization": "Bearer " + subprocess.run(
        [KVFERRY, "token", "--role", role, "--cluster-key-file", key], check=True, capture_output=True,
        text=True).stdout.strip()} for role in ("reader", "admin"))
    engine = json.dumps({"instance_id": "a", "endpoint": "tcp://127.0.0.1:9", "modelname": "m", "block_size": 16,
                         "additionalsalt": "of a tenant"}).encode()
    with controller("127.0.0.1", "--cluster-key-file", key) as address:
        assert ask(address, "/healthz") == (200, "ok\n")
        with pytest.raises(urllib.error.HTTPError) as refusal:
            urllib.request.urlopen(f"http://{address}/", timeout=20)
        assert refusal.value.code == 401
        assert refusal.value.headers["WWW-Authenticate"] == 'Basic realm="kvferry"'
        assert "that 'kvferry token' prints" in json.load(refusal.value)["error"]
        assert ask(address, "/register", engine)[0] == 401
        assert ask(address, "/status", method="DELETE")[0] == 401
        assert ask(address, "/query", b"x" * (1 << 20))[0] == 401
        status, why = ask(address, "/register", engine, headers=reader)
        assert (status, "kvferry token --role admin" in why) == (403, True)
        assert json.loads(ask(address, "/workers", headers=reader)[1]) == []
        assert ask(address, "/register", engine, headers=admin)[0] == 200
        assert ask(address, "/score", b"{}", headers=reader)[0] == 400, "allowed, and wrong"
        for shown in (ask(address, path, headers=reader)[1] for path in ("/status", "/metrics")):
            assert "of a tenant" not in shown
        with connect(address) as client:  # this request is refused before the client has sent much of it
            client.sendall(b"POST /pair HTTP/1.1\r\nContent-Length: 16000000\r\n\r\n" + bytes(100))
            assert client.recv(100).startswith(b"HTTP/1.1 401 ")
        assert "\nkvferry_controller_http_refused_total 6\n" in ask(address, "/metrics", headers=reader)[1]


def test_unknown_paths_and_methods_name_what_there_is(address: str) -> None:
    status, answer = ask(address, "/nowhere")
    assert status == 404
    assert "POST /pair, /query" in json.loads(answer)["error"]
    assert ask(address, "/status", method="DELETE")[0] in (404, 405)
    assert ask(address, "/query", b"x" * (17 << 20))[0] == 413


def test_a_connection_serves_many_requests_also_with_chunks(address: str) -> None:
    client = http.client.HTTPConnection(address, timeout=20)
    for _ in range(3):
        client.request("POST", "/score", body=iter([b"{", b"}"]), encode_chunked=True,
                       headers={"Transfer-Encoding": "chunked"})
        answer = client.getresponse()
        assert (answer.status, "model is missing" in answer.read().decode()) == (400, True)
        client.request("GET", "/healthz")
        assert client.getresponse().read() == b"ok\n"
    client.close()


def test_slow_silent_and_deaf_clients_keep_nobody_waiting(address: str) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.ExitStack() as clients:
        for i in range(1200):  # more connections than the controller keeps
            client = clients.enter_context(connect(address))
            if i < 100:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)  # this client never reads the answers
            elif i < 600:
                client.sendall(b"POST /pair HTTP/1.1\r\nContent-Length: 100\r\nX-Slow: ")
        for _ in range(3):
            began = time.monotonic()
            assert ask(address, "/healthz") == (200, "ok\n")
            assert ask(address, "/pair", b'{"tokens": [1, 2, 3]}')[0] in (400, 503)
            assert time.monotonic() - began < 1
    assert ask(address, "/healthz") == (200, "ok\n")


def test_the_host_with_most_connections_makes_room_for_others(address: str) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    host, port = address.rsplit(":", 1)
    with contextlib.ExitStack() as clients:
        router = clients.enter_context(socket.create_connection((host, int(port)), source_address=("127.0.0.2", 0)))
        router.settimeout(20)
        for _ in range(1200):  # more connections than the controller keeps, all of them younger than the router's
            clients.enter_context(connect(address))
        assert ask(address, "/healthz") == (200, "ok\n")
        router.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert router.recv(1024).startswith(b"HTTP/1.1 200")
