"""Tests prefill and decode servers of different shapes: tensor, pipeline and data parallel sizes, block sizes, a draft
model on one of them.

Each pair must answer every prompt with the plain server's tokens. Prompts are sent in rounds, until there is a round in
which the decode server computed only the last token of most prompts; then the KV of the rest came from the ranks of the
prefill server.
"""

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvferry_launch.node.vllm import KvConnector
from kvferry_launch.paths import KVFERRY, LOGS
from kvferry_launch.testbed.answers import Generation
from kvferry_launch.testbed.pair import DECODE_FLAGS, Pair, PairSetup, pair_load
from kvferry_launch.testbed.prompts import PromptSet
from kvferry_launch.testbed.reference import Reference
from kvferry_launch.testbed.servers import CONTROLLER_FLAGS

ROUNDS = tuple(PromptSet(seed=seed, count=8, tokens_min=40, tokens_max=300) for seed in range(1, 7))
MAX_TOKENS = 60
# If ranks that spin share a few cores, the first contact may take longer than a request waits, and a server that did
# not answer is not asked again for 5 s. On a busy host, only some requests may get all of their prompt.
PAUSE_S = 6.0
TENSOR = ("--tensor-parallel-size", "2")
# vLLM's CPU workers allocate the buffers that a later stage needs during their warm-up, which they skip in eager mode.
PIPELINE = ("--pipeline-parallel-size", "2", "--no-enforce-eager",
            "--compilation-config", '{"mode": 1, "backend": "eager"}')
DATA = ("--data-parallel-size", "2")
LARGE_BLOCKS = ("--block-size", "64")
# A draft model with KV of its own; TOY stands for the model's folder.
DRAFTS = ("--speculative-config", '{"method": "draft_model", "model": "TOY", "num_speculative_tokens": 3}')
# Ranks that spin share a few cores with all other processes, which may then not run for seconds. These tests are not
# about losses, so no node is taken as lost for that.
SILENCE_MS = 20_000


@dataclass(frozen=True)
class Shapes:
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()


PAIRS = {
    "tensor 2 to 1, blocks of 32 to 64": Shapes(prefill=TENSOR, decode=LARGE_BLOCKS),
    "pipeline 2 to tensor 2": Shapes(prefill=PIPELINE, decode=TENSOR),
    "drafts on decode": Shapes(decode=DRAFTS),
}
LONG_PAIRS = {
    "tensor 2 to 1": Shapes(prefill=TENSOR),
    "blocks of 32 to 64": Shapes(decode=LARGE_BLOCKS),
    "tensor 1 to 2": Shapes(decode=TENSOR),
    "pipeline 2 to tensor 1": Shapes(prefill=PIPELINE),
    "data 2": Shapes(decode=DATA),
}


def ask_reference(reference: Reference) -> dict[PromptSet, list[Generation]]:
    return {prompts: reference.generations(prompts.prompts(), MAX_TOKENS) for prompts in ROUNDS}


@pytest.fixture(params=[*PAIRS, *(pytest.param(name, marks=pytest.mark.long) for name in LONG_PAIRS)])
def shaped(request: pytest.FixtureRequest, reference: Reference, kvferry_connector: KvConnector,
           toy: Path) -> Iterator[Pair]:
    del reference
    name, shapes = request.param, (PAIRS | LONG_PAIRS)[request.param]
    setup = PairSetup(f"shapes {name}".replace(",", "").replace(" ", "-"), kvferry_connector,
                      prefill_flags=shapes.prefill,
                      decode_flags=(*DECODE_FLAGS, *(flag.replace("TOY", str(toy)) for flag in shapes.decode)),
                      extra={"silence_ms": SILENCE_MS, "save_draft_kv": shapes.decode != DRAFTS},
                      controller_flags=(*CONTROLLER_FLAGS, "--lease-ms", str(SILENCE_MS)))
    pair = Pair(setup, toy, LOGS / "tests")
    for server, flags in ((pair.prefill, shapes.prefill), (pair.decode, shapes.decode)):
        if flags in (TENSOR, PIPELINE, DATA):
            # Workers that are bound to a core spin there while they wait for each other, and the other server's workers
            # wait for the same cores. On hosts with two cores, no request was answered for seconds.
            server.process.env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    try:
        pair.ensure_running()
        yield pair
    finally:
        pair.stop()


def nodes(pair: Pair) -> list[str]:
    """Returns the engine ids that the controller knows."""
    assert pair.controller is not None
    found = subprocess.run([str(KVFERRY), "status", "--json", "--controller", pair.controller.address],
                           env=os.environ | pair.controller.member_env, capture_output=True, text=True, check=True,
                           timeout=20)
    return [node["engine_id"] for node in json.loads(found.stdout)["nodes"]]


def test_unlike_servers_give_the_plain_servers_tokens(shaped: Pair, reference: Reference) -> None:
    expected = ask_reference(reference)
    most = 0
    for prompts in ROUNDS:
        result = asyncio.run(pair_load(shaped, prompts.prompts(), expected[prompts], MAX_TOKENS))
        assert not result.mismatches and not result.errors, result.complaints()
        first = [report.admissions[0] for report in result.reports if report is not None]
        assert len(first) == prompts.count
        most = max(most, sum(admission.loaded == len(prompt) - 1
                             for admission, prompt in zip(first, prompts.prompts(), strict=True)))
        if most > prompts.count // 2:
            break
        time.sleep(PAUSE_S)
    assert most > prompts.count // 2, (f"of {prompts.count} prompts at most {most} came whole from the prefill server; "
                                       f"the last round's admissions: {first}")
    engines = nodes(shaped)
    if "data-2" in shaped.setup.name:
        assert sum(engine.endswith(("_dp0", "_dp1")) for engine in engines) == 2, engines
    else:
        assert len(engines) == 2, engines
