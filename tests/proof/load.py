"""Requests through a deployment in which clients give up and servers are killed."""

import asyncio
import random
import time
from collections.abc import Callable

from configurations import MAX_TOKENS, Kill
from judge import Asked, Outcome, judge_answer, judge_whole
from kvferry_launch.proxy.bodies import REMOTE_DECODE
from kvferry_launch.testbed.answers import Generation
from kvferry_launch.testbed.client import RequestError
from proof_deployment import Deployment, Server

CONCURRENCY = 6  # per decode server
ABORTS = 0.15  # of the requests are given up by their client
ABORT_WITHIN_S = 3.0
MAX_TRIES = 3  # of a request whose server was killed under it, as a router would send it again


class StageError(Exception):
    """A request failed at `server`, which had lived `life` lives when it was sent."""

    def __init__(self, server: Server, life: int, error: RequestError) -> None:
        super().__init__(f"{server.name}: {error}")
        self.was_killed = server.life != life or not server.ready


class Load:
    """Sends `prompts` and has the answers judged by `references`.

    Which client gives up, and when, follows from `seed`. Which server is free when a request gets its turn does not.
    """

    def __init__(self, deployment: Deployment, prompts: list[list[int]], references: list[Generation],
                 seed: int) -> None:
        self._deployment = deployment
        self._prompts = prompts
        self._references = references
        self._seed = seed
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
                self.outcome.kills += self._deployment.kill(self._kills.pop(0).part)

        ended = asyncio.Event()
        watcher = asyncio.create_task(self._deployment.watch(ended))
        await asyncio.gather(*(one(index) for index in range(len(self._prompts))))
        self.outcome.seconds = time.monotonic() - start
        ended.set()
        await watcher
        self.outcome.complaints += await self._deployment.complaints_when_idle()
        self.outcome.counters = self._deployment.counters()
        self.outcome.paths = [line for server in self._deployment.servers for line in server.paths]
        self.outcome.complaints += judge_whole(self.outcome)
        return self.outcome

    async def _request(self, index: int) -> None:
        rng = random.Random(f"proof {self._seed} {index}")
        give_up_after = rng.uniform(0.0, ABORT_WITHIN_S) if rng.random() < ABORTS else None
        try:
            await asyncio.wait_for(self._answered(index, rng), give_up_after)
        except asyncio.TimeoutError:  # the connection is closed in the middle of whatever was going on
            self.outcome.aborted += 1

    async def _answered(self, index: int, rng: random.Random) -> None:
        start = time.monotonic()  # all tries of a request count: a user waits for the answer
        for tries_left in reversed(range(MAX_TRIES)):
            prefill = self._pick(self._deployment.prefill, rng)
            decode = await self._wait_for_decode(rng)
            try:
                generation = await self._send(prefill, decode, self._prompts[index])
            except StageError as error:
                if error.was_killed and tries_left > 0:
                    self.outcome.resent += 1
                    continue
                self.outcome.complaints.append(f"request {index}: {error}")
                return
            asked = Asked(index, len(self._prompts[index]), prefill is not None, time.monotonic() - start)
            judge_answer(self.outcome, asked, self._references[index], generation)
            return

    @staticmethod
    def _pick(servers: list[Server], rng: random.Random) -> Server | None:
        ready = [server for server in servers if server.ready]
        return rng.choice(ready) if ready else None

    async def _wait_for_decode(self, rng: random.Random) -> Server:
        while (decode := self._pick(self._deployment.decode, rng)) is None:
            await asyncio.sleep(0.1)
        return decode

    async def _send(self, prefill: Server | None, decode: Server, prompt: list[int]) -> Generation:
        params = {}
        if prefill is not None:
            push = {"kvferry_push_to": decode.endpoint} if self._deployment.configuration.pushes else {}
            params = (await self._stage(prefill, prompt, 1, REMOTE_DECODE | push)).kv_transfer_params or {}
        return await self._stage(decode, prompt, MAX_TOKENS, params | {"kvferry_report": True})

    @staticmethod
    async def _stage(server: Server, prompt: list[int], max_tokens: int, params: dict[str, object]) -> Generation:
        """Errors: StageError. Only the death of the stage's own server excuses its failure."""
        life = server.life
        try:
            return await server.client.generate(prompt, max_tokens, params)
        except RequestError as error:
            raise StageError(server, life, error) from error
