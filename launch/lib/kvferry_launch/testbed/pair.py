"""A prefill server, a decode server and, if the connector needs one, a controller, on one host."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry_launch.node.cluster_key import ensure_key
from kvferry_launch.node.vllm import KVFERRY_CONNECTOR, KvConnector
from kvferry_launch.paths import LOGS
from kvferry_launch.process import STOP_GRACE_S, ManagedProcess, free_port, stop_all
from kvferry_launch.testbed.answers import Answer, Generation, LoadResult
from kvferry_launch.testbed.client import VllmClient, judged_load, prefill_then_decode
from kvferry_launch.testbed.servers import CONTROLLER_FLAGS, Controller, VllmServer

CONCURRENCY = 8
DECODE_BLOCKS = 40  # 8 requests of 500 tokens need 128 blocks of 32 tokens, so the decode server must preempt
DECODE_FLAGS = ("--num-gpu-blocks-override", str(DECODE_BLOCKS), "--max-model-len", "1024")


@dataclass(frozen=True)
class PairSetup:
    """The configuration of a pair. Without a connector, the pair is two plain servers, with which the tests themselves
    can be checked.
    """

    name: str
    connector: KvConnector | None
    prefill_role: str = "kv_producer"
    decode_role: str = "kv_consumer"
    prefill_flags: tuple[str, ...] = ()
    decode_flags: tuple[str, ...] = DECODE_FLAGS
    extra: dict[str, Any] = field(default_factory=dict, hash=False)
    controller_flags: tuple[str, ...] = CONTROLLER_FLAGS
    prefill_python: str = sys.executable
    decode_python: str = sys.executable


def own_cores() -> tuple[str, str]:
    """Returns a core for the prefill server and one for the decode server. They are the same if this process may use
    only one.
    """
    cores = sorted(os.sched_getaffinity(0))
    return str(cores[0]), str(cores[1 % len(cores)])


class Pair:
    """The processes of one pair. ensure_running() also restarts processes that a test has killed."""

    def __init__(self, setup: PairSetup, model: Path, log_folder: Path = LOGS) -> None:
        self.setup = setup
        needs_controller = setup.connector is not None and setup.connector.needs_controller
        key_file = ensure_key(log_folder / f"{setup.name}.key") if setup.connector is KVFERRY_CONNECTOR else None
        self.controller = Controller(f"{setup.name}-controller", flags=setup.controller_flags, log_folder=log_folder,
                                     key_file=key_file) if needs_controller else None
        prefill_core, decode_core = own_cores()
        self.prefill = self._server("prefill", model, prefill_core, setup.prefill_role, setup.prefill_flags,
                                    log_folder, setup.prefill_python)
        self.decode = self._server("decode", model, decode_core, setup.decode_role, setup.decode_flags, log_folder,
                                   setup.decode_python)

    @property
    def processes(self) -> list[ManagedProcess]:
        own = [self.decode.process, self.prefill.process]
        return [*own, self.controller.process] if self.controller else own

    def start(self) -> None:
        """Starts the processes that don't run, and returns before the servers are ready."""
        if self.controller and not self.controller.process.running:
            self.controller.start()
            self.controller.wait_ready()
        for server in (self.prefill, self.decode):
            if not server.process.running:
                server.start()

    def ensure_running(self) -> None:
        """Starts the processes that don't run, and waits until both servers are ready. Errors: ProcessError if a
        process does not become ready.
        """
        self.start()
        for server in (self.prefill, self.decode):
            server.wait_ready()

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Stops the servers before the controller, so that the servers can deregister."""
        stop_all([self.decode.process, self.prefill.process], grace_s)
        if self.controller:
            self.controller.process.stop(grace_s)

    def _server(self, name: str, model: Path, core: str, role: str, flags: tuple[str, ...],
                log_folder: Path, python: str) -> VllmServer:
        connector = self.setup.connector
        config = None
        env: dict[str, str] = {}
        if connector is not None:
            address = self.controller.address if self.controller else None
            config = connector.config(role, address, extra=self.setup.extra)
            env |= self.controller.member_env if self.controller else {}
            if connector.port_env is not None:
                env[connector.port_env] = str(free_port())
        return VllmServer(f"{self.setup.name}-{name}", model, core, config, flags, env, log_folder=log_folder,
                          python=python)


async def pair_load(pair: Pair, prompts: list[list[int]], references: list[Generation], max_tokens: int,
                    on_answer: Callable[[int, Answer], None] = lambda index, answer: None) -> LoadResult:
    """Sends the prompts through the pair, CONCURRENCY at a time. If the pair uses kvferry's connector, each request
    asks for the connector's report.
    """
    report = {"kvferry_report": True} if pair.setup.connector is KVFERRY_CONNECTOR else None
    async with VllmClient(pair.prefill.url) as prefill, VllmClient(pair.decode.url) as decode:
        return await judged_load(decode, prompts, references,
                                 lambda prompt: prefill_then_decode(prefill, decode, prompt, max_tokens, report),
                                 CONCURRENCY, on_answer)
