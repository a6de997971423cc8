"""Requests through a deployment in which clients give up and servers are killed, and the judgement of every answer."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from configurations import Configuration, Kill
from deployment import Deployment, Server
from kvferry_launch.proxy.bodies import REMOTE_DECODE
from kvferry_launch.testbed.answers import SLOW_S, Generation, Report, first_mismatch
from kvferry_launch.testbed.client import RequestError

CONCURRENCY = 6  # per decode server
ABORTS = 0.15  # of the requests are given up by their client
ABORT_WITHIN_S = 3.0
MAX_TOKENS = 100
MAX_TRIES = 3  # of a request whose server was killed under it, as a router would send it again


@dataclass
class Outcome:
    """What came of all requests to one configuration."""

    configuration: Configuration
    requests: int = 0
    right: int = 0
    aborted: int = 0
    resent: int = 0
    kills: int = 0
    preemptions: int = 0
    resumed: int = 0
    chunks: int = 0  # full ones that resumed requests had computed before
    chunks_back: int = 0  # of these, those that came from the engine's prefix cache or kvferry
    loaded_tokens: int = 0
    slowest_s: float = 0.0
    seconds: float = 0.0
    complaints: list[str] = field(default_factory=list)

    @property
    def recovered(self) -> float | None:
        return self.chunks_back / self.chunks if self.chunks else None


class Load:
    """Sends `prompts` and holds the answers against `references`. Everything random follows from `seed`."""

    def __init__(self, deployment: Deployment, prompts: list[list[int]], references: list[Generation],
                 seed: int) -> None:
        self._deployment = deployment
        self._prompts = prompts
        self._references = references
        self._rng = random.Random(f"proof {seed}")
        self._kills: list[Kill] = sorted(deployment.configuration.kills, key=lambda kill: kill.after)
        self._ended = 0
        self.outcome = Outcome(deployment.configuration, requests=len(prompts))

    async def run(self, on_answer: Callable[[int], None]) -> Outcome:
        gate = asyncio.Semaphore(CONCURRENCY * len(self._deployment.decode))
        start = time.monotonic()

        async def one(index: int) -> None:
            async with gate:
                await self._request(index)
            self._ended += 1
            on_answer(self._ended)
            while self._kills and self._ended >= self._kills[0].after * len(self._prompts):
                self._deployment.kill(self._kills.pop(0).part)
                self.outcome.kills += 1

        ended = asyncio.Event()
        watcher = asyncio.create_task(self._deployment.watch(ended))
        await asyncio.gather(*(one(index) for index in range(len(self._prompts))))
        self.outcome.seconds = time.monotonic() - start
        ended.set()
        await watcher
        self.outcome.complaints += await self._deployment.complaints_when_idle()
        return self.outcome

    async def _request(self, index: int) -> None:
        give_up_after = self._rng.uniform(0.0, ABORT_WITHIN_S) if self._rng.random() < ABORTS else None
        try:
            await asyncio.wait_for(self._answered(index), give_up_after)
        except asyncio.TimeoutError:  # the connection is closed in the middle of whatever was going on
            self.outcome.aborted += 1

    async def _answered(self, index: int) -> None:
        for tries_left in reversed(range(MAX_TRIES)):
            prefill, decode = self._pick(self._deployment.prefill), await self._wait_for_decode()
            lives = [(server, server.life) for server in (prefill, decode) if server is not None]
            start = time.monotonic()
            try:
                generation = await self._send(prefill, decode, self._prompts[index])
            except RequestError as error:
                was_killed = any(server.life != life or not server.ready for server, life in lives)
                if was_killed and tries_left > 0:
                    self.outcome.resent += 1
                    continue
                self.outcome.complaints.append(f"request {index}: {error}")
                return
            seconds = time.monotonic() - start
            self.outcome.slowest_s = max(self.outcome.slowest_s, seconds)
            if seconds > SLOW_S:
                self.outcome.complaints.append(f"request {index}: took {seconds:.1f} s, more than {SLOW_S:.0f} s")
            self._judge(index, generation)
            return

    def _pick(self, servers: list[Server]) -> Server | None:
        ready = [server for server in servers if server.ready]
        return self._rng.choice(ready) if ready else None

    async def _wait_for_decode(self) -> Server:
        while (decode := self._pick(self._deployment.decode)) is None:
            await asyncio.sleep(0.1)
        return decode

    async def _send(self, prefill: Server | None, decode: Server, prompt: list[int]) -> Generation:
        params = {}
        if prefill is not None:
            params = (await prefill.client.generate(prompt, 1, REMOTE_DECODE)).kv_transfer_params or {}
        return await decode.client.generate(prompt, MAX_TOKENS, params | {"kvferry_report": True})

    def _judge(self, index: int, generation: Generation) -> None:
        outcome = self.outcome
        mismatch = first_mismatch(self._references[index], generation)
        if mismatch:
            outcome.complaints.append(f"request {index}: {mismatch}")
        else:
            outcome.right += 1
        report = Report.of(generation)
        if report is None:
            outcome.complaints.append(f"request {index}: came back without its report")
            return
        chunk_tokens = outcome.configuration.extra.get("chunk_tokens", 256)
        outcome.preemptions += report.preemptions
        for admission in report.admissions:
            outcome.loaded_tokens += admission.loaded
            if not 0 <= admission.loaded <= admission.to_load or admission.hit >= admission.tokens:
                outcome.complaints.append(f"request {index}: {admission}")
            if admission.resumed:
                # The token sampled last has no KV yet.
                chunks = (admission.tokens - 1) // chunk_tokens
                outcome.resumed += 1
                outcome.chunks += chunks
                outcome.chunks_back += min(chunks, (admission.local + admission.to_load) // chunk_tokens)
