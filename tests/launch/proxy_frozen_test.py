"""Tests launch/proxy with a real controller: a server that stands still, as after a SIGSTOP of its engine, makes no
request fail.
"""

import asyncio
import contextlib
import re
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from kvferry_launch.paths import KVFERRY
from kvferry_launch.proxy.app import FrontDoor, Options
from nodes_by_hand import Node
from proxy_stand_ins import Cluster, FakeVllm, eventually, run

BEAT_S = 0.5  # time between a node's heartbeats
LOST_AFTER_S = 2.5  # time without a heartbeat after which the controller removes a node
LEFT_WITHIN_S = 5.0


class Nodes:
    """Registers nodes with stand-in servers at a real controller. freeze() ends the heartbeats of one node."""

    def __init__(self, stream: Path, servers: list[FakeVllm]) -> None:
        self._nodes = {server.name: Node(str(stream), server.name, server.role, server.url) for server in servers}
        self._frozen: set[str] = set()

    async def beat(self) -> None:
        while True:
            for name, node in self._nodes.items():
                if name not in self._frozen:
                    await asyncio.to_thread(node.load, 0)
            await asyncio.sleep(BEAT_S)

    def freeze(self, server: FakeVllm, after_first_event: bool = False) -> None:
        async def never(_: web.Request) -> None:
            await asyncio.Event().wait()

        if after_first_event:
            server.hold.clear()
        else:
            server.on_request = never
        self._frozen.add(server.name)


@contextlib.asynccontextmanager
async def real_controller(c: Cluster, folder: Path) -> AsyncIterator[Nodes]:
    """Replaces the cluster's stand-in controller by a real one, with a proxy that uses the real one."""
    stream = folder / "stream"
    with subprocess.Popen([KVFERRY, "controller", "--bind", "tcp://127.0.0.1:0", "--http", "127.0.0.1:0", "--stream",
                           f"unix://{stream}", "--state", "none"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                          text=True) as process:
        assert process.stderr is not None
        found = re.search(r"HTTP on (\S+)", process.stderr.readline())
        assert found is not None
        nodes = Nodes(stream, [*c.prefills, *c.decodes])
        beating = asyncio.create_task(nodes.beat())
        door = FrontDoor(Options(f"http://{found[1]}"))
        runner = web.AppRunner(door.app, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            c.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            await eventually(lambda: len(door.nodes.usable("prefill", set()) + door.nodes.usable("decode", set())) == 4)
            yield nodes
        finally:
            await runner.cleanup()
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            process.terminate()


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_no_request_waits_long_for_a_frozen_server(kind: str, tmp_path: Path) -> None:
    async def test(c: Cluster) -> None:
        async with real_controller(c, tmp_path) as nodes:
            victim = (c.prefills if kind == "prefill" else c.decodes)[0]
            nodes.freeze(victim)
            frozen_at = asyncio.get_running_loop().time()
            answers = await asyncio.gather(*(c.post({"prompt": [number]}) for number in range(6)))
            assert [status for status, _ in answers] == [200] * 6
            assert asyncio.get_running_loop().time() - frozen_at < LOST_AFTER_S + LEFT_WITHIN_S
            num_got = len(victim.got)
            assert num_got > 0, "some requests went there before the controller knew"
            assert [(await c.post({"prompt": [number]}))[0] for number in range(6)] == [200] * 6
            assert len(victim.got) == num_got

    run(test)


def test_streams_of_a_frozen_server_go_on_at_another(tmp_path: Path) -> None:
    async def test(c: Cluster) -> None:
        async with real_controller(c, tmp_path) as nodes:
            for server in c.decodes:
                server.texts = ["one", " two"]
            nodes.freeze(c.decodes[0], after_first_event=True)
            frozen_at = asyncio.get_running_loop().time()
            body = {"prompt": [1], "temperature": 0, "stream": True}
            answers = await asyncio.gather(*(c.post(body) for _ in range(4)))
            assert asyncio.get_running_loop().time() - frozen_at < LOST_AFTER_S + LEFT_WITHIN_S
            assert len(c.decodes[0].got) > 0
            for status, text in answers:
                assert (status, text.count('"one"'), text.count('" two"')) == (200, 1, 1), text
                assert text.endswith("[DONE]\n\n")

    run(test)
