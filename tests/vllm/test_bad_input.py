"""Tests settings that can't work: the server ends, and one line of its log says what is wrong and what is allowed.

Servers and adapters that differ in a way that is no error get no KV from each other.
"""

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kvferry_launch.node.vllm import KvConnector
from kvferry_launch.paths import LOGS
from kvferry_launch.process import ManagedProcess, free_port, stop_all
from kvferry_launch.testbed import toy_model
from kvferry_launch.testbed.answers import Answer, Report
from kvferry_launch.testbed.client import VllmClient, prefill_then_decode
from kvferry_launch.testbed.pair import own_cores
from kvferry_launch.testbed.prompts import PromptSet
from kvferry_launch.testbed.servers import Controller, VllmServer

EXIT_TIMEOUT_S = 300.0
LORA_RANK = 8

# vLLM puts "(EngineCore pid=123) " before each line of its child processes, in colour on some hosts.
OUR_LINE = re.compile(r"^(?:\x1b\[[0-9;]*m)*(?:\([^)]*\)\s*)?(?:\x1b\[[0-9;]*m)*\s*(kvferry: .*\S)", re.MULTILINE)

MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

# For each case, the extra keys and the words that the log line must contain: the key, the value and what is allowed.
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
    """Starts a server for each case, all at once. Each server must end by itself."""
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


@pytest.fixture(scope="module")
def first_and_second(kvferry_connector: KvConnector, toy: Path, other_toy: Path,
                     controller: Controller) -> Iterator[tuple[VllmServer, VllmServer]]:
    """Starts two servers with different weights in one namespace. The server that registers second must end; the first
    one keeps running.

    The servers load adapters. vLLM's own prefix cache is off, because it takes an adapter's new content for the old
    one.
    """
    flags = ("--no-enable-prefix-caching", "--enable-lora", "--max-lora-rank", str(LORA_RANK))
    servers = [VllmServer(f"{name}-model", model, core, kvferry_connector.config("kv_both", controller.address),
                          flags, {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}, log_folder=LOGS / "tests")
               for name, model, core in (("one", toy, own_cores()[0]), ("another", other_toy, own_cores()[1]))]
    try:
        for server in servers:
            server.start()
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        while all(server.process.running for server in servers):
            assert time.monotonic() < deadline, "both run"
            time.sleep(0.2)
        first, second = sorted(servers, key=lambda server: not server.process.running)
        first.wait_ready()
        yield first, second
    finally:
        stop_all([server.process for server in servers])


def test_a_server_ends_with_one_line_on_another_model_than_its_peers(
        first_and_second: tuple[VllmServer, VllmServer]) -> None:
    assert "model is" in line_of_failure(first_and_second[1].process)


def test_another_rope_is_recomputed_beside_another_connector(
        kvferry_connector: KvConnector, first_and_second: tuple[VllmServer, VllmServer], controller: Controller,
        run_server: Callable[[VllmServer], VllmServer], tmp_path: Path) -> None:
    """Both servers have the same files, but one has --hf-overrides. This one has a namespace of its own, in vLLM's
    MultiConnector.
    """
    first = first_and_second[0]
    ours = kvferry_connector.config("kv_both", controller.address, extra={"namespace": "another-rope"})
    example = {"kv_connector": "ExampleConnector", "kv_role": "kv_both",
               "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}
    config = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
              "kv_connector_extra_config": {"connectors": [ours, example]}}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    overridden = run_server(VllmServer("another-rope", first.model, own_cores()[1], config,
                                       ("--hf-overrides", json.dumps(rope)), log_folder=LOGS / "tests"))
    overridden.wait_ready()
    prompt = PromptSet(881, 1, 300, 300).prompts()[0]

    async def ask() -> tuple[Answer, list[int], list[int], dict[str, float]]:
        async with VllmClient(first.url) as prefill, VllmClient(overridden.url) as decode:
            alone = (await decode.generate(prompt, 20, cache_salt="alone")).tokens
            answer = await prefill_then_decode(prefill, decode, prompt, 20)
            return answer, alone, (await prefill.generate(prompt, 20)).tokens, await decode.metrics()

    answer, alone, without_override, metrics = asyncio.run(ask())
    assert answer.generation is not None, answer.error
    assert answer.generation.tokens == alone
    assert without_override != alone  # so KV of the other server would have changed the tokens
    line = next(line for line in overridden.process.log_text().splitlines() if "different models" in line)
    assert "rope (the rotary embedding) is" in line
    assert "gets no KV from the prefill node" in line
    assert metrics["kvferry_lookups_total"] >= 2
    # The other connector has kept the prompt since the first request and loads it for the second request, because it
    # ignores salts.
    assert "External Cache Hit!" in overridden.process.log_text()
    assert overridden.healthy()


def test_an_adapter_that_is_loaded_again_in_place_gets_no_old_kv(
        first_and_second: tuple[VllmServer, VllmServer], tmp_path: Path) -> None:
    url = first_and_second[0].url
    prompt = PromptSet(882, 1, 300, 300).prompts()[0]

    async def load(name: str, seed: int, in_place: bool = False) -> None:
        body = {"lora_name": name, "lora_path": str(make_adapter(tmp_path / name, seed)), "load_inplace": in_place}
        async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/load_lora_adapter", json=body) as answer:
            assert answer.status == 200, await answer.text()

    async def ask() -> tuple[list[int], ...]:
        async with VllmClient(url) as client:
            await load("adapter", seed=1)
            before = await client.generate(prompt, 20, model="adapter")
            again = await client.generate(prompt, 20, {"kvferry_report": True}, model="adapter")
            report = Report.of(again)
            assert report is not None
            assert report.admissions[0].loaded >= 256  # 256 tokens are all full chunks of the prompt
            await load("adapter", seed=2, in_place=True)
            after = await client.generate(prompt, 20, model="adapter")
            await load("other", seed=2)
            alone = await client.generate(prompt, 20, model="other", cache_salt="alone")
            return before.tokens, again.tokens, after.tokens, alone.tokens

    before, again, after, alone = asyncio.run(ask())
    assert again == before
    assert after == alone
    assert after != before


def make_adapter(folder: Path, seed: int) -> Path:
    """Writes a LoRA adapter of the toy model's keys and values."""
    shape = toy_model.KINDS["toy"]
    size = shape.kv_heads * shape.head_size
    return toy_model.make_adapter(folder, seed, [f"model.layers.{layer}.self_attn" for layer in range(shape.layers)],
                                  shape.hidden, {"k_proj": size, "v_proj": size}, LORA_RANK)


def line_of_failure(process: ManagedProcess) -> str:
    """Returns the line with which the server explained its end. There must be only one, and it must say more than a
    name.
    """
    status = process.wait(EXIT_TIMEOUT_S)
    assert status is not None, f"still running after {EXIT_TIMEOUT_S:.0f} s:\n{process.tail()}"
    assert status != 0
    lines = {line for line in OUR_LINE.findall(process.log_text()) if "hand-offs are not signed" not in line}
    assert len(lines) == 1, f"{lines or 'no line that starts with kvferry:'}\n{process.tail()}"
    return lines.pop()
