"""Tests `kvferry purge --producer NODE`: pools and vLLM's prefix cache drop what a bad node gave."""

import json
import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from kvferry_harness.handing_over import hand_over, run_patiently
from kvferry_harness.prompts import prompt
from kvferry_launch.testbed.servers import Controller

if TYPE_CHECKING:
    from kvferry_harness.engine import Engine

MakeEngine = Callable[..., "Engine"]
NUM_TOKENS = 200  # three chunks and a tail


def found(engine: "Engine", name: str) -> tuple[int, int]:
    """Returns how many tokens the request found in vLLM's own cache, and how many in the pool."""
    match = engine.log.of("vllm_match", name)[-1]
    return match["local"], match["answer"][0]


def purge(controller: Controller, producer: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([str(controller.binary), "purge", "--producer", producer, "--json", "--controller",
                           controller.address], capture_output=True, text=True)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_what_a_bad_node_gave_is_gone_and_what_others_gave_stays(
        make_engine: MakeEngine, controller: Controller, async_scheduling: bool) -> None:
    bad, good, decode = (make_engine(async_scheduling=async_scheduling) for _ in range(3))
    for name, engine in (("bad", bad), ("good", good)):
        params = hand_over(engine, f"p {name}", prompt(ord(name[0]), NUM_TOKENS))
        decode.add(f"d {name}", prompt(ord(name[0]), NUM_TOKENS), 30, params=params)
        run_patiently(decode)
        assert found(decode, f"d {name}") == (0, NUM_TOKENS - 1)
    before = decode.metrics()["pool_chunks"]
    running = [*prompt(ord("b"), NUM_TOKENS), 7]
    decode.add("running", running, 100)
    decode.step()
    decode.step()
    assert sum(found(decode, "running")) >= NUM_TOKENS - 8, "it attends to what the bad node gave"

    told = purge(controller, bad.engine_id)
    assert told.returncode == 0, told.stderr
    answer = json.loads(told.stdout)
    dropped = {name: node["chunks"] for name, node in answer["nodes"].items()}
    assert all((node["bytes"] > 0) == (node["chunks"] > 0) for node in answer["nodes"].values())
    assert answer["chunks"] == sum(dropped.values())
    assert answer["silent"] == []
    assert dropped[good.engine_id] == 0
    assert dropped[bad.engine_id] >= 4
    # Three chunks and a tail from the bad node, and what was computed on top of them.
    assert dropped[decode.engine_id] == decode.metrics()["purged_chunks_total"] >= 4
    assert decode.metrics()["pool_chunks"] <= before - 4

    decode.add("while it runs", prompt(ord("b"), NUM_TOKENS))
    run_patiently(decode)
    assert found(decode, "while it runs") == (0, 0)
    decode.add("good again", prompt(ord("g"), NUM_TOKENS))
    run_patiently(decode)
    assert found(decode, "good again") == (0, NUM_TOKENS - 8), "the tail is too short to be found"
    tokens = prompt(ord("b"), NUM_TOKENS)
    decode.add("bad again", tokens, params=hand_over(bad, "p again", tokens))
    run_patiently(decode)
    assert decode.metrics()["pulled_chunks_total"] == 8, "nothing more is taken from the bad node"
    for engine in (good, decode):
        engine.check_done(held_chunks=None)


def test_who_is_no_node_is_an_error_in_one_line(make_engine: MakeEngine, controller: Controller) -> None:
    make_engine()
    told = purge(controller, "nobody")
    assert told.returncode == 1
    assert told.stdout == ""
    assert told.stderr.count("\n") == 1
    assert "has no node 'nobody', and lost no such node in the last ten minutes" in told.stderr
