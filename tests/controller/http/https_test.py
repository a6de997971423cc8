"""Tests the controller's HTTPS: real certificates, clients that do not trust them, speak no TLS, or are slow."""

import contextlib
import http.client
import json
import re
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import lock, make_certificate

KVFERRY = Path(__file__).resolve().parents[3] / "build" / "release" / "bin" / "kvferry"


@contextlib.contextmanager
def controller(certificate: Path, key: Path) -> Iterator[tuple[str, int]]:
    """Yields the host and the port."""
    with subprocess.Popen([KVFERRY, "controller", "--bind", "tcp://127.0.0.1:0", "--http", "127.0.0.1:0", "--state",
                           "none", "--http-cert-file", certificate, "--http-key-file", key],
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            found = None
            while found is None:
                line = process.stderr.readline()
                assert line, "the controller ended"
                found = re.search(r"HTTP on 127.0.0.1:(\d+) \(HTTPS\)", line)
            yield "127.0.0.1", int(found[1])
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def served(files: tuple[Path, Path]) -> Iterator[tuple[str, int]]:
    with controller(*files) as place:
        yield place


def trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certificate)


def get(place: tuple[str, int], certificate: Path, path: str = "/healthz") -> bytes:
    client = http.client.HTTPSConnection(*place, context=trusting(certificate), timeout=20)
    try:
        client.request("GET", path)
        return client.getresponse().read()
    finally:
        client.close()


def test_it_answers_over_tls_13_alone(served: tuple[str, int], files: tuple[Path, Path]) -> None:
    with socket.create_connection(served, timeout=20) as plain, \
            trusting(files[0]).wrap_socket(plain, server_hostname=served[0]) as client:
        assert client.version() == "TLSv1.3"
        for _ in range(2):  # the connection is kept
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(1000).endswith(b"ok\n")
    old = trusting(files[0])
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(served, timeout=20) as plain, pytest.raises(ssl.SSLError):
        old.wrap_socket(plain, server_hostname=served[0])


def test_a_client_that_knows_no_such_authority_refuses_it(served: tuple[str, int]) -> None:
    with socket.create_connection(served, timeout=20) as plain, pytest.raises(ssl.SSLCertVerificationError):
        ssl.create_default_context().wrap_socket(plain, server_hostname=served[0])


def test_large_requests_and_answers_arrive_whole(served: tuple[str, int], files: tuple[Path, Path]) -> None:
    page = get(served, files[0], "/")
    assert page.startswith(b"<!doctype html>")
    assert page.rstrip().endswith(b"</html>")
    client = http.client.HTTPSConnection(*served, context=trusting(files[0]), timeout=20)
    for size in (16 << 10, (16 << 10) + 1, 1 << 20, 4 << 20):
        client.request("POST", "/score", json.dumps({"more": "x" * size}))
        answer = client.getresponse()
        assert answer.status == 400
        assert json.loads(answer.read())
    client.close()


def test_a_client_without_tls_gets_one_line(served: tuple[str, int]) -> None:
    for words in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00" * 100):
        with socket.create_connection(served, timeout=20) as client:
            client.sendall(words)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while more := client.recv(1000):
                    answer += more
        assert b"https://" in answer
        assert len(answer) <= 64


def test_broken_tls_ends_its_own_connection_only(served: tuple[str, int], files: tuple[Path, Path]) -> None:
    for words in (b"\x16", b"\x16\x03\x01\xff\xff" + b"\x01" * 70000, b"\x16\x03\x01\x00\x05hello" * 1000):
        with socket.create_connection(served, timeout=20) as client, contextlib.suppress(OSError):
            client.sendall(words)
            client.shutdown(socket.SHUT_WR)
            while client.recv(1000):
                pass
    assert get(served, files[0]) == b"ok\n"


def test_a_handshake_that_stops_is_ended_after_five_seconds(served: tuple[str, int], files: tuple[Path, Path]) -> None:
    with contextlib.ExitStack() as open_ones:
        silent = [open_ones.enter_context(socket.create_connection(served, timeout=20)) for _ in range(200)]
        for client in silent:
            client.sendall(b"\x16\x03\x01\x02")
        begin = time.monotonic()
        assert get(served, files[0]) == b"ok\n"
        assert time.monotonic() - begin < 2
        for client in silent:
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(100) == b""
        assert time.monotonic() - begin < 10


def test_a_renewed_certificate_is_used_without_a_restart(tmp_path: Path) -> None:
    files = make_certificate(tmp_path)
    with controller(*files) as place:
        assert get(place, files[0]) == b"ok\n"
        former = tmp_path / "former.crt"
        former.write_bytes(files[0].read_bytes())
        files[0].write_text("nonsense")  # as long as the new ones are not there, the former ones stay
        time.sleep(1.2)
        assert get(place, former) == b"ok\n"
        make_certificate(tmp_path)
        time.sleep(1.2)
        assert get(place, files[0]) == b"ok\n"
        with pytest.raises(ssl.SSLCertVerificationError):
            get(place, former)


def refusal(*flags: str | Path) -> str:
    ended = subprocess.run([KVFERRY, "controller", "--bind", "tcp://127.0.0.1:0", "--state", "none", *flags],
                           capture_output=True, text=True, timeout=20, check=False)
    assert ended.returncode != 0
    return ended.stderr


def test_files_that_are_no_certificate_are_refused_by_one_sentence(files: tuple[Path, Path], tmp_path: Path) -> None:
    certificate, key = files
    other = make_certificate(tmp_path, "other")[1]
    web = ("--http", "127.0.0.1:0", "--http-cert-file", certificate)
    assert "but 'http-key-file' is not set" in refusal(*web)
    assert "but 'http' is not set" in refusal("--http-cert-file", certificate, "--http-key-file", key)
    assert "can't be read as a certificate in PEM: no start line" in refusal(*web[:3], key, "--http-key-file", key)
    assert "No such file" in refusal(*web[:3], tmp_path / "none", "--http-key-file", key)
    assert "key values mismatch" in refusal(*web, "--http-key-file", other)
    assert "without a password" in refusal(*web, "--http-key-file", lock(key, tmp_path / "locked.key"))
