"""Runs the regression rows on real vLLM: one server with only KvFerryConnector (kv_both), compared with the plain
server.

The CPU backend's smallest block size is 32, so the numbers of the original rows are doubled. tests/connector has the
same rows for the C++ core, with the original numbers.
"""

import asyncio
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from kvferry_launch.node.vllm import KvConnector
from kvferry_launch.paths import LOGS
from kvferry_launch.process import ManagedProcess, stop_all
from kvferry_launch.testbed.answers import Admission, Answer, Report
from kvferry_launch.testbed.client import VllmClient, run_load
from kvferry_launch.testbed.pair import own_cores
from kvferry_launch.testbed.prompts import PromptSet
from kvferry_launch.testbed.reference import Reference
from kvferry_launch.testbed.servers import Controller, VllmServer

REPORT = {"kvferry_report": True}
BLOCK = 32

PROMPTS_000 = [[1] * 68, [2] * 68]
TOKENS_000 = 70
BLOCKS_001 = 10
# the prompts have ten tokens and differ only in the first one
PROMPTS_001 = [[first, *range(100, 109)] for first in (1, 2)]
TOKENS_001 = 5 + BLOCK * ((BLOCKS_001 - 3) - 1)
PROMPTS_003 = PromptSet(seed=3, count=12).prompts()
TOKENS_003 = 60
PROMPT_004 = [7 + i % 300 for i in range(100)]
TOKENS_004, MORE_TOKENS_004 = 2000, 20


@dataclass(frozen=True)
class Row:
    """How the server of one row is started."""

    flags: tuple[str, ...]
    extra: dict[str, Any] = field(default_factory=dict)


ROWS = {
    "row-000": Row(("--num-gpu-blocks-override", "7", "--max-model-len", "160"), {"chunk_tokens": BLOCK}),
    "row-001": Row(("--num-gpu-blocks-override", str(BLOCKS_001), "--max-model-len", "256",
                    "--no-enable-prefix-caching"), {"chunk_tokens": BLOCK}),
    "row-003": Row(("--num-gpu-blocks-override", "24", "--max-model-len", "704", "--max-num-batched-tokens", "64")),
    "row-004": Row(("--max-model-len", "2304", "--no-enable-prefix-caching"), {"chunk_tokens": 256}),
}


def ask_reference(reference: Reference) -> dict[str, list[list[int]]]:
    """Returns the plain server's tokens for each row."""
    def tokens(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        return [found.tokens for found in reference.generations(prompts, max_tokens)]

    output, = tokens([PROMPT_004], TOKENS_004)
    return {"row-000": tokens(PROMPTS_000, TOKENS_000), "row-001": tokens(PROMPTS_001, TOKENS_001),
            "row-003": tokens(PROMPTS_003, TOKENS_003),
            "row-004": [output, *tokens([PROMPT_004 + output], MORE_TOKENS_004)]}


@pytest.fixture(scope="module")
def started(kvferry_connector: KvConnector, toy: Path, reference: Reference) -> Iterator[dict[str, VllmServer]]:
    """Starts a server for each row, each with its own controller. All servers start at once and take the two cores in
    turn.
    """
    del reference
    processes: list[ManagedProcess] = []
    servers: dict[str, VllmServer] = {}
    try:
        for index, (name, row) in enumerate(ROWS.items()):
            controller = Controller(f"{name}-controller", log_folder=LOGS / "tests")
            processes.append(controller.process)
            controller.start()
            controller.wait_ready()
            config = kvferry_connector.config("kv_both", controller.address, extra=row.extra)
            servers[name] = VllmServer(name, toy, own_cores()[index % 2], config, row.flags, log_folder=LOGS / "tests")
            processes.append(servers[name].process)
            servers[name].start()
        for server in servers.values():
            server.wait_ready()
        yield servers
    finally:
        stop_all(reversed(processes))


async def ask(url: str, prompts: list[list[int]], max_tokens: int) -> list[tuple[list[int], Report]]:
    """Sends all prompts at once. Returns the tokens and the report of each prompt."""
    async with VllmClient(url) as client:
        found = await asyncio.gather(*(client.generate(prompt, max_tokens, REPORT) for prompt in prompts))
    reports = [Report.of(generation) for generation in found]
    assert all(report is not None for report in reports)
    return [(generation.tokens, report) for generation, report in zip(found, reports, strict=True) if report]


def resumed(answers: list[tuple[list[int], Report]]) -> list[Admission]:
    return [admission for _, report in answers for admission in report.admissions if admission.resumed]


def test_row_000_a_resumed_request_loads_what_its_look_up_found(
        started: dict[str, VllmServer], reference: Reference) -> None:
    server = started["row-000"]

    answers = asyncio.run(ask(server.url, PROMPTS_000, TOKENS_000))

    assert [tokens for tokens, _ in answers] == ask_reference(reference)["row-000"]
    admissions = resumed(answers)
    assert admissions, "nobody was preempted, so this proved nothing"
    assert all(0 < admission.to_load == admission.loaded for admission in admissions), admissions
    assert all(admission.hit == admission.local + admission.to_load for admission in admissions), admissions
    told = re.findall(r"\(resumed\): of \d+ tokens (\d+) were found in a cache, (\d+) of these in the engine's; "
                      r"of (\d+) tokens to load (\d+) were loaded", server.process.log_text())
    assert [tuple(map(int, line)) for line in told] == [
        (admission.hit, admission.local, admission.to_load, admission.loaded) for admission in admissions]


def test_row_001_a_repeated_look_up_gives_the_same_answer_and_all_of_it_is_loaded(
        started: dict[str, VllmServer], reference: Reference) -> None:
    answers = asyncio.run(ask(started["row-001"].url, PROMPTS_001, TOKENS_001))

    assert [tokens for tokens, _ in answers] == ask_reference(reference)["row-001"]
    admissions = resumed(answers)
    assert admissions, "nobody was preempted, so this proved nothing"
    for admission in admissions:
        assert admission.local == 0
        assert 0 < admission.hit == admission.to_load == admission.loaded


def test_row_003_counters_never_shrink_over_preemptions_in_the_middle_of_prefills(
        started: dict[str, VllmServer], reference: Reference) -> None:
    server = started["row-003"]

    async def load_and_watch() -> tuple[list[Answer], list[dict[str, float]]]:
        samples: list[dict[str, float]] = []
        async with VllmClient(server.url) as client:

            async def watch() -> None:
                while True:
                    samples.append(await client.metrics())
                    await asyncio.sleep(0.1)

            async def send(prompt: list[int]) -> Answer:
                return Answer(prompt, 0.0, await client.generate(prompt, TOKENS_003, REPORT))

            watcher = asyncio.create_task(watch())
            answers = await run_load(PROMPTS_003, send, 8)
            watcher.cancel()
            samples.append(await client.metrics())
        return answers, samples

    answers, samples = asyncio.run(load_and_watch())

    assert [answer.generation.tokens for answer in answers if answer.generation] == ask_reference(reference)["row-003"]
    assert samples[-1]["vllm:num_preemptions_total"] > samples[0].get("vllm:num_preemptions_total", 0)
    assert samples[-1]["kvferry_resumed_hit_tokens_total"] > 0
    for earlier, later in itertools.pairwise(samples):
        shrunk = {name: (value, later.get(name, 0)) for name, value in earlier.items()
                  if name.endswith(("_total", "_count", "_sum")) and later.get(name, 0) < value}
        assert not shrunk
    assert server.healthy()


def test_row_004_all_decoded_tokens_but_the_last_are_saved_and_loaded_again(
        started: dict[str, VllmServer], reference: Reference) -> None:
    url = started["row-004"].url

    (output, first), = asyncio.run(ask(url, [PROMPT_004], TOKENS_004))
    (again, second), = asyncio.run(ask(url, [PROMPT_004 + output], MORE_TOKENS_004))

    assert [output, again] == ask_reference(reference)["row-004"]
    assert first.admissions[0].hit == 0
    assert [(a.hit, a.local, a.to_load, a.loaded) for a in second.admissions] == [(2099, 0, 2099, 2099)]
