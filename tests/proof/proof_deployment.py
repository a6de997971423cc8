"""The processes of one configuration, and checks of their counters, during the run and after the last request."""

import asyncio
import re
import signal
import time
from pathlib import Path

from configurations import Configuration, Part
from kvferry_launch.node import serving
from kvferry_launch.node.vllm import KVFERRY_CONNECTOR
from kvferry_launch.process import ManagedProcess, stop_all
from kvferry_launch.testbed.client import RequestError, VllmClient
from kvferry_launch.testbed.log_paths import path_lines
from kvferry_launch.testbed.pair import own_cores
from kvferry_launch.testbed.servers import Controller, VllmServer
from proof_models import Model

READY_TIMEOUT_S = 300.0
IDLE_TIMEOUT_S = 80.0  # longer than the 60 s for which a prefill server holds KV that no decode server has pulled
SAMPLE_INTERVAL_S = 0.5
LOG_ALARMS = re.compile(r"kvferry: failed check|EngineDeadError|AssertionError|Traceback \(most recent call last\)")
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
          "kvferry_pool_pinned_chunks")


def died_of_kill(process: ManagedProcess) -> bool:
    """Kills the process. Returns True if it ran until then and this signal ended it."""
    was_running = process.running
    process.kill()
    return was_running and process.exit_status == -signal.SIGKILL


class Server:
    """A vLLM server that may be killed and started again. `life` counts its starts."""

    def __init__(self, server: VllmServer) -> None:
        self.server = server
        self.client = VllmClient(server.url)
        self.life = 0
        self.ready = False
        self.alarms: list[str] = []
        self.paths: list[str] = []  # the server's log lines that name the path to a peer
        self.endpoint = ""  # endpoint of the server's node, to which KV is pushed
        self.earlier: dict[str, float] = {}  # the counters of earlier lives, which were killed
        self._last: dict[str, float] = {}

    @property
    def name(self) -> str:
        return self.server.name

    def start(self) -> None:
        self.life += 1
        self.ready = False
        for name, value in self._last.items():
            self.earlier[name] = self.earlier.get(name, 0.0) + value
        self._last = {}
        self.server.start()

    async def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not await asyncio.to_thread(serving.answers, f"{self.server.url}/health"):
            self.server.process.fail_if_dead()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} is not healthy after {READY_TIMEOUT_S:.0f} s")
            await asyncio.sleep(0.2)
        self.ready = True

    def kill(self) -> bool:
        """Kills the server. Returns True if this ended it. Reads the log before the next start empties it."""
        self.ready = False
        died = died_of_kill(self.server.process)
        self.read_log()
        return died

    def read_log(self) -> None:
        text = self.server.process.log_text()
        self.alarms += [f"{self.name} says: {line.strip()[:200]}" for line in text.splitlines()
                        if LOG_ALARMS.search(line)]
        self.paths += [f"{self.name} says: {line}" for line in path_lines(text)]

    def check_counters(self, now: dict[str, float]) -> None:
        """Adds an alarm for each counter that has shrunk since the last call, and for each counter below 0."""
        for name, value in now.items():
            is_counter = name.endswith(("_total", "_count", "_sum", "_bucket"))
            last = self._last.get(name, 0.0)
            if is_counter and value < last:
                self.alarms.append(f"{self.name}: {name} shrank from {last:g} to {value:g}")
            if value < 0 and (is_counter or name.startswith("kvferry_")):
                self.alarms.append(f"{self.name}: {name} is {value:g}")
        self._last = now

    async def left_over(self) -> dict[str, float]:
        """Returns what the server still holds or runs; empty if nothing. Sends a small request first, because gauges
        are only updated by a step.
        """
        await self.client.generate([int(time.time() * 1000) % 500 + 1 for _ in range(5)], 2)
        metrics = await self.client.metrics()
        self.check_counters(metrics)
        missing = [name for name in GAUGES if name not in metrics]
        if missing:
            raise RequestError(f"/metrics lacks {', '.join(missing)}")
        return {name: metrics[name] for name in GAUGES if metrics[name] != 0}

    def counters(self) -> dict[str, float]:
        """Returns kvferry's counters, summed over all lives. For a life that was killed, the values are those that were
        last read.
        """
        names = {name for name in (*self.earlier, *self._last) if re.fullmatch(r"kvferry_\w+_total", name)}
        return {name: self.earlier.get(name, 0.0) + self._last.get(name, 0.0) for name in names}


class Deployment:
    def __init__(self, configuration: Configuration, models: dict[str, Model], log_folder: Path) -> None:
        self.configuration = configuration
        label = re.sub(r"[^a-z]+", "-", configuration.name)
        self.controller = Controller(f"{label}-controller", log_folder=log_folder)
        cores = own_cores()

        def server(kind: str, index: int, role: str, flags: tuple[str, ...]) -> Server:
            config = KVFERRY_CONNECTOR.config(role, self.controller.address, f"{kind}{index}", configuration.extra)
            model = models[configuration.model]
            return Server(VllmServer(f"{label}-{kind}{index}", model.folder,
                                     cores[(index + (kind == "decode")) % len(cores)], config,
                                     ("--max-model-len", "640", *model.flags, *flags, *configuration.flags),
                                     model.env | configuration.env, log_folder=log_folder))

        blocks = ("--num-gpu-blocks-override", str(configuration.decode_blocks))
        self.prefill = [server("prefill", i, configuration.prefill_role, ())
                        for i in range(configuration.num_prefill)]
        self.decode = [server("decode", i, configuration.decode_role, blocks)
                       for i in range(configuration.num_decode)]
        self.returns: list[asyncio.Task[None]] = []

    @property
    def servers(self) -> list[Server]:
        return [*self.prefill, *self.decode]

    async def start(self) -> None:
        self.controller.start()
        await asyncio.to_thread(self.controller.wait_ready)
        for server in self.servers:
            server.start()
            await server.client.__aenter__()
        await asyncio.gather(*(server.wait_ready() for server in self.servers))
        if self.configuration.pushes:
            endpoints = await asyncio.to_thread(self.controller.endpoints)
            for index, server in enumerate(self.decode):
                server.endpoint = endpoints[f"decode{index}"]

    def kill(self, part: Part) -> bool:
        """Kills a process and starts it again at once. Returns True if the kill ended it. The new task in `returns`
        ends when the process is ready again.
        """
        if part == "controller":
            died = died_of_kill(self.controller.process)
            self.controller.start()
            back = asyncio.to_thread(self.controller.wait_ready)
        else:
            server = (self.prefill if part == "prefill" else self.decode)[0]
            died = server.kill()
            server.start()
            back = server.wait_ready()
        self.returns.append(asyncio.create_task(back))
        return died

    async def watch(self, until: asyncio.Event) -> None:
        """Reads and checks the counters of all servers repeatedly."""
        while not until.is_set():  # this does not use wait_for(), which may swallow a cancellation before Python 3.12
            for server in self.servers:
                if not server.ready:
                    continue
                life = server.life
                try:
                    metrics = await asyncio.wait_for(server.client.metrics(), 20.0)
                except (OSError, RequestError, TimeoutError):
                    continue
                except Exception as error:
                    if "aiohttp" not in type(error).__module__:
                        raise
                    continue
                if life == server.life:
                    server.check_counters(metrics)
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    async def complaints_when_idle(self) -> list[str]:
        """Returns a complaint for everything that is still held, running or dead after all requests have ended."""
        await asyncio.gather(*self.returns)
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        complaints = []
        for server in self.servers:
            while True:
                try:
                    left = await server.left_over()
                except RequestError as error:
                    complaints.append(f"{server.name} is not well: {error}")
                    break
                if not left:
                    break
                if time.monotonic() > deadline:
                    complaints.append(f"{server.name} still has {left}")
                    break
                await asyncio.sleep(2.0)
            server.read_log()
            complaints += server.alarms
        return complaints

    def counters(self) -> dict[str, float]:
        """Returns kvferry's counters, summed over all servers."""
        found: dict[str, float] = {}
        for server in self.servers:
            for name, value in server.counters().items():
                found[name] = found.get(name, 0.0) + value
        return found

    async def stop(self) -> None:
        for task in self.returns:
            task.cancel()
        for server in self.servers:
            await server.client.__aexit__()
        processes: list[ManagedProcess] = [server.server.process for server in self.servers]
        await asyncio.to_thread(stop_all, processes)
        self.controller.stop()


