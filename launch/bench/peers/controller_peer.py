"""The measurements of `kvferry bench controller --peers`.

A peer is another project that keeps a directory of which worker holds which keys (Dynamo, LMCache, Mooncake, Redis);
its program implements a class Directory for each way to reach that directory.
launch/bench/controller/controller_peers.h describes the lines of JSON on stdin and stdout.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from controller_load import BATCH_KEYS, LOOKUP_KEYS, NUM_WORKERS, PREFIX_KEYS, Batch, batches, workers_of
from controller_server import cpu_seconds, resident_bytes
from json_lines import JsonLines, reason

CHURN_PREFIXES = 64  # number of prefixes stored and evicted in each repetition of events()
IN_FLIGHT = 16


class Directory:
    """One way to reach a peer's directory. The time of the methods prepare_*() is not measured."""

    way = "in process"  # "in process" or "remote"
    load_keys = BATCH_KEYS  # number of keys in a batch of load(); events() always uses batches of 32
    any_position = True  # true if lookups may start in the middle of a prefix

    def holder(self) -> int:
        """Returns the id of the process that holds the directory."""
        return os.getpid()

    def prepare_events(self, is_store: bool, some: list[Batch], batch_keys: int) -> Any:
        raise NotImplementedError

    def take(self, prepared: Any) -> None:
        """Sends the prepared events and returns when the directory has handled all of them."""
        raise NotImplementedError

    def prepare_lookup(self, prefix: int, position: int) -> Any:
        raise NotImplementedError

    def lookup(self, prepared: Any) -> Any:
        raise NotImplementedError

    def found(self, answer: Any) -> dict[int, int]:
        """Returns for each worker in the answer how many of the 128 keys precede the first key that it lacks."""
        raise NotImplementedError

    def other_lookups(self) -> dict[str, Callable[[Any], Any]]:
        """Returns other calls that look up keys, by the names of their figures. Their answers are not checked."""
        return {}

    def lookups_in_flight(self, prepared: Sequence[Any], seconds: float) -> int:
        """Returns how many lookups were answered in about `seconds`, with 16 lookups in flight."""
        raise NotImplementedError

    def close(self) -> None:
        pass


class RemoteDirectory(Directory):
    """A directory in a server process that this program starts."""

    way = "remote"
    server: subprocess.Popen[bytes]

    def holder(self) -> int:
        return self.server.pid

    def close(self) -> None:
        self.server.kill()
        self.server.wait()


def pipelined(ask: Callable[[int], None], receive: Callable[[int], None], seconds: float) -> int:
    """Calls ask(n) and receive(n) for the lookups n = 0, 1, ... for `seconds`, with 16 lookups in flight. Returns the
    number of answered lookups.
    """
    end = time.perf_counter() + seconds
    num_asked = num_answered = 0
    while num_answered < num_asked or time.perf_counter() < end:
        while num_asked < num_answered + IN_FLIGHT and time.perf_counter() < end:
            ask(num_asked)
            num_asked += 1
        if num_answered < num_asked:
            receive(num_answered)
            num_answered += 1
    return num_answered


def depths(holders: Iterable[Collection[int]]) -> dict[int, int]:
    """Takes the holders of each key in order. Returns for each holder how many keys precede the first that it lacks."""
    found: dict[int, int] = {}
    for depth, some in enumerate(holders):
        for worker in some:
            if found.get(worker, 0) == depth:
                found[worker] = depth + 1
    return found


@dataclass
class Answers:
    """Counts right, wrong and partial answers. A partial answer is correct but does not name every holder."""

    counts: Counter[str] = field(default_factory=Counter)

    def take(self, prefix: int, found: dict[int, int]) -> None:
        workers = set(workers_of(prefix))
        is_true = bool(found) and set(found) <= workers and all(depth == LOOKUP_KEYS for depth in found.values())
        self.counts["wrong" if not is_true else "right" if set(found) == workers else "partial"] += 1

    def note(self) -> str:
        total = max(1, self.counts.total())
        words = [f"{100 * self.counts[kind] / total:.1f} % of answers {words}" for kind, words in (
            ("wrong", "are WRONG"), ("partial", "name only one of the two holders")) if self.counts[kind]]
        return "; ".join(words)


class Measurement:
    def __init__(self, peer: str, spec: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> None:
        self.peer = peer
        self.num_prefixes = spec["hashes"] // PREFIX_KEYS
        self.repeat = spec["repeat"]
        self.seconds = spec["seconds"]
        self.say = say
        self.random = random.Random(1)
        self.answers = Answers()

    def run(self, directory: Directory) -> dict[str, float]:
        before = resident_bytes(directory.holder())
        self.load(directory)
        grown = resident_bytes(directory.holder()) - before
        figures = {"bytes_per_hash": grown / (self.num_prefixes * PREFIX_KEYS)}
        self.step(directory, "lookup of 128 keys")
        figures |= self.lookups(directory)
        for name, ask in directory.other_lookups().items():
            figures[f"{name}_us_p50"] = self.other_lookup(directory, ask)
        if directory.way == "remote":
            self.step(directory, "16 in flight")
            figures |= self.throughput(directory)
        self.step(directory, "events")
        figures["event_hashes_per_s"] = self.events(directory)
        return figures

    def step(self, directory: Directory, what: str) -> None:
        self.say({"step": f"{self.peer}, {directory.way}: {what}"})

    def load(self, directory: Directory) -> None:
        """Stores all prefixes in the directory, 64 at a time."""
        for some in range(0, self.num_prefixes, NUM_WORKERS):
            if some % (NUM_WORKERS * 4) == 0:
                self.step(directory, f"loading, {100 * some // self.num_prefixes} %")
            end = min(some + NUM_WORKERS, self.num_prefixes)
            told = list(batches(some, end, directory.load_keys))
            directory.take(directory.prepare_events(True, told, directory.load_keys))

    def place(self, directory: Directory) -> tuple[int, int]:
        position = self.random.randrange(PREFIX_KEYS // LOOKUP_KEYS) * LOOKUP_KEYS
        return self.random.randrange(self.num_prefixes), position if directory.any_position else 0

    def lookups(self, directory: Directory) -> dict[str, float]:
        rates, p50s, p99s = [], [], []
        for _ in range(self.repeat):
            times: list[float] = []
            total = 0.0
            while total < self.seconds:
                prefix, position = self.place(directory)
                asked = directory.prepare_lookup(prefix, position)
                begin = time.perf_counter()
                answer = directory.lookup(asked)
                times.append(time.perf_counter() - begin)
                total += times[-1]
                self.answers.take(prefix, directory.found(answer))
            times.sort()
            rates.append(len(times) / total)
            p50s.append(times[len(times) // 2] * 1e6)
            p99s.append(times[len(times) * 99 // 100] * 1e6)
        figures = {"us_p50": statistics.median(p50s), "us_p99": statistics.median(p99s)}
        if directory.way == "in process":
            figures["per_s"] = statistics.median(rates)
            return {f"lookup_128_{name}": value for name, value in figures.items()}
        return figures

    def other_lookup(self, directory: Directory, ask: Callable[[Any], Any]) -> float:
        times: list[float] = []
        while sum(times) < self.seconds:
            asked = directory.prepare_lookup(*self.place(directory))
            begin = time.perf_counter()
            ask(asked)
            times.append(time.perf_counter() - begin)
        return statistics.median(times) * 1e6

    def throughput(self, directory: Directory) -> dict[str, float]:
        asked = [directory.prepare_lookup(*self.place(directory)) for _ in range(1024)]
        rates, per_core = [], []
        for _ in range(self.repeat):
            cpu_begin, begin = cpu_seconds(directory.holder()), time.perf_counter()
            count = directory.lookups_in_flight(asked, max(self.seconds, 0.2))
            took = time.perf_counter() - begin
            rates.append(count / took)
            per_core.append(count / max(cpu_seconds(directory.holder()) - cpu_begin, 0.01))
        return {"per_s": statistics.median(rates), "per_s_per_core": statistics.median(per_core)}

    def events(self, directory: Directory) -> float:
        """Measures storing new prefixes and evicting them again. Returns the rate in hashes per second."""
        told = list(batches(self.num_prefixes, self.num_prefixes + CHURN_PREFIXES))
        rates = []
        for _ in range(self.repeat):
            took = 0.0
            for is_store in (True, False):
                # Engines evict a prefix from its end.
                prepared = directory.prepare_events(is_store, told if is_store else told[::-1], BATCH_KEYS)
                begin = time.perf_counter()
                directory.take(prepared)
                took += time.perf_counter() - begin
            rates.append(2 * len(told) * BATCH_KEYS / took)
        return statistics.median(rates)


@dataclass
class Layout:
    """One entry of the figures: the ways to reach a peer, which are measured one after the other."""

    engine: str
    ways: Sequence[Callable[[], Directory]]
    notes: str = ""


def main(version_of: Callable[[], str], layouts: Sequence[Layout], hashes_max: int = 1 << 20) -> None:
    lines = JsonLines()
    gc.disable()  # a garbage collection during a measurement would distort the peer's times

    def measure() -> None:
        spec = lines.first()
        asked = spec["hashes"]
        spec["hashes"] = min(asked, hashes_max) // PREFIX_KEYS * PREFIX_KEYS
        for layout in layouts:
            lines.say({"peer": measured(version_of, layout, spec, asked, lines.say)})
        lines.say({"done": True})

    lines.run(measure)


def measured(version_of: Callable[[], str], layout: Layout, spec: dict[str, Any], asked: int,
             say: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measures each way to reach the peer. A way that fails is left out, with a note, if another way works."""
    measurement = Measurement(layout.engine, spec, say)
    figures: dict[str, float] = {}
    notes = [layout.notes] if layout.notes else []
    failures = []
    for make in layout.ways:
        directory = None
        try:
            directory = make()
            ours = measurement.run(directory)
        except Exception as error:
            failures.append(error)
            name = directory.way if directory else make.__name__
            notes.append(f"{name} is not measured: {reason(error)}")
            continue
        finally:
            if directory:
                directory.close()
        figures |= {f"remote_{name}" if directory.way == "remote" else name: value for name, value in ours.items()}
    if not figures:
        raise failures[0]
    if spec["hashes"] < asked // PREFIX_KEYS * PREFIX_KEYS:
        notes.append(f"measured with {spec['hashes']} hashes instead of {asked}")
    if measurement.answers.note():
        notes.append(measurement.answers.note())
    figures["hashes"] = spec["hashes"]
    figures |= {f"answers_{kind}": count for kind, count in measurement.answers.counts.items()}
    return {"engine": layout.engine, "version": version_of(), "figures": figures, "notes": "; ".join(notes)}

