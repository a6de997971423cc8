"""The requests that clients send to the router while the cluster changes: requests whose tokens are all known
beforehand, and `vllm bench serve`.
"""

import asyncio
import json
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from kvferry_launch.process import ManagedProcess
from kvferry_launch.testbed.answers import Generation
from texts import completion_body, text_of

MAX_TOKENS = 40
TIMEOUT_S = 120.0
PAUSE_S = 0.5  # pause of each client between two requests
CLIENTS = 2
CROWD = 4  # number of clients with which each of two decode servers always has a request
DOOR_WITHIN_S = 60.0

# Runs what `vllm bench serve` runs. The command `vllm` itself fails here, because it needs the version of a
# distribution that the CPU build does not have.
BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
DATA_SETS = {
    "random": ["--dataset-name", "random", "--random-input-len", "160", "--random-output-len", "24"],
    "prefix_repetition": ["--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", "128",
                          "--prefix-repetition-suffix-len", "32", "--prefix-repetition-num-prefixes", "2",
                          "--prefix-repetition-output-len", "24"],
}
OUTPUT_TOKENS = 24


@dataclass
class Tally:
    """Counts the requests that began in one phase."""

    requests: int = 0
    wrong: int = 0
    sent_again: int = 0  # requests that were sent again because the router itself was killed
    slowest_s: float = 0.0
    failures: list[str] = field(default_factory=list)


class Traffic:
    """Runs `clients` clients, at most CROWD. Each client sends one request after the other, in a thread; every second
    request is a stream. `clients` and `pause_s` may change at any time.

    Prompts are repeated. Two of three requests have a unique salt, which makes their prompt a new one for all caches. A
    request whose connection broke is sent again only while `door_may_break`: once, as soon as the router is back.
    """

    def __init__(self, url: str, prompts: list[list[int]], references: list[Generation]) -> None:
        self._url, self._prompts = url, prompts
        self._texts = [text_of(reference.tokens[:MAX_TOKENS]).split() for reference in references]
        self.tallies: dict[str, Tally] = {}
        self.answered = 0
        self.door_may_break = False
        self.clients = CLIENTS
        self.pause_s = PAUSE_S
        self._phase = Tally()
        self._turn = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stops sending requests, and waits until the running requests have ended."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()

    def begin(self, phase: str) -> Tally:
        self._phase = self.tallies.setdefault(phase, Tally())
        return self._phase

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)) as session:
            await asyncio.gather(*(self._client(session, number) for number in range(CROWD)))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        while not self._ending.is_set():
            if number >= self.clients:
                await asyncio.sleep(0.1)
                continue
            turn, self._turn = self._turn, self._turn + 1
            await self._one(session, turn, self._phase)
            answered_at = time.monotonic()
            while time.monotonic() < answered_at + self.pause_s and not self._ending.is_set():
                await asyncio.sleep(min(self.pause_s, 0.1))

    async def _one(self, session: aiohttp.ClientSession, turn: int, tally: Tally) -> None:
        index = turn % len(self._prompts)
        body = completion_body(text_of(self._prompts[index]), MAX_TOKENS) | {"stream": turn % 2 == 1}
        if turn % 3:
            body["cache_salt"] = f"turn {turn}"
        begin = time.monotonic()
        tally.requests += 1
        try:
            try:
                text = await self._ask(session, body)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
                if not self.door_may_break:
                    raise
                tally.sent_again += 1
                await self._door_is_back(session)
                text = await self._ask(session, body)
        except Exception as error:
            tally.failures.append(f"request {turn}: {type(error).__name__}: {error}"[:400])
            return
        tally.slowest_s = max(tally.slowest_s, time.monotonic() - begin)
        tally.wrong += text.split() != self._texts[index]
        self.answered += 1

    async def _ask(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> str:
        async with session.post(f"{self._url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}: {(await answer.text())[:300]}")
            if not body["stream"]:
                return str((await answer.json())["choices"][0]["text"])
            text, data = "", ""
            async for line in answer.content:
                if line.startswith(b"data: "):
                    data = line.decode().removeprefix("data: ").strip()
                    if data != "[DONE]":
                        event = json.loads(data)
                        if "error" in event:
                            raise RuntimeError(f"the stream says: {event['error']}")
                        text += "".join(choice["text"] for choice in event["choices"])
            if data != "[DONE]":
                raise aiohttp.ClientPayloadError("the stream ended without [DONE]")
            return text

    async def _door_is_back(self, session: aiohttp.ClientSession) -> None:
        deadline = time.monotonic() + DOOR_WITHIN_S
        while time.monotonic() < deadline:
            try:
                async with session.get(f"{self._url}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.2)


class Bench:
    """One run of `vllm bench serve` in the background."""

    def __init__(self, url: str, model: Path, data_set: str, requests: int, rate: float, folder: Path,
                 seed: int) -> None:
        self.data_set, self.requests = data_set, requests
        self._result = folder / f"bench-{seed}-{data_set}.json"
        command = [sys.executable, "-c", BENCH, "--backend", "openai", "--base-url", url, "--endpoint",
                   "/v1/completions", "--model", str(model), *DATA_SETS[data_set], "--num-prompts", str(requests),
                   "--request-rate", str(rate), "--max-concurrency", "4", "--ignore-eos", "--temperature", "0",
                   "--seed", str(seed), "--disable-tqdm", "--save-result", "--save-detailed",
                   "--result-dir", str(self._result.parent), "--result-filename", self._result.name]
        self.process = ManagedProcess(f"bench-{data_set}", command, {"VLLM_LOGGING_LEVEL": "ERROR",
                                                                    "PYTHONUNBUFFERED": "1"},
                                      self._result.with_suffix(".log"))
        self.process.start()

    @property
    def has_begun(self) -> bool:
        return "Traffic request rate" in self.process.log_text() or not self.process.running

    def complaints(self, timeout_s: float) -> list[str]:
        """Waits until the run has ended. Returns a complaint for each request that was not answered in full."""
        status = self.process.wait(timeout_s)
        if status != 0 or not self._result.exists():
            self.process.kill()
            return [f"vllm bench serve ({self.data_set}) ended with status {status}: {self.process.tail(8)}"]
        told = json.loads(self._result.read_text())
        found = [f"vllm bench serve ({self.data_set}): {error.strip().splitlines()[-1][:300]}"
                 for error in told["errors"] if error]
        # vllm bench serve counts a stream that broke off as an answer.
        found += [f"vllm bench serve ({self.data_set}): an answer of {tokens} of {OUTPUT_TOKENS} tokens"
                  for tokens in told["output_lens"] if tokens not in (0, OUTPUT_TOKENS)]
        if told["completed"] != self.requests and not found:
            found.append(f"vllm bench serve ({self.data_set}): {told['completed']} of {self.requests} were answered")
        return found


def environment() -> dict[str, str]:
    """Returns the environment variables that nodes on other hosts need, because ssh does not pass variables on."""
    return {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}

