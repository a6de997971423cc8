"""Tests prefill and decode servers of unlike tensor parallel sizes that run models with states.

Each pair must answer every prompt with the plain server's tokens. Prompts are sent in rounds, until there is a round in
which the decode server loaded all whole blocks of most prompts, with the state at their end; these came from the ranks
of the prefill server. Their chunks in the pools of both servers must then have the same elements, which this module
puts in order by itself, layer by layer.
"""

import asyncio
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cells import moved
from families import FAMILIES
from kvferry_launch.node.vllm import KvConnector
from kvferry_launch.paths import LOGS, MODELS
from kvferry_launch.testbed.answers import Generation
from kvferry_launch.testbed.pair import Pair, PairSetup, own_cores, pair_load
from kvferry_launch.testbed.prompts import PromptSet
from kvferry_launch.testbed.reference import Reference
from kvferry_launch.testbed.servers import CONTROLLER_FLAGS
from toy_checkpoint import make
from toy_weights import ENVIRONMENT

ROUNDS = tuple(PromptSet(seed=seed, count=8, tokens_min=80, tokens_max=300) for seed in range(1, 4))
MAX_TOKENS = 40
# The next three are those of test_shapes.py, for the same reasons.
PAUSE_S = 6.0
TENSOR = ("--tensor-parallel-size", "2")
SILENCE_MS = 20_000
UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
BLOCKS = ("--num-gpu-blocks-override", "400", "--max-model-len", "1024")


@dataclass(frozen=True)
class Shapes:
    family: str
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()


# Mamba-2's toy has two groups, which ranks divide; Granite's has one, which all ranks have.
PAIRS = {
    "Mamba-2, tensor 2 to 1": Shapes("mamba2", prefill=TENSOR),
    "Granite hybrid, tensor 1 to 2": Shapes("granite-hybrid", decode=TENSOR),
}
LONG_PAIRS = {
    "Mamba-2, tensor 1 to 2": Shapes("mamba2", decode=TENSOR),
    "Granite hybrid, tensor 2 to 1": Shapes("granite-hybrid", prefill=TENSOR),
    "LFM2, tensor 2 to 1": Shapes("lfm2", prefill=TENSOR),
    "LFM2, tensor 1 to 2": Shapes("lfm2", decode=TENSOR),
    "Qwen3-Next, tensor 2 to 1": Shapes("qwen3-next", prefill=TENSOR),
    "Qwen3-Next, tensor 1 to 2": Shapes("qwen3-next", decode=TENSOR),
}
# What ranks of two divide: the family's own toy has one key head.
CHANGES = {"qwen3-next": {"linear_num_key_heads": 2, "linear_num_value_heads": 4}}
# In bfloat16 the sums over two ranks round otherwise than those of one. Tokens may then differ where their logprobs are
# as near as the rounding moves those of plain servers; in float32 all tokens are equal.
ROUNDED = ("qwen3-next",)


@dataclass(frozen=True)
class State:
    """The sizes of a toy's states on all ranks together, in words.

    rows: of the convolution's window. channels: those that ranks divide, in the order of a row. common: the channels at
    a row's end that all ranks have. heads: the elements of the state itself. layers: True for those with a state.
    block: tokens of a block. kv: the words of a token's KV; 0: a block has the states alone. word: as long as the
    shortest element.
    """

    rows: int
    channels: tuple[int, ...]
    common: int
    heads: int
    layers: tuple[bool, ...]
    block: int
    kv: int
    word: Any = np.int32


STATES = {
    "mamba2": State(3, (256, 32, 32), 0, 4 * 64 * 16, (True,) * 4, 32, 0),
    "granite-hybrid": State(3, (256,), 32, 4 * 64 * 16, (True, False, True, False), 64, 2 * 2 * 32),
    "lfm2": State(2, (128,), 0, 0, (False, True, True, False), 32, 2 * 2 * 32),
    "qwen3-next": State(3, (128, 128, 256), 0, 4 * 64 * 64, (True, True, True, False), 64, 4 * 2 * 64, np.int16),
}


def flags_of(family: str) -> tuple[str, ...]:
    """Returns the arguments of an engine of the family as a server's."""
    words: list[str] = []
    for name, value in FAMILIES[family].flags.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return (*words, "--block-size", str(STATES[family].block), *BLOCKS)


def whole_chunks(state: State, ranks: list[Any], *, are_pulled: bool) -> set[bytes]:
    """Returns all chunks of a server in one order, with the elements of all its ranks. ranks: their pools.

    are_pulled: True if the ranks have their chunks from another server, and so what they have in common is equal; what
    they compute themselves may be rounded otherwise on each.
    """
    num = len(ranks)
    own = state.rows * (sum(state.channels) // num + state.common) + state.heads // num
    page = state.block * state.kv // num or own
    slots = [pool[:len(pool) // (len(state.layers) * page) * len(state.layers) * page]
             .reshape(-1, len(state.layers), page) for pool in ranks]
    found = set()
    for slot in range(len(slots[0])):
        chunk = []
        for layer, has_state in enumerate(state.layers):
            pages = [pool[slot, layer] for pool in slots]
            if not has_state:  # the first heads are on the first rank
                chunk += pages
                continue
            width = sum(state.channels) // num + state.common
            windows = [each[:state.rows * width].reshape(state.rows, width) for each in pages]
            start = 0
            for channels in state.channels:
                chunk.append(np.concatenate([one[:, start:start + channels // num] for one in windows], axis=1).ravel())
                start += channels // num
            commons = [one[:, start:].tobytes() for one in windows]
            assert len(set(commons)) == 1 or not are_pulled, "ranks have unlike elements of what they have in common"
            chunk.append(windows[0][:, start:].ravel())
            chunk += [each[state.rows * width:own] for each in pages]
        if any(part.any() for part in chunk):
            found.add(b"".join(part.tobytes() for part in chunk))
    return found


def pools(pair: Pair, word: Any) -> list[list[Any]]:
    """Returns the pools of both servers, rank by rank; those of the server with two ranks first."""
    assert pair.controller is not None
    found: dict[str, dict[int, Any]] = {re.sub(r"[^A-Za-z0-9_.]", "_", engine)[-40:]: {}
                                        for engine in pair.controller.endpoints()}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            name = str(link.readlink())
        except OSError:  # the process or its file is gone
            continue
        memory = re.search(r"memfd:(?:.*[/-])?([A-Za-z0-9_.]+)\.(\d+)( \(deleted\))?$", name)
        if memory and memory[1] in found:
            found[memory[1]][int(memory[2])] = np.fromfile(link, dtype=word)
    return sorted(([ranks[rank] for rank in sorted(ranks)] for ranks in found.values()), key=len, reverse=True)


@dataclass
class Shaped:
    pair: Pair
    expected: dict[PromptSet, list[Generation]]
    state: State
    near: float


def plain_answers(model: Path, flags: tuple[str, ...], env: dict[str, str]) -> dict[PromptSet, list[Generation]]:
    reference = Reference(model, ",".join(own_cores()), flags=flags, env=env)
    try:
        return {prompts: reference.generations(prompts.prompts(), MAX_TOKENS) for prompts in ROUNDS}
    finally:
        reference.stop()


def as_phase(answers: list[Generation]) -> dict[str, Any]:
    return {"plain": {"answers": [asdict(answer) for answer in answers]}}


@pytest.fixture(params=[*PAIRS, *(pytest.param(name, marks=pytest.mark.long) for name in LONG_PAIRS)])
def shaped(request: pytest.FixtureRequest, kvferry_connector: KvConnector) -> Iterator[Shaped]:
    name, shapes = request.param, (PAIRS | LONG_PAIRS)[request.param]
    flags = flags_of(shapes.family)
    model = make(shapes.family, MODELS / f"toy-{shapes.family}", **CHANGES.get(shapes.family, {}))
    # With ENVIRONMENT, LFM2's answers do not depend on what else is in a step. The weights are the checkpoint's.
    expected = plain_answers(model, flags, ENVIRONMENT)
    near = -1.0
    if shapes.family in ROUNDED:
        of_two = plain_answers(model, (*flags, *TENSOR), ENVIRONMENT | UNBOUND)
        near = max(moved(as_phase(expected[prompts]), as_phase(of_two[prompts])) for prompts in ROUNDS)
    setup = PairSetup(f"states {name}".replace(",", "").replace(" ", "-"), kvferry_connector,
                      prefill_flags=(*flags, *shapes.prefill), decode_flags=(*flags, *shapes.decode),
                      extra={"silence_ms": SILENCE_MS, "pool_bytes": "64MiB"},
                      controller_flags=(*CONTROLLER_FLAGS, "--lease-ms", str(SILENCE_MS)))
    pair = Pair(setup, model, LOGS / "tests")
    for server, own in ((pair.prefill, shapes.prefill), (pair.decode, shapes.decode)):
        server.process.env |= ENVIRONMENT | (UNBOUND if own == TENSOR else {})
    try:
        pair.ensure_running()
        yield Shaped(pair, expected, STATES[shapes.family], near)
    finally:
        pair.stop()


def test_unlike_servers_give_the_plain_servers_tokens(shaped: Shaped) -> None:
    most = 0
    for prompts in shaped.expected:
        result = asyncio.run(pair_load(shaped.pair, prompts.prompts(), shaped.expected[prompts], MAX_TOKENS))
        wrong = [index for index, mismatch in result.mismatches.items() if mismatch.margin > shaped.near]
        assert not wrong and not result.errors, result.complaints()
        first = [report.admissions[0] for report in result.reports if report is not None]
        assert len(first) == prompts.count
        most = max(most, sum(admission.loaded == (len(prompt) - 1) // shaped.state.block * shaped.state.block
                             for admission, prompt in zip(first, prompts.prompts(), strict=True)))
        if most > prompts.count // 2:
            num_chunks = sum(admission.loaded for admission in first) // shaped.state.block
            break
        time.sleep(PAUSE_S)
    assert most > prompts.count // 2, (f"of {prompts.count} prompts at most {most} came whole from the prefill server; "
                                       f"the last round's admissions: {first}")
    ranks_of_two, rank_of_one = pools(shaped.pair, shaped.state.word)
    two = whole_chunks(shaped.state, ranks_of_two, are_pulled="1 to 2" in shaped.pair.setup.name.replace("-", " "))
    one = whole_chunks(shaped.state, rank_of_one, are_pulled=False)
    # Prompts are random, so no two chunks are equal.
    assert len(two & one) >= num_chunks > 0
