"""Tests that the scripts accept the endpoints that the programs in C++ accept, and refuse those that these refuse."""

import subprocess

import pytest
from kvferry_launch.node.endpoints import PATH_BYTES_MAX, Endpoint, parse_endpoint, parse_endpoints
from kvferry_launch.paths import KVFERRY

LONGEST = "/" + (PATH_BYTES_MAX - 1) * "x"


@pytest.mark.parametrize(("text", "endpoint"), [
    ("tcp://a-b.example:1", Endpoint("a-b.example", 1)), ("stream://10.0.0.1:65535", Endpoint("10.0.0.1", 65535)),
    ("tcp://[::1]:14600", Endpoint("::1", 14600)), ("tcp://[fe80::1%eth0]:7", Endpoint("fe80::1%eth0", 7)),
    ("tcp://[::ffff:10.0.0.1]:7", Endpoint("::ffff:10.0.0.1", 7)), ("ipc://relative/x", Endpoint(path="relative/x")),
    (f"unix://{LONGEST}", Endpoint(path=LONGEST)), ("ipc:///tmp/", Endpoint(path="/tmp/"))])
def test_what_is_an_endpoint(text: str, endpoint: Endpoint) -> None:
    assert parse_endpoints(text) == [endpoint]


@pytest.mark.parametrize("text", [
    "", "a:1", "http://a:1", "tcp://", "tcp://a", "tcp://a:", "tcp://:1", "tcp://a:0", "tcp://a:65536", "tcp://a:+1",
    "tcp://a:1x", "tcp://a:1:2", "tcp://::1:80", "tcp://[::1]", "tcp://[::1", "tcp://[]:1", "tcp://[host]:1",
    "tcp://[1.2.3.4]:1", "tcp://[::g]:1", "tcp://[%eth0]:1", "tcp://[::1]80", "tcp://a b:1", "tcp://a/b:1",
    "tcp://a;b:1", "tcp://u@a:1", "tcp://a\t:1", "tcp://a\x7f:1", "tcp://caf\u00e9:1", "tcp://a:\u0661", "ipc://",
    "unix://", "unix://relative", "unix:///tmp/", f"unix://{LONGEST}x", f"ipc://{LONGEST}x", "tcp://a:1,",
    "tcp://a:1,tcp://a:1"])
def test_what_the_programs_refuse_the_scripts_refuse_too(text: str) -> None:
    assert parse_endpoints(text) is None
    if "," in text or not text:  # the program names the members of a list one by one, and has a default
        return
    done = subprocess.run([KVFERRY, "status", "--controller", text], capture_output=True, text=True, check=False,
                          timeout=20)
    assert done.returncode != 0
    assert "allowed: tcp://HOST:PORT or stream://HOST:PORT" in done.stderr


def test_listeners_may_take_any_free_port() -> None:
    assert parse_endpoint("tcp://a:0") == Endpoint("a", 0)
    assert parse_endpoint("unix:///x", ("tcp://", "ipc://")) is None
