"""Runs engines in forks of this process, which has imported vLLM: the import takes longer than all else in a start."""

import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import time
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kv_content
from asks import HAND_OVER, LENGTHS, handed_over
from engine import Engine
from families import FAMILIES
from features import CONTROL, FEATURES
from kvferry_launch.paths import KVFERRY
from kvferry_launch.process import PR_SET_PDEATHSIG, write_whole

DEADLINE_S = 150.0
PLAIN, FERRIED, PREFILL, DECODE = "plain", "ferried", "prefill", "decode"
POLL_S = 0.05


# what an engine imports while it starts
_MODULES = ("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner", "kvferry.vllm",
            "vllm.model_executor.warmup.jit_warmup", "vllm.v1.attention.backends.cpu_attn",
            "vllm.model_executor.layers.linear", "vllm.v1.structured_output.backend_xgrammar",
            "vllm.lora.model_manager")


def import_vllm() -> None:
    """Imports all that engines need, and keeps their garbage collections from looking at it."""
    for name in _MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


@dataclass
class Job:
    """One engine and the features that it is asked for; `found` is what it said, once it has ended.

    found: {"error": a sentence or None, "is_refusal": bool, "features": {name: phases or {"error": ...}}}
    """

    family: str
    role: str
    flags: dict[str, Any]
    features: list[str]
    folder: Path  # of the family's models and of what its engines write
    controller: str
    namespace: str
    number: int
    found: dict[str, Any] = field(default_factory=dict)
    pid: int = 0
    core: int = 0
    started: float = 0.0

    @property
    def answers(self) -> Path:
        return self.folder / f"{self.number}.json"

    @property
    def num_ranks(self) -> int:
        return int(self.flags.get("tensor_parallel_size", 1))

    def start(self, core: int, log: Path) -> None:
        self.core, self.started = core, time.monotonic()
        self.pid = os.fork()
        if not self.pid:
            run(self, log)

    def unasked(self) -> list[str]:
        """Returns the features that the engine has still to be asked for: none after an error of the engine itself."""
        said = self.found.get("features", {})
        return [] if self.found.get("error") else [name for name in self.features if name not in said]

    def poll(self) -> bool:
        """Returns True if the engine's process has ended; one that takes too long is killed."""
        late = time.monotonic() - self.started > DEADLINE_S
        if late:
            self._kill_all()
        pid, status = os.waitpid(self.pid, 0 if late else os.WNOHANG)
        if not pid:
            return False
        self.pid = 0
        before = self.found.get("features", {})
        self.found = json.loads(self.answers.read_text()) if self.answers.exists() else {"error": None, "features": {}}
        self.found["features"] = before | self.found["features"]
        self.answers.unlink(missing_ok=True)
        if status and not self.found["error"]:
            how = (f"took longer than {DEADLINE_S:.0f} s" if late
                   else f"ended with status {os.waitstatus_to_exitcode(status)}")
            self.found |= {"error": f"the engine {how}", "is_refusal": False}
        return True

    def kill(self) -> None:
        if self.pid:
            self._kill_all()
            os.waitpid(self.pid, 0)

    def _kill_all(self) -> None:
        """Kills the engine and its ranks."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # the fork has no process group of its own yet
            os.kill(self.pid, signal.SIGKILL)


def sentence_of(error: BaseException) -> tuple[str, bool]:
    """Returns the first line of the error that was the cause of all, and whether it is a refusal by kvferry."""
    from kvferry._core import KvFerryError

    chain = [error]
    while (below := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(below)
    for one in chain:
        if isinstance(one, KvFerryError):
            return str(one), str(one).startswith("kvferry: ") and "\n" not in str(one)
    first = chain[-1]
    lines = str(first).splitlines() or [""]
    # pydantic says what is wrong in the line after the field's name
    text = next((line.strip() for line in lines if "Value error" in line), lines[0])
    return f"{type(first).__name__}: {text.split(' [type=')[0]}", False


def run(job: Job, log: Path) -> None:
    """Runs the engine in this process, which is a fork, and ends the process."""
    status = 1
    found: dict[str, Any] = {"error": None, "is_refusal": False, "features": {}}
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        print(f"== {job.family}, {job.role}, {job.flags}, {job.features}", flush=True)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(job.core) if job.num_ranks == 1 else "nobind"
        extra = None if job.role == PLAIN else {"controller": job.controller, "namespace": job.namespace}
        engine = Engine(FAMILIES[job.family], job.flags, job.folder / "model", extra,
                        engine_id(job.namespace, job.flags) if job.role == DECODE else "")
        for name in job.unasked():
            try:
                found["features"][name] = WORK[job.role](engine, job, name)
            except Exception as error:
                traceback.print_exc()
                found["features"][name] = {"error": sentence_of(error)[0]}
                break  # requests may be left in the engine; another one is asked for the other features
            finally:
                write_whole(job.answers, json.dumps(found))
        status = 0
    except BaseException as error:
        traceback.print_exc()
        found["error"], found["is_refusal"] = sentence_of(error)
        write_whole(job.answers, json.dumps(found))
    finally:
        for name in job.features:
            if job.role == DECODE:  # the prefill engine waits for it
                parameters(job, name).with_suffix(".done").touch()
            if job.role == PREFILL and found["error"] and not parameters(job, name).exists():  # the decode engine waits
                write_whole(parameters(job, name), json.dumps(f"prefill: {found['error']}"))
        os._exit(status)  # ends at once, because an orderly end would only take some seconds


# ---- what an engine does for one feature ----
def plain(engine: Engine, _: Job, name: str) -> dict[str, Any]:
    return {"plain": engine.phase(lambda: FEATURES.get(name, CONTROL).ask(engine, None))}


def ferried(engine: Engine, _: Job, name: str) -> dict[str, Any]:
    return FEATURES[name].phases(engine, FEATURES[name])


def engine_id(namespace: str, flags: dict[str, Any]) -> str:
    """The decode engine's name."""
    return f"{namespace}-{zlib.crc32(json.dumps(flags).encode())}"


def parameters(job: Job, name: str) -> Path:
    """The file with the kv_transfer_params of the prefill engine's answers."""
    return job.folder / f"{name}.params"


def prefill(engine: Engine, job: Job, name: str) -> dict[str, Any]:
    """Computes the prompts' KV, then runs no more steps until all is decoded, like an engine in a long step."""
    path = parameters(job, name)
    try:
        push = {"kvferry_push_to": endpoint(job, name)} if FEATURES[name].is_pushed else {}
        engine.reset()
        kept = kv_content.keep_kv(engine.core) if FEATURES[name].converts else None
        found = FEATURES[name].ask(engine, [HAND_OVER | push] * len(LENGTHS), max_tokens=1)
        if kept is not None:
            kv_content.write(kept, path.with_suffix(".kv"))
        write_whole(path, json.dumps([one.kv_transfer_params or {} for one in found]))
    except BaseException as error:
        write_whole(path, json.dumps(f"prefill: {sentence_of(error)[0]}"))
        raise
    wait_for(path.with_suffix(".done").exists)
    return {}


def decode(engine: Engine, job: Job, name: str) -> dict[str, Any]:
    path = parameters(job, name)
    try:
        wait_for(path.exists)
        params = json.loads(path.read_text())
        if isinstance(params, str):
            return {"error": params}
        kept = kv_content.keep_kv(engine.core) if FEATURES[name].converts else None
        found = handed_over(engine, params, FEATURES[name].ask)
        if kept is not None:
            complaint = kv_content.complaint_about(kept, path.with_suffix(".kv"), kv_content.fp8_type(engine.core))
            assert not complaint, complaint
        assert found["pushed"] or not FEATURES[name].is_pushed, "no chunk was pushed"
        return {"handed over": found}
    finally:
        path.with_suffix(".done").touch()


def endpoint(job: Job, name: str) -> str:
    """Returns where the decode engine is reached, once the controller knows it."""
    known: dict[str, str] = {}
    wanted = engine_id(job.namespace, FEATURES[name].decode_flags or {})

    def is_known() -> bool:
        told = subprocess.run([str(KVFERRY), "status", "--json", "--controller", job.controller],
                              capture_output=True, text=True, check=True)
        known.update({node["engine_id"]: node["endpoint"] for node in json.loads(told.stdout)["nodes"]})
        return wanted in known

    wait_for(is_known)
    return known[wanted]


def pause() -> None:
    time.sleep(POLL_S)


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S / 2
    while not happened():
        assert time.monotonic() < deadline, "the other engine has not answered in time"
        pause()


WORK = {PLAIN: plain, FERRIED: ferried, PREFILL: prefill, DECODE: decode}
