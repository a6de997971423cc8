"""Sends requests to a deployment in which clients disconnect and servers are killed."""

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

CONCURRENCY = 6  # requests at a time for each decode server
ABORTS = 0.15  # share of the requests whose client disconnects early
ABORT_WITHIN_S = (0.5, 3.0)  # half of them early, since an answer may take less than a second
MAX_TRIES = 3  # A request whose server was killed is sent again, as a router would do, up to this many times in all.


class StageError(Exception):
    """A request failed at `server`. `life`: number of starts of the server when the request was sent."""

    def __init__(self, server: Server, life: int, error: RequestError) -> None:
        super().__init__(f"{server.name}: {error}")
        self.was_killed = server.life != life or not server.ready


class Load:
    """Sends `prompts` and judges the answers by `references`.

    `seed` decides which clients disconnect, and when. It does not decide which server is free when a request is sent.
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
        give_up_after = rng.uniform(0.0, rng.choice(ABORT_WITHIN_S)) if rng.random() < ABORTS else None
        try:
            await asyncio.wait_for(self._answered(index, rng), give_up_after)
        except asyncio.TimeoutError:  # the client closes its connection in the middle of the request
            self.outcome.aborted += 1

    async def _answered(self, index: int, rng: random.Random) -> None:
        start = time.monotonic()  # the time of all tries counts, because a user waits for the answer
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
        """Sends one stage of a request to its server. Errors: StageError. A failure is excused only if this server was
        killed.
        """
        life = server.life
        try:
            return await server.client.generate(prompt, max_tokens, params)
        except RequestError as error:
            raise StageError(server, life, error) from error
