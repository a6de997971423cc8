"""Runs random schedules on vLLM's own scheduler. For a seed that fails, prints how to replay it. --seeds N runs more
seeds.
"""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from kvferry_launch.paths import LOGS
from kvferry_launch.testbed.servers import Controller

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SEEDS = 200
BATCH = 50


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" not in metafunc.fixturenames:
        return
    one = metafunc.config.getoption("--seed", default=None)
    count = int(metafunc.config.getoption("--seeds", default=None) or SEEDS)
    batches = [range(int(one), int(one) + 1)] if one else [
        range(first, min(first + BATCH, count + 1)) for first in range(1, count + 1, BATCH)]
    metafunc.parametrize("seeds", batches, ids=lambda batch: f"{batch[0]}-{batch[-1]}")


@pytest.fixture(scope="module")
def mortal() -> Iterator[Controller]:
    controller = Controller("scheduler-tests-mortal", log_folder=LOGS / "tests")
    yield controller
    controller.stop()


def test_random_schedules(seeds: range, vllm_config: "VllmConfig", controller: Controller, mortal: Controller) -> None:
    from kvferry_harness.schedules import Schedule, summary

    tally: Counter[str] = Counter()
    for seed in seeds:
        try:
            schedule = Schedule(seed, vllm_config, controller, mortal)
            schedule.run()
        except Exception as error:
            raise AssertionError(
                f"{type(error).__name__}: {error}\n"
                f"replay: .venv/bin/python -m pytest tests/scheduler/test_random.py --seed {seed}") from error
        tally.update(schedule.tally)
    print(f"{len(seeds)} schedules: {summary(tally)}")
    if len(seeds) == BATCH:
        for happens in ("aborts", "handed over", "loaded_tokens_total", "resumed_hit_tokens_total", "resets",
                        "failed loads", "evicted_chunks_total", "pulled_chunks_total"):
            assert tally[happens] > 0, f"no {happens} in {BATCH} schedules"
