"""Tests the controller's setting lease-ms with a node that stands still."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from deployment import eventually
from kvferry_launch.testbed.servers import CONTROLLER_FLAGS, Controller, running_controller

pytest.importorskip("kvferry._core", reason="the Python module is not built")

NODE = """
import sys, time
from kvferry.controller import Client
with Client(sys.argv[1], engine_id="still", fingerprint="model"):
    time.sleep(600)
"""


@contextmanager
def node(controller: Controller) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", NODE, controller.address]) as process:
        try:
            eventually(lambda: names(controller) == ["still"])
            yield process
        finally:
            process.kill()


def names(controller: Controller) -> list[str]:
    return list(controller.endpoints())


def test_a_node_is_removed_when_it_was_silent_for_the_lease_of_its_controller(tmp_path: Path) -> None:
    short, long = ((*CONTROLLER_FLAGS, "--lease-ms", ms) for ms in ("1000", "600000"))
    with (running_controller("short", tmp_path, short) as first, running_controller("long", tmp_path, long) as second,
          node(first) as of_first, node(second) as of_second):
        for process in (of_first, of_second):
            process.send_signal(signal.SIGSTOP)
        eventually(lambda: names(first) == [])
        time.sleep(3)  # longer than the default lease
        assert names(second) == ["still"]
