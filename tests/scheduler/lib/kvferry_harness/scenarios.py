"""Runs the same sizes and requests on vLLM's scheduler and on the engine model of tests/sim, and records the steps of
both.
"""

import json
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry_harness.engine import Engine
from kvferry_harness.setup import EngineSetup
from kvferry_harness.stamps import VOCAB

Scenario = dict[str, Any]
_BLOCK = 32


def draw(seed: int) -> Scenario:
    """Draws a scenario without stop tokens and without prompts that repeat answers, because the two models generate
    different tokens. When and how many tokens they generate is the same.
    """
    dice = random.Random(seed)
    num_blocks = dice.randint(6, 20)
    asynchronous = dice.random() < 0.5
    config = {
        "block_tokens": _BLOCK, "chunk_tokens": _BLOCK * dice.choice((1, 2, 4)), "num_blocks": num_blocks,
        "num_slots": dice.choice((3, 8, 64)), "token_budget": dice.choice((33, 64, 100, 512)),
        "max_running": dice.randint(1, 6), "prefix_caching": dice.random() < 0.7, "async": asynchronous,
        # The engine model does not delay the freeing of blocks until a later step, as vLLM does for consumers when it
        # plans ahead.
        "role": "kv_producer" if asynchronous else dice.choice(("kv_producer", "kv_consumer", "kv_both")),
        "reserve_full_prompt": dice.random() < 0.5,
        "save_decode_cache": dice.random() < 0.8, "save_partial_chunks": dice.random() < 0.8}
    most = (num_blocks - 1) * _BLOCK
    seen: list[list[int]] = []
    requests, aborts = [], []
    for index in range(dice.randint(2, 9)):
        base = dice.choice(seen) if seen and dice.random() < 0.6 else []
        tokens = base[:len(base) if dice.random() < 0.5 else dice.randint(0, len(base))]
        if not tokens or dice.random() < 0.8:
            tokens = tokens + [dice.randrange(1, VOCAB) for _ in range(dice.randint(1, 140))]
        tokens = tokens[:most - 1]
        seen.append(tokens)
        start = dice.randint(0, 25)
        requests.append({"id": f"r{index}", "prompt": tokens, "at": start,
                         "max_tokens": dice.randint(1, min(70, most - len(tokens)))})
        if dice.random() < 0.2:
            aborts.append({"id": f"r{index}", "at": start + dice.randint(0, 20)})
    requests.sort(key=lambda request: request["at"])
    return {"config": config, "requests": requests, "aborts": aborts}


def run_model(program: Path, scenarios: list[Scenario]) -> list[Any]:
    lines = "".join(json.dumps(scenario) + "\n" for scenario in scenarios)
    done = subprocess.run([str(program)], input=lines, capture_output=True, text=True, timeout=300, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def run_vllm(make: Callable[[EngineSetup], Engine], scenario: Scenario) -> list[dict[str, Any]]:
    config = scenario["config"]
    engine = make(EngineSetup(
        num_blocks=config["num_blocks"], block_tokens=_BLOCK, chunk_tokens=config["chunk_tokens"],
        pool_chunks=config["num_slots"], token_budget=config["token_budget"], max_requests=config["max_running"],
        prefix_caching=config["prefix_caching"], async_scheduling=config["async"], role=config["role"],
        reserve_full_prompt=config["reserve_full_prompt"], waits_for_loads=False,
        extra={"save_decode_cache": config["save_decode_cache"], "save_partial_chunks": config["save_partial_chunks"]}))
    for step in range(5000):
        more = False
        for request in scenario["requests"]:
            if request["at"] == step:
                engine.add(request["id"], request["prompt"], request["max_tokens"])
            more |= request["at"] > step
        for abort in scenario["aborts"]:
            if abort["at"] == step:
                engine.abort(abort["id"])
            more |= abort["at"] > step
        if not engine.scheduler.has_requests():
            while engine.busy:
                engine.step()
            if not more:
                break
            continue
        engine.step()
    engine.check_done()
    steps, ended = [], []
    for call in engine.log.calls:
        if call["call"] == "finished":
            admissions = [{key: row[key] for key in ("hit", "local", "to_load", "resumed")}
                          for row in call["admissions"]]
            ended.append({"request": call["request"], "aborted": call["aborted"], "admissions": admissions})
        elif call["call"] == "step":
            steps.append({"scheduled": call["scheduled"], "preempted": call["preempted"], "ended": ended})
            ended = []
    return steps
