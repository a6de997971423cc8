"""The worker process of `kvferry bench transfer` for other systems, such as NIXL. launch/bench/transfer/worker.h
describes the messages that it handles.

Each of these systems has a program with a class derived from Engine. The pattern and the order of the blocks are those
of launch/bench/transfer/pattern.cpp.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from json_lines import JsonLines
from scramble import MASK, scramble, scramble_all

GOLDEN = 0x9E3779B97F4A7C15
PATIENCE_S = 60.0
MADV_COLLAPSE = 25  # Linux 6.1 has it, but this Python has no name for it
SIDES = ("initiator", "target")


def pattern(seed: int, side: int, num_words: int) -> np.ndarray:
    """Returns the pattern of a whole memory: a 64-bit word for each 8 bytes."""
    with np.errstate(over="ignore"):
        x = np.arange(num_words, dtype=np.uint64) * np.uint64(8)
        return scramble_all(x + np.uint64(GOLDEN * (2 * seed + side + 1) & MASK))


@dataclass
class Job:
    is_push: bool
    block_bytes: int
    num_blocks: int
    order_seed: int

    def blocks(self, side: int) -> np.ndarray:
        """Returns the indices of the blocks in the order in which this side uses them."""
        order = list(range(self.num_blocks))
        seed = GOLDEN * (2 * self.order_seed + side + 1)
        for i in range(self.num_blocks, 1, -1):
            other = scramble((seed + i) & MASK) % i
            order[i - 1], order[other] = order[other], order[i - 1]
        return np.array(order, dtype=np.int32)


class Engine:
    """The way in which another system, such as NIXL, moves bytes. Each system has a class derived from this one.

    Methods without a docstring are described at the class Engine in launch/bench/transfer/engine.h. address() returns
    what start() of that class returns.
    """

    is_round_trip = True

    def __init__(self, spec: dict[str, Any], memory: np.ndarray) -> None:
        self.spec = spec
        self.memory = memory
        self.side = SIDES.index(spec["side"])
        self.num_notifications = 0

    def address(self) -> dict[str, Any]:
        raise NotImplementedError

    def connect(self, peer: dict[str, Any]) -> None:
        raise NotImplementedError

    def describe(self) -> str:
        return ""

    def prepare(self, job: Job) -> None:
        self.own_order, self.others_order = job.blocks(self.side), job.blocks(1 - self.side)

    def answer(self) -> None:
        raise NotImplementedError

    def move(self, num_blocks: int) -> None:
        """Moves the job's first `num_blocks` blocks and notifies the other side."""
        raise NotImplementedError

    def new_notifications(self) -> int:
        """Returns the number of notifications since the last call."""
        raise NotImplementedError

    def wait_notified(self) -> None:
        """Waits for a notification and consumes it."""
        def is_notified() -> bool:
            if self.num_notifications == 0:
                self.num_notifications += self.new_notifications()
            return self.num_notifications > 0

        poll_until(is_notified, "the other side's notification")
        self.num_notifications -= 1

    def transfer(self) -> None:
        self.move(len(self.own_order))
        self.wait_notified()

    def ping(self) -> None:
        self.move(1)
        self.wait_notified()

    def pong(self) -> None:
        self.wait_notified()
        self.move(1)


def poll_until(is_done: Callable[[], bool], what: str) -> None:
    """Calls is_done() until it returns True, without sleeping, because an engine may move bytes only when polled."""
    end = time.monotonic() + PATIENCE_S
    while not is_done():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not arrive within {PATIENCE_S:.0f} s")


def make_memory(num_bytes: int, kind: str) -> np.ndarray:
    """Returns zeroed memory, in huge pages if possible. `kind`: "kvferry" for shared, "foreign" for private memory."""
    sharing = mmap.MAP_SHARED if kind == "kvferry" else mmap.MAP_PRIVATE
    raw = mmap.mmap(-1, num_bytes, flags=sharing | mmap.MAP_ANONYMOUS)
    raw.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(raw, dtype=np.uint8)
    memory[:] = 0
    with contextlib.suppress(OSError):  # kernels before 6.1 can't; kvferry asks for it too
        raw.madvise(MADV_COLLAPSE)
    return memory


def huge_page_bytes(memory: np.ndarray) -> int:
    begin, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    total, is_ours = 0, False
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as smaps:  # noqa: PTH123
        for line in smaps:
            words = line.split()
            if "-" in words[0] and ":" not in words[0]:
                first, last = (int(word, 16) for word in words[0].split("-"))
                is_ours = first < end and last > begin
            elif is_ours and words[0] in ("AnonHugePages:", "ShmemPmdMapped:"):
                total += int(words[1]) << 10
    return min(total, memory.nbytes)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Worker:
    def __init__(self, make_engine: Callable[[dict[str, Any], np.ndarray], Engine]) -> None:
        self.lines = JsonLines()
        self.make_engine = make_engine

    def run(self) -> None:
        self.lines.say(self.start(self.lines.first()))
        for message in self.lines.rest():
            self.lines.say(getattr(self, "do_" + message["do"])(message))

    def start(self, spec: dict[str, Any]) -> dict[str, Any]:
        self.memory = make_memory(spec["bytes"], spec["memory"])
        self.side = SIDES.index(spec["side"])
        self.engine = self.make_engine(spec, self.memory)
        answer = {"peer": self.engine.address(), "huge_page_bytes": huge_page_bytes(self.memory)}
        if spec["core"] >= 0:
            pin_calling_thread(spec["core"])
        return answer

    def do_connect(self, message: dict[str, Any]) -> dict[str, Any]:
        self.engine.connect(message["peer"])
        return {}

    def do_prepare(self, message: dict[str, Any]) -> dict[str, Any]:
        job = message["job"]
        self.job = Job(job["op"] == "push", job["block_bytes"], job["num_blocks"], job["order_seed"])
        self.engine.prepare(self.job)
        return {}

    def do_fill(self, message: dict[str, Any]) -> dict[str, Any]:
        words = self.memory.view(np.uint64)
        words[:] = pattern(message["seed"], self.side, len(words))
        return {}

    def do_transfer(self, _message: dict[str, Any]) -> dict[str, Any]:
        cpu_begin, begin = cpu_seconds(), time.perf_counter()
        self.engine.transfer()
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "cpu_s": cpu_seconds() - cpu_begin}

    def do_answer(self, _message: dict[str, Any]) -> dict[str, Any]:
        self.lines.say({"ready": True})
        cpu_begin = cpu_seconds()
        self.engine.answer()
        return {"cpu_s": cpu_seconds() - cpu_begin}

    def do_ping(self, message: dict[str, Any]) -> dict[str, Any]:
        times = np.empty(message["rounds"])
        for i in range(len(times)):
            begin = time.perf_counter()
            self.engine.ping()
            times[i] = time.perf_counter() - begin
        times.sort()
        factor = 0.5e6 if self.engine.is_round_trip else 1e6
        return {"p50_us": times[len(times) // 2] * factor, "p99_us": times[len(times) * 99 // 100] * factor}

    def do_pong(self, message: dict[str, Any]) -> dict[str, Any]:
        self.lines.say({"ready": True})
        for _ in range(message["rounds"]):
            self.engine.pong()
        return {}

    def do_verify(self, message: dict[str, Any]) -> dict[str, Any]:
        source = 0 if self.job.is_push else 1
        block_words = self.job.block_bytes // 8
        expected = pattern(message["seed"], source, len(self.memory) // 8).reshape(-1, block_words)
        found = self.memory.view(np.uint64).reshape(-1, block_words)
        is_right = np.array_equal(found[self.job.blocks(1 - source)], expected[self.job.blocks(source)])
        return {"verified": bool(is_right), "describe": self.engine.describe()}


def pin_calling_thread(core: int) -> None:
    libc = ctypes.CDLL(None)
    mask = (ctypes.c_uint64 * 16)()
    mask[core // 64] = 1 << core % 64
    libc.sched_setaffinity(0, ctypes.sizeof(mask), mask)  # has no effect if the core does not exist


def main(make_engine: Callable[[dict[str, Any], np.ndarray], Engine]) -> None:
    worker = Worker(make_engine)
    worker.lines.run(worker.run)
