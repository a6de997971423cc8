"""Fixtures of the tests on real vLLM: toy models, references, and one running pair that tests share.

A server takes 15 to 40 s to start and there may be two cores only, so one pair runs at a time. Tests name theirs
with @pytest.mark.servers(NAME) and are sorted so that the tests of one pair follow each other; those also marked
`disruptive` (they kill a server) come last among them.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kvferry_launch.node.vllm import KVFERRY_CONNECTOR, NIXL_CONNECTOR, KvConnector
from kvferry_launch.paths import LOGS, MODELS
from kvferry_launch.process import ManagedProcess, stop_all
from kvferry_launch.testbed import toy_model
from kvferry_launch.testbed.answers import Generation
from kvferry_launch.testbed.pair import DECODE_FLAGS, Pair, PairSetup, own_cores
from kvferry_launch.testbed.prompts import PromptSet
from kvferry_launch.testbed.reference import Reference
from kvferry_launch.testbed.servers import VllmServer

CONNECTORS = {"kvferry": KVFERRY_CONNECTOR, "nixl": NIXL_CONNECTOR, "none": None}
TEST_LOGS = LOGS / "tests"
REQUESTS = 24
MAX_TOKENS = 100
SHARED_PREFIXES = 3
UNSEEN = PromptSet(seed=97, count=6)  # prompts that no test sends before the one that asks for them


def setups(connector: KvConnector | None) -> dict[str, PairSetup]:
    """Every pair that tests can ask for, by name."""
    chunked = ("--max-num-batched-tokens", "128")
    return {setup.name: setup for setup in (
        PairSetup("base", connector),
        PairSetup("chunked", connector, prefill_flags=chunked, decode_flags=(*DECODE_FLAGS, *chunked)),
        PairSetup("both", connector, prefill_role="kv_both", decode_role="kv_both"),
    )}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kv-connector", choices=sorted(CONNECTORS), default="kvferry",
                     help="the connector under test; 'none' runs plain servers, 'nixl' vLLM's NixlConnector")
    parser.addoption("--stress-seeds", type=int, metavar="N",
                     help="prompt sets of the base configuration (4, with --long 10); the others take a fifth of them")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "stress_case" in metafunc.fixturenames:
        cases = [(name, shared, seed) for name, (shared, seeds) in stress_cases(metafunc.config).items()
                 for seed in seeds]
        metafunc.parametrize("stress_case", [
            pytest.param(PromptSet(seed, REQUESTS, shared_prefixes=shared), id=f"{name}-seed{seed}",
                         marks=pytest.mark.servers(name.split()[0])) for name, shared, seed in cases])


def stress_cases(config: pytest.Config) -> dict[str, tuple[int, range]]:
    """Case name, which starts with its pair's, to the number of shared prefixes and the prompt seeds."""
    seeds = config.getoption("--stress-seeds") or (10 if config.getoption("--long") else 4)
    fewer = range(1, 1 + max(1, seeds // 5))
    return {
        "base": (0, range(1, 1 + seeds)),
        "base with shared prefixes": (SHARED_PREFIXES, fewer),
        "chunked prefill": (0, fewer),
        "both roles": (0, fewer),
    }


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def order(item: pytest.Item) -> tuple[str, bool]:
        marker = item.get_closest_marker("servers")
        return (marker.args[0] if marker else "", item.get_closest_marker("disruptive") is not None)

    items.sort(key=order)


@pytest.fixture(scope="session")
def connector(request: pytest.FixtureRequest) -> KvConnector | None:
    return CONNECTORS[request.config.getoption("--kv-connector")]


@pytest.fixture(scope="session")
def kvferry_connector(connector: KvConnector | None) -> KvConnector:
    """For tests of what only KvFerryConnector does."""
    if connector is not KVFERRY_CONNECTOR:
        pytest.skip("tests KvFerryConnector only")
    return KVFERRY_CONNECTOR


@pytest.fixture(scope="session")
def toy() -> Path:
    return MODELS / "toy"


@pytest.fixture(scope="session")
def other_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy model's shape with other weights."""
    return toy_model.make(tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.fixture(scope="session")
def reference(toy: Path) -> Iterator[Reference]:
    """The plain server. Tests on a pair take their tokens from `references`, so that it never runs beside one."""
    plain_server = Reference(toy, own_cores()[0])
    yield plain_server
    plain_server.stop()


@pytest.fixture(scope="session")
def references(request: pytest.FixtureRequest, reference: Reference) -> dict[PromptSet, list[Generation]]:
    """What the plain server answers to every prompt set that tests on a pair use."""
    sets = {PromptSet(seed, REQUESTS, shared_prefixes=shared)
            for shared, seeds in stress_cases(request.config).values() for seed in seeds} | {UNSEEN}
    found = {prompt_set: reference.generations(prompt_set.prompts(), MAX_TOKENS)
             for prompt_set in sorted(sets, key=str)}
    reference.stop()
    return found


@pytest.fixture(scope="session")
def unseen() -> PromptSet:
    """Prompts of which no server has KV; its references are in `references`."""
    return UNSEEN


class _Pairs:
    """Keeps the pair that was asked for last; asking for another one stops it."""

    def __init__(self, model: Path, connector: KvConnector | None) -> None:
        self._model = model
        self._setups = setups(connector)
        self._current: Pair | None = None

    def get(self, name: str) -> Pair:
        if self._current is None or self._current.setup.name != name:
            self.stop()
            self._current = Pair(self._setups[name], self._model, TEST_LOGS)
        self._current.ensure_running()
        return self._current

    def stop(self) -> None:
        if self._current is not None:
            self._current.stop()
            self._current = None


@pytest.fixture(scope="session")
def _pairs(toy: Path, connector: KvConnector | None) -> Iterator[_Pairs]:
    pairs = _Pairs(toy, connector)
    yield pairs
    pairs.stop()


@pytest.fixture
def pair(request: pytest.FixtureRequest, references: dict[PromptSet, list[Generation]], _pairs: _Pairs) -> Pair:
    """The running pair that the test's `servers` marker names; it starts after the references are there."""
    del references
    marker = request.node.get_closest_marker("servers")
    assert marker is not None, "a test that uses `pair` names it with @pytest.mark.servers(NAME)"
    return _pairs.get(marker.args[0])


@pytest.fixture
def run_server() -> Iterator[Callable[[VllmServer], VllmServer]]:
    """Starts servers of the test's own, without waiting for them, and stops them after the test."""
    started: list[ManagedProcess] = []

    def run(server: VllmServer) -> VllmServer:
        server.start()
        started.append(server.process)
        return server

    yield run
    stop_all(started)
