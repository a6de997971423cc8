"""Tests that the engine model of tests/sim schedules as vLLM's own scheduler does, step by step, for equal sizes and
requests.
"""

from typing import TYPE_CHECKING

import pytest
from kvferry_launch.paths import RELEASE
from kvferry_launch.testbed.servers import Controller

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SCENARIOS = 200
BATCH = 50
PROGRAM = RELEASE / "bin" / "mini_engine_trace"


@pytest.mark.parametrize("first", range(1, SCENARIOS + 1, BATCH))
def test_it_schedules_like_vllm(vllm_config: "VllmConfig", controller: Controller, first: int) -> None:
    from kvferry_harness.engine import Engine
    from kvferry_harness.scenarios import draw, run_model, run_vllm

    seeds = range(first, first + BATCH)
    scenarios = [draw(seed) for seed in seeds]
    models = run_model(PROGRAM, scenarios)
    happened = {"preempted": 0, "resumed": 0, "loaded": 0, "aborted": 0, "chunked": 0}
    for seed, scenario, model in zip(seeds, scenarios, models, strict=True):
        engines: list[Engine] = []

        def make(setup: object, engines: list[Engine] = engines, seed: int = seed) -> Engine:
            setup.extra["namespace"] = f"compared-{seed}"  # type: ignore[attr-defined]
            engines.append(Engine(vllm_config, setup, controller.address))  # type: ignore[arg-type]
            return engines[0]

        try:
            real = run_vllm(make, scenario)
        finally:
            for engine in engines:
                engine.shutdown()
        assert isinstance(model, list), f"seed {seed}: the model fails: {model}"
        for step, (ours, theirs) in enumerate(zip(model, real, strict=False)):
            assert ours == theirs, f"seed {seed}, step {step}, {scenario['config']}"
        assert len(model) == len(real), f"seed {seed}: {len(model)} steps, vLLM has {len(real)}"
        for step_row in real:
            happened["preempted"] += len(step_row["preempted"])
            for ended in step_row["ended"]:
                happened["aborted"] += ended["aborted"]
                happened["loaded"] += sum(row["to_load"] > 0 for row in ended["admissions"])
                happened["resumed"] += sum(row["resumed"] for row in ended["admissions"])
        prompts = {request["id"]: len(request["prompt"]) for request in scenario["requests"]}
        happened["chunked"] += sum(row["computed"] + row["scheduled"] < prompts[row["request"]]
                                   for step_row in real for row in step_row["scheduled"])
    print(happened)
    assert all(happened.values()), happened
