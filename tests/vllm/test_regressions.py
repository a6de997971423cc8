"""The regression rows on real vLLM: one server with KvFerryConnector alone (kv_both), against the plain server.

Block size 32 is the CPU backend's smallest, so the seeds' numbers are doubled. tests/connector holds the same rows in
the C++ core with the numbers as they were.
"""

import asyncio
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kvferry_launch.node.vllm import KvConnector
from kvferry_launch.paths import LOGS
from kvferry_launch.testbed.answers import Admission, Answer, Report
from kvferry_launch.testbed.client import VllmClient, run_load
from kvferry_launch.testbed.pair import own_cores
from kvferry_launch.testbed.prompts import PromptSet
from kvferry_launch.testbed.reference import Reference
from kvferry_launch.testbed.servers import Controller, VllmServer

REPORT = {"kvferry_report": True}
BLOCK = 32

Start = Callable[..., VllmServer]


@pytest.fixture
def start_alone(kvferry_connector: KvConnector, toy: Path, run_server: Callable[[VllmServer], VllmServer],
                reference: Reference) -> Iterator[Start]:
    """Starts one server that is its own prefill and decode side, with a controller; the plain server is stopped."""
    controller = Controller("regression-controller", log_folder=LOGS / "tests")
    controller.start()
    controller.wait_ready()

    def start(name: str, *flags: str, **extra: object) -> VllmServer:
        reference.stop()
        config = kvferry_connector.config("kv_both", controller.address, extra=extra)
        server = run_server(VllmServer(name, toy, own_cores()[-1], config, flags, log_folder=LOGS / "tests"))
        server.wait_ready()
        return server

    yield start
    controller.process.stop()


async def ask(url: str, prompts: list[list[int]], max_tokens: int) -> list[tuple[list[int], Report]]:
    """Tokens and report of each prompt, all sent at once."""
    async with VllmClient(url) as client:
        found = await asyncio.gather(*(client.generate(prompt, max_tokens, REPORT) for prompt in prompts))
    reports = [Report.of(generation) for generation in found]
    assert all(report is not None for report in reports)
    return [(generation.tokens, report) for generation, report in zip(found, reports, strict=True) if report]


def resumed(answers: list[tuple[list[int], Report]]) -> list[Admission]:
    return [admission for _, report in answers for admission in report.admissions if admission.resumed]


def test_row_000_a_resumed_request_loads_what_its_look_up_found(start_alone: Start, reference: Reference) -> None:
    prompts = [[1] * 68, [2] * 68]
    expected = [generation.tokens for generation in reference.generations(prompts, 70)]
    server = start_alone("row-000", "--num-gpu-blocks-override", "7", "--max-model-len", "160", chunk_tokens=BLOCK)

    answers = asyncio.run(ask(server.url, prompts, 70))

    assert [tokens for tokens, _ in answers] == expected
    admissions = resumed(answers)
    assert admissions, "nobody was preempted, so this proved nothing"
    assert all(0 < admission.to_load == admission.loaded for admission in admissions), admissions
    assert all(admission.hit == admission.local + admission.to_load for admission in admissions), admissions
    told = re.findall(r"\(resumed\): \d+ tokens, hit (\d+), local (\d+), to load (\d+), loaded (\d+)",
                      server.process.log_text())
    assert [tuple(map(int, line)) for line in told] == [
        (admission.hit, admission.local, admission.to_load, admission.loaded) for admission in admissions]


def test_row_001_a_repeated_look_up_gives_the_same_answer_and_all_of_it_is_loaded(
        start_alone: Start, reference: Reference) -> None:
    num_blocks = 10
    max_tokens = 5 + BLOCK * ((num_blocks - 3) - 1)
    prompts = [[first, *range(100, 109)] for first in (1, 2)]  # ten tokens that differ in the first one only
    expected = [generation.tokens for generation in reference.generations(prompts, max_tokens)]
    server = start_alone("row-001", "--num-gpu-blocks-override", str(num_blocks), "--max-model-len", "256",
                         "--no-enable-prefix-caching", chunk_tokens=BLOCK)

    answers = asyncio.run(ask(server.url, prompts, max_tokens))

    assert [tokens for tokens, _ in answers] == expected
    admissions = resumed(answers)
    assert admissions, "nobody was preempted, so this proved nothing"
    for admission in admissions:
        assert admission.local == 0
        assert 0 < admission.hit == admission.to_load == admission.loaded


def test_row_003_counters_never_shrink_over_preemptions_in_the_middle_of_prefills(
        start_alone: Start, reference: Reference) -> None:
    prompts = PromptSet(seed=3, count=12).prompts()
    expected = [generation.tokens for generation in reference.generations(prompts, 60)]
    server = start_alone("row-003", "--num-gpu-blocks-override", "24", "--max-model-len", "704",
                         "--max-num-batched-tokens", "64")

    async def load_and_watch() -> tuple[list[Answer], list[dict[str, float]]]:
        samples: list[dict[str, float]] = []
        async with VllmClient(server.url) as client:

            async def watch() -> None:
                while True:
                    samples.append(await client.metrics())
                    await asyncio.sleep(0.1)

            async def send(prompt: list[int]) -> Answer:
                return Answer(prompt, 0.0, await client.generate(prompt, 60, REPORT))

            watcher = asyncio.create_task(watch())
            answers = await run_load(prompts, send, 8)
            watcher.cancel()
            samples.append(await client.metrics())
        return answers, samples

    answers, samples = asyncio.run(load_and_watch())

    assert [answer.generation.tokens for answer in answers if answer.generation] == expected
    assert samples[-1]["vllm:num_preemptions_total"] > samples[0].get("vllm:num_preemptions_total", 0)
    assert samples[-1]["kvferry_resumed_hit_tokens_total"] > 0
    for earlier, later in itertools.pairwise(samples):
        shrunk = {name: (value, later.get(name, 0)) for name, value in earlier.items()
                  if name.endswith(("_total", "_count", "_sum")) and later.get(name, 0) < value}
        assert not shrunk
    assert server.healthy()


def test_row_004_all_decoded_tokens_but_the_last_are_saved_and_loaded_again(
        start_alone: Start, reference: Reference) -> None:
    prompt = [7 + i % 300 for i in range(100)]
    server = start_alone("row-004", "--max-model-len", "2304", "--no-enable-prefix-caching", chunk_tokens=256)

    (output, first), = asyncio.run(ask(server.url, [prompt], 2000))
    (again, second), = asyncio.run(ask(server.url, [prompt + output], 20))
    server.stop()

    assert len(output) == 2000
    assert first.admissions[0].hit == 0
    assert [(a.hit, a.local, a.to_load, a.loaded) for a in second.admissions] == [(2099, 0, 2099, 2099)]
    assert again == reference.generations([prompt + output], 20)[0].tokens
