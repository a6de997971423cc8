"""Fixtures: one controller and one vLLM configuration for all tests, and engines that are checked and shut down."""

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from kvferry_launch.paths import LOGS
from kvferry_launch.testbed.servers import Controller, running_controller

pytest.importorskip("vllm", reason="these tests step vLLM's own scheduler")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

if TYPE_CHECKING:
    from kvferry_harness.engine import Engine
    from vllm.config import VllmConfig

def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", help="how many random schedules; 200 by default")
    parser.addoption("--seed", help="the one random schedule to run")
    parser.addoption("--tenant-pairs", help="how many pairs of prompts a tenant probes; then times are judged too")


MakeEngine = Callable[..., "Engine"]


@pytest.fixture(scope="session")
def controller() -> Iterator[Controller]:
    with running_controller("scheduler-tests-controller", LOGS / "tests") as process:
        yield process


@pytest.fixture(scope="session")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> "VllmConfig":
    from kvferry_harness.setup import base_config, make_model

    return base_config(make_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def make_engine(vllm_config: "VllmConfig", controller: Controller) -> Iterator[MakeEngine]:
    """Makes engines for one test. The arguments are the fields of EngineSetup, and `controller_address`."""
    from kvferry_harness.engine import Engine
    from kvferry_harness.setup import EngineSetup

    made: list[Engine] = []

    def make(controller_address: str = "", **setup: object) -> Engine:
        address = controller_address or controller.address
        engine = Engine(vllm_config, EngineSetup(**setup), address)  # type: ignore[arg-type]
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.shutdown()

