"""Changes the cluster in one phase after the other, and checks what must be true after each phase."""

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster_namespaces import PREFIX
from cluster_traffic import CLIENTS, CROWD, PAUSE_S, Bench, Tally, Traffic, environment
from deployment import Deployment, marked
from kvferry.tickets import signer_of
from kvferry_launch.node import serving
from kvferry_launch.node.cluster_key import KEY_NAME
from kvferry_launch.node.guard import descendants
from kvferry_launch.paths import KVFERRY
from kvferry_launch.testbed.answers import growth
from kvferry_launch.testbed.client import RequestError, VllmClient
from kvferry_launch.testbed.log_paths import path_lines
from kvferry_launch.testbed.pair import own_cores
from texts import complete_text

FIRST = "all is well"
HOSTS = ("front", "p0", "p1", "d0", "d1", "d2")
FLAGS = ["--max-model-len", 1024, "--num-gpu-blocks-override", 200]
READY_WITHIN_S = 900.0  # long, because up to five servers share two cores
# The next two limits are those of a measurement. A quick run is a test, which a busy machine must not fail: its limits
# are QUICK_TIMES as long.
JOINED_WITHIN_S = 5.0
STILL_WITHIN_S = 5.0  # time that a server that stands still may cost a request
QUICK_TIMES = 6
IDLE_WITHIN_S = 90.0  # longer than the 60 s for which a prefill server holds KV that no decode server has pulled
BENCH_WITHIN_S = 300.0
# vLLM's workers spin for a second after each step, so clients must pause longer while a server starts
STARTING_PAUSE_S = 4.0
BENCH_RATE = 1.0  # requests per second, few because there are two cores
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
          "kvferry_pool_pinned_chunks", "kvferry_fetching_requests", "kvferry_open_pushes",
          "kvferry_open_push_reservations")


@dataclass
class Phase:
    """One phase, which becomes one row of the table."""

    name: str
    tally: Tally
    seconds: float = 0.0
    note: str = ""
    bench_requests: int = 0
    complaints: list[str] = field(default_factory=list)


@dataclass
class Options:
    model: Path
    folder: Path
    router: str
    quick: bool
    hosts: dict[str, Any]  # keys of the deployment's YAML that define the hosts; empty: all nodes run on this host
    say: Callable[[str], None]

    @property
    def decodes(self) -> int:
        """Number of decode servers before another one joins."""
        return 1 if self.quick else 2


def document(options: Options) -> dict[str, Any]:
    """Returns the deployment's YAML, with up to three servers on a core."""
    first, second = own_cores()
    extra = {"pool_bytes": "256MiB"}
    prefill = {"replicas": 2, "cores": [first, second], "flags": FLAGS, "extra": extra}
    decode = {"replicas": options.decodes, "cores": [second, first, second], "flags": FLAGS, "extra": extra}
    made = {"model": str(options.model), "vllm": [], "router": {"kind": options.router}, "prefill": prefill,
            "decode": decode, "drain_timeout_s": 120, "restart": 3} | options.hosts
    if hosts := options.hosts.get("hosts"):
        for role, letter in ((prefill, "p"), (decode, "d")):
            role["hosts"] = {name: address for name, address in hosts.items()
                             if name.startswith(f"{PREFIX}{letter}")}
    return made


class Cluster:
    """The deployment under test, and the requests that clients send to it all the time."""

    def __init__(self, options: Options, make_traffic: Callable[[str], Traffic]) -> None:
        self._options = options
        self._say = options.say
        self._make_traffic = make_traffic
        self.deployment = Deployment(options.folder, **document(options))
        self.deployment.document["env"] |= environment()
        self.deployment.write()
        self.phases: list[Phase] = []
        self._benches = 0

    # ---- the whole scenario ----
    def run(self) -> None:
        """Runs all phases. Errors: AssertionError with a sentence if the scenario can't go on. Other faults are
        complaints of a phase.
        """
        begin = time.monotonic()
        self.deployment.start_ready(READY_WITHIN_S)
        self._say(f"ready after {time.monotonic() - begin:.0f} s: {self.deployment.url()}")
        self.traffic = self._make_traffic(self.deployment.url())
        self.traffic.begin(FIRST)
        self.traffic.start()
        try:
            self._changes()
        finally:
            self.traffic.stop()
        self._end()

    def _changes(self) -> None:
        """Runs the phases that change the cluster. With vllm-router no server is killed, because vllm-router does not
        send a failed request to another server; launch/README.md says what this means.
        """
        count = 12 if self._options.quick else 40
        with self._phase(FIRST, bench="random", count=count):
            self._answered(10 if self._options.quick else 40)
        if self._options.router == "proxy":
            if not self._options.quick:  # with --quick a decode server is killed, and a prefill server stands still
                with self._phase("a prefill server is killed", bench="random", count=count) as phase:
                    self._kill_server(phase, "prefill-0")
            # With --quick there is one decode server, for which all requests would have to wait.
            for name in ("prefill-0",) if self._options.quick else ("prefill-0", "decode-0"):
                with self._phase(f"a {name.partition('-')[0]} server stands still") as phase:
                    self._stand_still(phase, name)
            with self._phase("the controller is killed") as phase:
                self._kill(phase, "controller", lambda words: words.startswith(f"{KVFERRY} controller "))
                self._until(lambda: len(self._nodes()) == 2 + self._options.decodes,
                            "the nodes told the new controller of themselves")
                self._answered(6)
            with self._phase("the front door is killed") as phase:
                self.traffic.door_may_break = True
                self._kill(phase, "router", lambda words: "launch/proxy --controller" in words)
                self._answered(6)
                self.traffic.door_may_break = False
        with self._phase("a decode server joins", bench=self._unless_quick("random"), count=count) as phase:
            self._join(phase)
        if self._options.router == "proxy":
            bench = self._unless_quick("prefix_repetition")
            with self._phase("a decode server is killed", bench=bench, count=count) as phase:
                self._kill_server(phase, "decode-0")
        with self._phase("a decode server leaves", bench=self._unless_quick("prefix_repetition"),
                         count=count) as phase:
            self._leave(phase)

    def _limit(self, seconds: float) -> float:
        return seconds * (QUICK_TIMES if self._options.quick else 1)

    def _unless_quick(self, bench: str) -> str | None:
        return None if self._options.quick else bench

    # ---- the phases ----
    @contextlib.contextmanager
    def _phase(self, name: str, bench: str | None = None, count: int = 0) -> Iterator[Phase]:
        phase = Phase(name, self.traffic.begin(name))
        self.phases.append(phase)
        self._say(name)
        begin = time.monotonic()
        client = None
        if bench is not None:
            self._benches += 1
            phase.bench_requests = count
            client = Bench(self.deployment.url(), self._options.model, bench, count, BENCH_RATE, self._options.folder,
                           self._benches)
            self._until(lambda: client.has_begun, f"vllm bench serve ({bench}) began", BENCH_WITHIN_S)
        try:
            yield phase
        except AssertionError as error:
            phase.complaints.append(str(error)[:2000])
            raise
        finally:
            if client is not None:
                phase.complaints += client.complaints(BENCH_WITHIN_S)
            phase.seconds = time.monotonic() - begin
            for complaint in phase.complaints + phase.tally.failures:
                self._say(f"  COMPLAINT: {complaint}")

    def _kill_server(self, phase: Phase, name: str) -> None:
        """Kills all processes of the server at once, as if its host died."""
        self._answered(2)
        before = metrics(self.deployment.url())
        self._kill(phase, name, is_server(name))
        grown = growth(before, metrics(self.deployment.url()))
        again, continued = (grown.get(f"kvferry_proxy_{name}_total", 0.0) for name in ("retries", "continued_streams"))
        phase.note += f"; sent to another pair: {again:.0f}, of them in the middle of a stream: {continued:.0f}"

    def _stand_still(self, phase: Phase, name: str) -> None:
        """Stops the server's engine while its API server still accepts requests, and lets it go on later."""
        engines = [pid for pid in descendants(self._process(name, is_server(name))) if is_engine(pid)]
        assert len(engines) == 1, f"there are {len(engines)} engines of {name}"
        os.kill(engines[0], signal.SIGSTOP)
        try:
            others = {other for other, row in self._rows().items() if row["role"] in ("prefill", "decode")} - {name}
            self._until(lambda: set(self._nodes()) == others, f"the controller lost {name}")
            self._answered(8)
        finally:
            os.kill(engines[0], signal.SIGCONT)
        continued_at = time.monotonic()
        self._until(lambda: name in self._nodes(), f"{name} told the controller of itself again")
        phase.note = f"{name} is named again after {time.monotonic() - continued_at:.1f} s"
        self._answered(4)
        usual_s = self.phases[0].tally.slowest_s
        if phase.tally.slowest_s > usual_s + (limit_s := self._limit(STILL_WITHIN_S)):
            phase.complaints.append(f"an answer took {phase.tally.slowest_s:.1f} s, more than {limit_s:.0f} s "
                                    f"longer than the slowest before ({usual_s:.1f} s)")

    def _process(self, name: str, is_it: Callable[[str], bool]) -> int:
        self.deployment.remember()
        found = [pid for pid, words in marked(self.deployment.mark).items() if is_it(words)]
        assert len(found) == 1, f"there are {len(found)} processes of {name}"
        return found[0]

    def _kill(self, phase: Phase, name: str, is_it: Callable[[str], bool]) -> None:
        process = self._process(name, is_it)
        restarts = self._rows()[name]["restarts"]
        killed_at = time.monotonic()
        for pid in [process, *descendants(process)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._until(lambda: self._rows()[name]["restarts"] == restarts + 1, f"{name}'s end was noticed")
        self._answered(4)
        with self._some_of_the_cores():
            self._until(lambda: bool(self._state()["ready"]), f"{name} is back", READY_WITHIN_S)
        phase.note = f"{name} is back after {time.monotonic() - killed_at:.0f} s"

    def _join(self, phase: Phase) -> None:
        name = f"decode-{self._options.decodes}"
        scaling = threading.Thread(target=self.deployment.call, args=("scale", f"decode={self._options.decodes + 1}"),
                                   kwargs={"within_s": READY_WITHIN_S, "check": False})
        scaling.start()
        nodes: dict[str, dict[str, Any]] = {}

        def is_named() -> bool:
            nodes.update(self._nodes())
            return name in nodes

        with self._some_of_the_cores():
            self._until(is_named, f"{name} told the controller of itself", READY_WITHIN_S)
        url = nodes[name]["serves"]
        with self._crowd():
            self._until(lambda: serving.answers(f"{url}/health"), f"{name} is healthy", READY_WITHIN_S)
            ready_at = time.monotonic()
            self._until(lambda: metrics(url).get("vllm:prompt_tokens_total", 0.0) > 0, f"{name} got a request", 60.0)
            taken_s = time.monotonic() - ready_at
        phase.note = f"its first request {taken_s:.1f} s after /health"
        if taken_s > (limit_s := self._limit(JOINED_WITHIN_S)):
            phase.complaints.append(f"a joined server takes traffic after {taken_s:.1f} s, more than {limit_s:.0f}")
        scaling.join()
        self._answered(6)

    def _leave(self, phase: Phase) -> None:
        begin = time.monotonic()
        before = set(self._rows())
        leaving = f"decode-{self._options.decodes}"
        self.deployment.call("scale", f"decode={self._options.decodes}", within_s=READY_WITHIN_S)
        phase.note = f"gone after {time.monotonic() - begin:.0f} s"
        rows = self._rows()
        assert set(rows) == before - {leaving}, str(set(rows))
        assert "is removed although its drain failed" not in self.deployment.text(), "the drain failed"
        self._until(lambda: leaving not in self._nodes(), "the controller dropped the node that left", 10.0)
        self._answered(6)

    def _end(self) -> None:
        """Checks that no request runs and no block is held any more, ends the deployment, and checks that no process is
        left.
        """
        self._say("end")
        phase = Phase("the end", Tally())
        self.phases.append(phase)
        begin = time.monotonic()
        urls = {name: row["url"] for name, row in self._rows().items()
                if row["role"] in ("prefill", "decode")}
        deadline = time.monotonic() + IDLE_WITHIN_S
        while left := {name: held for name, url in urls.items() if (held := left_over(url))}:
            if time.monotonic() > deadline:
                phase.complaints.append(f"still held: {left}")
                break
            time.sleep(1.0)
        phase.note = f"all blocks free after {time.monotonic() - begin:.0f} s"
        self.deployment.signal(signal.SIGINT)
        status = self.deployment.wait_end()
        if status != 0:
            phase.complaints.append(f"launch/cluster up ended with status {status}")
        try:
            self.deployment.none_left(within_s=10.0)
        except AssertionError as error:
            phase.complaints.append(f"processes are left: {error}"[:2000])
        phase.seconds = time.monotonic() - begin
        for complaint in phase.complaints:
            self._say(f"  COMPLAINT: {complaint}")

    def clean_up(self) -> None:
        self.deployment.clean_up()

    @contextlib.contextmanager
    def _some_of_the_cores(self) -> Iterator[None]:
        """Makes the clients pause between requests during the `with` block, because a new server starts on the same
        cores.
        """
        self.traffic.pause_s = STARTING_PAUSE_S
        try:
            yield
        finally:
            self.traffic.pause_s = PAUSE_S

    @contextlib.contextmanager
    def _crowd(self) -> Iterator[None]:
        """Runs more clients during the `with` block than the present servers can serve at once, so that another server
        is needed.
        """
        self.traffic.clients = CROWD
        try:
            yield
        finally:
            self.traffic.clients = CLIENTS

    # ---- the state of the deployment ----
    def _state(self) -> dict[str, Any]:
        """Returns what `launch/cluster status` shows, read from the state file without a request."""
        found: dict[str, Any] = json.loads((self._options.folder / "run" / "tested" / "state.json").read_text())
        return found

    def _rows(self) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in self._state()["nodes"]}

    def paths(self) -> list[str]:
        """Returns the lines of the servers' logs that name the paths to their peers."""
        found = set()
        for log in (self._options.folder / "run").glob("*/logs/*.log"):
            found |= set(path_lines(log.read_text(errors="replace")))
        return sorted(found)

    def _nodes(self) -> dict[str, dict[str, Any]]:
        http = next((line.rpartition(" ")[2] for line in reversed(self._controller_log().splitlines())
                     if " HTTP on " in line), "")
        try:
            address = self._options.hosts.get("hosts", {}).get(f"{PREFIX}front", "127.0.0.1")
            token = signer_of(str(self._options.folder / "run" / "tested" / KEY_NAME)).http_token()
            request = urllib.request.Request(f"http://{address}:{http.rpartition(':')[2]}/nodes",
                                             headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(request, timeout=5) as answer:
                return {node["engine_id"]: node for node in json.load(answer)["nodes"]}
        except (OSError, ValueError):
            return {}

    def _controller_log(self) -> str:
        return (self._options.folder / "run" / "tested" / "logs" / "controller.log").read_text(errors="replace")

    def _answered(self, more: int) -> None:
        goal = self.traffic.answered + more
        self._until(lambda: self.traffic.answered >= goal, f"{more} more requests were answered", 180.0)

    def _until(self, condition: Callable[[], bool], what: str, within_s: float = 60.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {within_s:.0f} s: {what}"
            time.sleep(0.1)


def is_server(name: str) -> Callable[[str], bool]:
    """Returns a function that tells whether a command line is that of the vLLM server with this name."""
    return lambda words: "-m vllm" in words and f'"engine_id": "{name}"' in words and "--engine-id" not in words


def is_engine(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"VLLM::EngineCore")
    return False


def metrics(url: str) -> dict[str, float]:
    async def ask() -> dict[str, float]:
        async with VllmClient(url) as client:
            return await client.metrics()

    try:
        return asyncio.run(ask())
    except OSError:
        return {}


def left_over(url: str) -> dict[str, float]:
    """Returns what a server still holds or runs. Sends a small request first, because gauges are only updated by a
    step.
    """
    async def ask() -> dict[str, float]:
        async with VllmClient(url) as client:
            with contextlib.suppress(RequestError):
                await complete_text(client, f"w{int(time.time() * 1000) % 500 + 1} w7 w8", 2)
            return await client.metrics()

    now = asyncio.run(ask())
    return {name: now[name] for name in GAUGES if now.get(name)}
