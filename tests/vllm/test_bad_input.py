"""Settings that can't work: the server ends, and one line of its log says what is wrong and what is allowed."""

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvferry_launch.node.vllm import KVFERRY_CONNECTOR, KvConnector
from kvferry_launch.paths import LOGS
from kvferry_launch.process import ManagedProcess, free_port, stop_all
from kvferry_launch.testbed.pair import own_cores
from kvferry_launch.testbed.servers import Controller, VllmServer

EXIT_TIMEOUT_S = 300.0

# vLLM puts "(EngineCore pid=123) " before each line of its children, in colour on some hosts.
OUR_LINE = re.compile(r"^(?:\x1b\[[0-9;]*m)*(?:\([^)]*\)\s*)?(?:\x1b\[[0-9;]*m)*\s*(kvferry: .*\S)", re.MULTILINE)

MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

# extra keys -> what the line must name: the key, the value and what is allowed
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "an unknown key": ({"chunk_token": 256}, ("chunk_token", "chunk_tokens")),
    "chunks that no block fits": ({"chunk_tokens": 100}, ("chunk_tokens", "100", "32")),
    "a pool larger than the memory": ({"pool_bytes": MEMORY_BYTES + 2**30}, ("pool_bytes", "are free")),
    "a controller that nobody runs": ({}, ("controller", "tcp://127.0.0.1:")),
}

Bad = dict[str, VllmServer]


@pytest.fixture(scope="module")
def controller() -> Iterator[Controller]:
    running = Controller("bad-input-controller", log_folder=LOGS / "tests")
    running.start()
    try:
        running.wait_ready()
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def bad_servers(kvferry_connector: KvConnector, toy: Path, controller: Controller) -> Iterator[Bad]:
    """One server for each case, all started at once: each has to end by itself."""
    servers: Bad = {}
    for index, (case, (extra, _)) in enumerate(CASES.items()):
        nobody = f"tcp://127.0.0.1:{free_port()}"
        address = nobody if case == "a controller that nobody runs" else controller.address
        servers[case] = VllmServer(f"bad-{case.replace(' ', '-')}", toy, own_cores()[index % 2],
                                   kvferry_connector.config("kv_both", address, extra=extra),
                                   log_folder=LOGS / "tests")
    try:
        for server in servers.values():
            server.start()
        yield servers
    finally:
        stop_all([server.process for server in servers.values()])


@pytest.mark.parametrize("case", CASES)
def test_a_server_ends_with_one_line_on(case: str, bad_servers: Bad) -> None:
    line = line_of_failure(bad_servers[case].process)

    for word in CASES[case][1]:
        assert word in line


def test_a_server_ends_with_one_line_on_another_model_than_its_peers(
        kvferry_connector: KvConnector, toy: Path, other_toy: Path, controller: Controller,
        run_server: Callable[[VllmServer], VllmServer]) -> None:
    """Whichever registers second ends."""
    del kvferry_connector
    servers = [run_server(VllmServer(f"{name}-model", model, core, KVFERRY_CONNECTOR.config(role, controller.address),
                                     log_folder=LOGS / "tests"))
               for name, model, core, role in (("one", toy, own_cores()[0], "kv_producer"),
                                               ("another", other_toy, own_cores()[1], "kv_consumer"))]
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    while all(server.process.running for server in servers):
        assert time.monotonic() < deadline, "both run"
        time.sleep(0.2)
    first, second = sorted(servers, key=lambda server: not server.process.running)

    first.wait_ready()
    assert "model" in line_of_failure(second.process)


def line_of_failure(process: ManagedProcess) -> str:
    """The line with which the server explained its end; it must be one, and say more than a name."""
    status = process.wait(EXIT_TIMEOUT_S)
    assert status is not None, f"still running after {EXIT_TIMEOUT_S:.0f} s:\n{process.tail()}"
    assert status != 0
    lines = set(OUR_LINE.findall(process.log_text()))
    assert len(lines) == 1, f"{lines or 'no line that starts with kvferry:'}\n{process.tail()}"
    return lines.pop()
