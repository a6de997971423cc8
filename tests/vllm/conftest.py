"""Fixtures of the tests on real vLLM: toy models, references, and running servers that tests share.

A server takes some seconds to start and there may be two cores only, so one pair or deployment runs at a time. Tests
name theirs with @pytest.mark.servers(NAME) and are sorted so that the tests of one follow each other; those also
marked @pytest.mark.disruptive(N) (they kill a server) come last among them, in the order of N.

A module whose tests compare with the plain server has a function `ask_reference(reference)`, which asks it all of
that. One plain server answers for all chosen modules before the first test that compares, and never runs beside
others; the tests call the function again, which then finds the answers kept.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvferry_launch.node.vllm import KVFERRY_CONNECTOR, KvConnector
from kvferry_launch.paths import LOGS, MODELS
from kvferry_launch.process import ManagedProcess, stop_all
from kvferry_launch.testbed import toy_model
from kvferry_launch.testbed.pair import DECODE_FLAGS, Pair, PairSetup, own_cores
from kvferry_launch.testbed.preloaded import vllm_is_preloaded
from kvferry_launch.testbed.prompts import PromptSet
from kvferry_launch.testbed.reference import Reference
from kvferry_launch.testbed.servers import VllmServer
from proxy_deployment import PROXIED_CHUNK_TOKENS, ProxyDeployment
from toy_weights import let_servers_generate

CONNECTORS = {"kvferry": KVFERRY_CONNECTOR, "none": None,
              "nixl": KvConnector("NixlConnector", port_env="VLLM_NIXL_SIDE_CHANNEL_PORT")}
TEST_LOGS = LOGS / "tests"
REQUESTS = 24
MAX_TOKENS = 100
SHARED_PREFIXES = 3


def setups(connector: KvConnector | None) -> dict[str, PairSetup]:
    """Returns every pair that tests can ask for, by name."""
    chunked = ("--max-num-batched-tokens", "128")
    return {setup.name: setup for setup in (
        PairSetup("base", connector),
        PairSetup("chunked", connector, prefill_flags=chunked, decode_flags=(*DECODE_FLAGS, *chunked)),
        PairSetup("both", connector, prefill_role="kv_both", decode_role="kv_both"),
        PairSetup("both-chunked", connector, prefill_role="kv_both", decode_role="kv_both", prefill_flags=chunked,
                  decode_flags=(*DECODE_FLAGS, *chunked)),
    )}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kv-connector", choices=sorted(CONNECTORS), default="kvferry",
                     help="the connector under test; 'none' runs plain servers, 'nixl' vLLM's NixlConnector")
    parser.addoption("--stress-seeds", type=int, metavar="N",
                     help="prompt sets of the base configuration (4, with --long 10); the others take a fifth of them")


@dataclass(frozen=True)
class StressCase:
    name: str
    servers: str
    prompts: PromptSet
    long: bool = False


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "stress_case" in metafunc.fixturenames:
        metafunc.parametrize("stress_case", [
            pytest.param(case.prompts, id=f"{case.name}-seed{case.prompts.seed}",
                         marks=[pytest.mark.servers(case.servers), *([pytest.mark.long] if case.long else [])])
            for case in stress_cases(metafunc.config)])


def stress_cases(config: pytest.Config) -> list[StressCase]:
    long = config.getoption("--long")
    seeds = config.getoption("--stress-seeds") or (10 if long else 4)
    fewer = max(1, seeds // 5)

    def cases(name: str, servers: str, seeds: int, shared: int = 0, long: bool = False) -> list[StressCase]:
        return [StressCase(name, servers, PromptSet(seed, REQUESTS, shared_prefixes=shared), long)
                for seed in range(1, 1 + seeds)]

    return [*cases("base", "base", seeds), *cases("base with shared prefixes", "base", fewer, SHARED_PREFIXES),
            *cases("both roles, chunked prefill", "both-chunked", fewer),
            *cases("chunked prefill", "chunked", fewer, long=True), *cases("both roles", "both", fewer, long=True)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def order(item: pytest.Item) -> tuple[str, int]:
        servers, disruptive = item.get_closest_marker("servers"), item.get_closest_marker("disruptive")
        # Tests with servers of their own come last, because some run scripts that wait for a build which is under way.
        return (servers.args[0] if servers else "~", disruptive.args[0] if disruptive else 0)

    items.sort(key=order)


@pytest.fixture(scope="session", autouse=True)
def _preloaded() -> Iterator[None]:
    """Makes the servers of these tests forks of one process. Servers that scripts start are not forks of it."""
    let_servers_generate()
    with vllm_is_preloaded():
        yield


@pytest.fixture(scope="session")
def connector(request: pytest.FixtureRequest) -> KvConnector | None:
    return CONNECTORS[request.config.getoption("--kv-connector")]


@pytest.fixture(scope="session")
def kvferry_connector(connector: KvConnector | None) -> KvConnector:
    """Returns kvferry's connector, or skips the test if another connector was chosen."""
    if connector is not KVFERRY_CONNECTOR:
        pytest.skip("tests KvFerryConnector only")
    return KVFERRY_CONNECTOR


@pytest.fixture(scope="session")
def toy() -> Path:
    return MODELS / "toy"


@pytest.fixture(scope="session")
def other_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the path of a model with the toy model's shape and other weights."""
    return toy_model.make(tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.fixture(scope="session")
def reference(request: pytest.FixtureRequest, toy: Path) -> Iterator[Reference]:
    """Yields the plain server, which has answered all that the chosen tests ask, and is stopped."""
    plain_server = Reference(toy, own_cores()[0])
    try:
        for case in stress_cases(request.config):
            plain_server.generations(case.prompts.prompts(), MAX_TOKENS)
        for module in dict.fromkeys(item.module for item in request.session.items if isinstance(item, pytest.Function)):
            getattr(module, "ask_reference", lambda reference: None)(plain_server)
        plain_server.stop()
        yield plain_server
    finally:
        plain_server.stop()


class _Servers:
    """The pair or deployment that was asked for last. If a test asks for another one, this one is stopped."""

    def __init__(self, model: Path, connector: KvConnector | None) -> None:
        self._model = model
        self._connector = connector
        self._name = ""
        self._current: Pair | ProxyDeployment | None = None

    def pair(self, name: str) -> Pair:
        current = self._get(name, lambda: _development_pair(setups(self._connector)[name], self._model))
        assert isinstance(current, Pair)
        return current

    def proxied(self) -> ProxyDeployment:
        assert self._connector is not None
        extra = {"chunk_tokens": PROXIED_CHUNK_TOKENS}
        connector = self._connector
        current = self._get("proxied", lambda: ProxyDeployment(self._model, connector, "proxied", 2, extra))
        assert isinstance(current, ProxyDeployment)
        return current

    def _get(self, name: str, make: Callable[[], Pair | ProxyDeployment]) -> Pair | ProxyDeployment:
        if self._name != name:
            self.stop()
        if self._current is None:
            self._name, self._current = name, make()
        self._current.ensure_running()
        return self._current

    def stop(self) -> None:
        if self._current is not None:
            self._current.stop()
            self._name, self._current = "", None


def _development_pair(setup: PairSetup, model: Path) -> Pair:
    """Returns a pair whose servers have vLLM's development endpoints, which reset caches and put the server to sleep.
    """
    pair = Pair(setup, model, TEST_LOGS)
    for server in (pair.prefill, pair.decode):
        server.process.env["VLLM_SERVER_DEV_MODE"] = "1"
    return pair


@pytest.fixture(scope="session")
def servers(toy: Path, connector: KvConnector | None) -> Iterator[_Servers]:
    running = _Servers(toy, connector)
    yield running
    running.stop()


@pytest.fixture
def pair(request: pytest.FixtureRequest, reference: Reference, servers: _Servers) -> Pair:
    """Returns the running pair that the test's `servers` marker names. It starts after the plain server has stopped."""
    del reference
    marker = request.node.get_closest_marker("servers")
    assert marker is not None, "a test that uses `pair` names it with @pytest.mark.servers(NAME)"
    return servers.pair(marker.args[0])


@pytest.fixture
def proxied(reference: Reference, servers: _Servers, kvferry_connector: KvConnector) -> ProxyDeployment:
    """Returns launch/proxy in front of one prefill and two decode servers, for tests marked servers("proxied")."""
    del reference, kvferry_connector
    return servers.proxied()


@pytest.fixture
def run_server() -> Iterator[Callable[[VllmServer], VllmServer]]:
    """Yields a function that starts a server without waiting for it. The servers are stopped after the test."""
    started: list[ManagedProcess] = []

    def run(server: VllmServer) -> VllmServer:
        server.start()
        started.append(server.process)
        return server

    yield run
    stop_all(started)
