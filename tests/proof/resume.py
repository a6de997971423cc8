"""Measures how long a preempted request waits until it continues: with kvferry, and on a plain server, which computes
its KV again.

One request at a time streams its answer. In the middle, every running request is preempted and the engine's prefix
cache is emptied (vLLM's /reset_prefix_cache), as if other requests had taken the blocks. The wait is the longest gap
between two tokens after that, minus the usual gap.
"""

import asyncio
import itertools
import random
import statistics
import time
from pathlib import Path
from typing import Any

import aiohttp
from kvferry_launch.node.vllm import KVFERRY_CONNECTOR
from kvferry_launch.testbed.pair import own_cores
from kvferry_launch.testbed.servers import Controller, VllmServer
from proof_models import Model

CONTEXTS = (512, 1024, 2048)
REPEAT = 5
TOKENS = 24
PREEMPT_AFTER = 10  # tokens


async def gap_ms(session: aiohttp.ClientSession, server: VllmServer, model: str, prompt: list[int]) -> float:
    """Returns the wait of one preempted request in ms."""
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True,
            "stream": True}
    times: list[float] = []
    reset: asyncio.Task[None] | None = None

    async def preempt() -> None:
        async with session.post(f"{server.url}/reset_prefix_cache",
                                params={"reset_running_requests": "true"}) as answer:
            assert answer.status == 200, await answer.text()

    async with session.post(f"{server.url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            times.append(time.monotonic())
            if len(times) == PREEMPT_AFTER:
                reset = asyncio.create_task(preempt())
    assert reset is not None, "the answer was too short to be preempted"
    await reset
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return 1000 * (max(gaps[PREEMPT_AFTER - 1:]) - statistics.median(gaps[1:PREEMPT_AFTER - 1]))


async def measure(server: VllmServer, contexts: tuple[int, ...]) -> dict[int, float]:
    """Returns the median wait in ms for each context length in tokens."""
    found = {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as session:
        async with session.get(f"{server.url}/v1/models") as answer:
            model = (await answer.json())["data"][0]["id"]
        for context in contexts:
            waits = []
            for turn in range(REPEAT + 1):  # the first turn warms up
                rng = random.Random(f"resume {context} {turn}")
                prompt = [rng.randint(1, 510) for _ in range(context)]
                waits.append(await gap_ms(session, server, model, prompt))
            found[context] = statistics.median(waits[1:])
    return found


def table(model: Model, extra: dict[str, Any], log_folder: Path) -> str:
    """Measures both servers, one after the other, on the same core. Returns a Markdown table.

    extra: settings of kvferry.
    """
    controller = Controller("resume-controller", log_folder=log_folder)
    controller.start()
    controller.wait_ready()
    config = KVFERRY_CONNECTOR.config("kv_both", controller.address, extra={"pool_bytes": "3GiB"} | extra)
    found = {}
    try:
        for name, kv_config in (("plain", None), ("kvferry", config)):
            server = VllmServer(f"resume-{name}", model.folder, own_cores()[0], kv_config,
                                ("--max-model-len", "4096", *model.flags),
                                {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "2"} | model.env,
                                log_folder=log_folder)
            server.start()
            try:
                server.wait_ready()
                found[name] = asyncio.run(measure(server, CONTEXTS))
            finally:
                server.stop()
    finally:
        controller.stop()
    lines = ["| context, tokens | plain vLLM computes again, ms | kvferry loads, ms | times faster |",
             "|---|---|---|---|"]
    for context in CONTEXTS:
        again, loads = found["plain"][context], found["kvferry"][context]
        lines.append(f"| {context} | {again:.0f} | {loads:.0f} | {again / loads:.1f} |")
    return "\n".join(lines)
