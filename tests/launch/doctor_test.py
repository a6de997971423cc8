"""Tests kvferry doctor --security: it finds sockets without a key and key files that others can read, and names the
process.
"""

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import make_certificate
from kvferry_launch.paths import KVFERRY


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    subprocess.run([KVFERRY, "keygen", tmp_path / "key"], check=True, capture_output=True)
    return tmp_path / "key"


@contextlib.contextmanager
def controller(bind: str, *options: str | Path, folder: Path | None = None) -> Iterator[tuple[int, str]]:
    with subprocess.Popen([KVFERRY, "controller", "--bind", bind, *options], stdout=subprocess.PIPE,
                          text=True, cwd=folder) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"listening on (\S+)", process.stdout.readline())
            assert found is not None
            yield process.pid, found[1]
        finally:
            process.terminate()


def examine(*options: str | int) -> tuple[int, str]:
    done = subprocess.run([KVFERRY, "doctor", "--security", *map(str, options)], capture_output=True, text=True,
                          timeout=60)
    return done.returncode, done.stdout


def test_a_controller_that_asks_for_the_key_is_in_order(key_file: Path) -> None:
    with controller("tcp://0.0.0.0:0", "--cluster-key-file", key_file, "--http", "0.0.0.0:0") as (pid, _):
        assert examine("--pid", pid) == (0, "1 processes of kvferry, 0 weaknesses\n")


def test_loopback_needs_no_key() -> None:
    with controller("tcp://127.0.0.1:0") as (pid, endpoint):
        assert examine("--pid", pid, "--controller", endpoint)[0] == 0


def test_a_socket_without_a_key_is_named() -> None:
    with controller("tcp://0.0.0.0:0", "--insecure", "--http", "0.0.0.0:0") as (pid, endpoint):
        status, said = examine("--pid", pid)
        port = endpoint.rsplit(":", 1)[1]
        assert status == 1
        assert (f"process {pid} listens at 0.0.0.0:{port}, which other hosts can reach, and asked for no cluster key"
                in said)
        assert said.endswith("1 processes of kvferry, 2 weaknesses\n")  # the second weakness is the HTTP listener


def test_a_key_file_that_others_read_is_named(key_file: Path) -> None:
    with controller("tcp://0.0.0.0:0", "--cluster-key-file", key_file) as (pid, _):
        key_file.chmod(0o644)
        status, said = examine("--pid", pid)
        assert status == 1
        assert f"process {pid}: cluster_key_file {key_file}: the file has mode 0644" in said


def test_a_key_file_is_found_from_another_folder(key_file: Path) -> None:
    with controller("tcp://0.0.0.0:0", "--cluster-key-file", "key", folder=key_file.parent) as (pid, _):
        assert examine("--pid", pid) == (0, "1 processes of kvferry, 0 weaknesses\n")
        key_file.chmod(0o644)
        assert f"process {pid}: cluster_key_file {key_file}: the file has mode 0644" in examine("--pid", pid)[1]


def test_a_controller_elsewhere_is_examined_by_its_endpoint(key_file: Path) -> None:
    host = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False).stdout.split()
    if not host:
        pytest.skip("this host has no address but loopback")
    with controller("tcp://0.0.0.0:0", "--insecure") as (_, endpoint):
        elsewhere = f"tcp://{host[0]}:{endpoint.rsplit(':', 1)[1]}"
        status, said = examine("--pid", 1, "--controller", elsewhere)
        assert (status, "does not ask for a cluster key" in said) == (1, True)
    with controller("tcp://0.0.0.0:0", "--cluster-key-file", key_file) as (_, endpoint):
        elsewhere = f"tcp://{host[0]}:{endpoint.rsplit(':', 1)[1]}"
        assert examine("--pid", 1, "--controller", elsewhere)[0] == 0


def test_a_controller_with_https_is_asked_for_a_token_too(key_file: Path, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    https = ("--http", "0.0.0.0:0", "--http-cert-file", certificate, "--http-key-file", key)
    with controller("tcp://0.0.0.0:0", *https, "--cluster-key-file", key_file) as (pid, _):
        assert examine("--pid", pid)[0] == 0
    with controller("tcp://127.0.0.1:0", *https, "--insecure") as (pid, _):
        status, said = examine("--pid", pid)
        assert (status, "asked for no cluster key when it was tried" in said) == (1, True)
