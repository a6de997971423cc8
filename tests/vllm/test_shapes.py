"""Prefill and decode servers of unlike shapes: tensor, pipeline and data parallel sizes, block sizes.

Each pair answers every prompt with the plain server's tokens. Prompts are sent in rounds until the decode server has
computed nothing of most of a round's but the last token: the rest comes from the other one's ranks.
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

ROUNDS = tuple(PromptSet(seed=seed, count=8, tokens_min=40, tokens_max=300) for seed in (1, 2, 3, 4))
MAX_TOKENS = 60
# Where a few cores are shared by ranks that spin, the first contact may take longer than a request waits, and who did
# not answer is left alone for 5 s. On a busy host it is no more than some request that gets all of its prompt.
PAUSE_S = 6.0
TENSOR = ("--tensor-parallel-size", "2")
# vLLM's CPU workers get the buffers that a later stage needs in their warm-up, which they leave out in eager mode.
PIPELINE = ("--pipeline-parallel-size", "2", "--no-enforce-eager",
            "--compilation-config", '{"mode": 1, "backend": "eager"}')
DATA = ("--data-parallel-size", "2")
LARGE_BLOCKS = ("--block-size", "64")


@dataclass(frozen=True)
class Shapes:
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()


PAIRS = {
    "tensor 2 to 1, blocks of 32 to 64": Shapes(prefill=TENSOR, decode=LARGE_BLOCKS),
    "pipeline 2 to tensor 2": Shapes(prefill=PIPELINE, decode=TENSOR),
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
                      prefill_flags=shapes.prefill, decode_flags=(*DECODE_FLAGS, *shapes.decode))
    pair = Pair(setup, toy, LOGS / "tests")
    for server, flags in ((pair.prefill, shapes.prefill), (pair.decode, shapes.decode)):
        if flags in (TENSOR, PIPELINE, DATA):
            # Workers bound to a core each spin there for one another while the other server's wait for the same cores:
            # hosts of two cores were seen to answer nobody for seconds.
            server.process.env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    try:
        pair.ensure_running()
        yield pair
    finally:
        pair.stop()


def nodes(pair: Pair) -> list[str]:
    """The engines that the controller knows."""
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
    assert most > prompts.count // 2, f"of {prompts.count} prompts at most {most} came whole from the prefill server"
    engines = nodes(shaped)
    if "data-2" in shaped.setup.name:
        assert sum(engine.endswith(("_dp0", "_dp1")) for engine in engines) == 2, engines
    else:
        assert len(engines) == 2, engines
