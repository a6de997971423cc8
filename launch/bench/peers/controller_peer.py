"""A peer's program of `kvferry bench controller --peers`: what it measures, of a Directory for each way to a peer's.

Lines of JSON on stdin and stdout, as launch/bench/controller/controller_peers.h tells them.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from controller_load import BATCH_KEYS, LOOKUP_KEYS, NUM_WORKERS, PREFIX_KEYS, Batch, batches, workers_of
from controller_server import cpu_seconds, resident_bytes

CHURN_PREFIXES = 64  # what one repetition of the events brings and takes
IN_FLIGHT = 16


class Directory:
    """One way to one peer's directory. What is prepared is not timed; what is timed does no more than it must."""

    way = "in process"  # or "remote"
    load_keys = BATCH_KEYS  # in a batch of the load; the events are measured in batches of 32 whatever this is
    any_position = True  # False: look-ups start where a prefix starts, since the directory knows no other beginning

    def holder(self) -> int:
        """The process whose memory grows."""
        return os.getpid()

    def prepare_events(self, is_store: bool, some: list[Batch], batch_keys: int) -> Any:
        raise NotImplementedError

    def take(self, prepared: Any) -> None:
        """Returns when all of it has been taken in."""
        raise NotImplementedError

    def prepare_lookup(self, prefix: int, position: int) -> Any:
        raise NotImplementedError

    def lookup(self, prepared: Any) -> Any:
        raise NotImplementedError

    def found(self, answer: Any) -> dict[int, int]:
        """How many of the 128 keys the answer says that each worker holds, from the first on."""
        raise NotImplementedError

    def other_lookups(self) -> dict[str, Callable[[Any], Any]]:
        """Further ways to ask the same, by the name of their figure; their answers are not looked at."""
        return {}

    def lookups_in_flight(self, prepared: Sequence[Any], seconds: float) -> int:
        """How many were answered in about that time, 16 in flight."""
        raise NotImplementedError

    def close(self) -> None:
        pass


def depths(holders: Iterable[Collection[int]]) -> dict[int, int]:
    """How far each holder's keys go without a gap, from the holders of each key."""
    found: dict[int, int] = {}
    for depth, some in enumerate(holders):
        for worker in some:
            if found.get(worker, 0) == depth:
                found[worker] = depth + 1
    return found


@dataclass
class Answers:
    """What the answers were worth. A partial one is true but does not name every holder."""

    counts: Counter[str] = field(default_factory=Counter)

    def take(self, prefix: int, found: dict[int, int]) -> None:
        workers = set(workers_of(prefix))
        is_true = bool(found) and set(found) <= workers and all(depth == LOOKUP_KEYS for depth in found.values())
        self.counts["wrong" if not is_true else "right" if set(found) == workers else "partial"] += 1

    def note(self) -> str:
        total = max(1, self.counts.total())
        words = [f"{100 * self.counts[kind] / total:.1f} % of answers {words}" for kind, words in (
            ("wrong", "WRONG"), ("partial", "name one of two holders")) if self.counts[kind]]
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
        self.step(directory, "look-up of 128 keys")
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
        """64 prefixes at a time."""
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
        """New prefixes come and go again, so that the directory keeps its size."""
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
    """What becomes one entry of the figures: the peer's ways to be reached, one after the other."""

    engine: str
    ways: Sequence[Callable[[], Directory]]
    notes: str = ""


def main(version_of: Callable[[], str], layouts: Sequence[Layout], hashes_max: int = 1 << 20) -> None:
    lines, out = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not get between the lines

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=out, flush=True)

    gc.disable()  # a collection in the middle would be the measurement's doing, not the peer's
    spec = json.loads(lines.readline() or "null")
    if spec is None:
        raise SystemExit("kvferry bench controller starts this")
    asked = spec["hashes"]
    spec["hashes"] = min(asked, hashes_max) // PREFIX_KEYS * PREFIX_KEYS
    try:
        for layout in layouts:
            say({"peer": measured(version_of, layout, spec, asked, say)})
        say({"done": True})
    except BaseException as error:  # the driver wants to know of any
        say({"error": (f"{type(error).__name__}: {error}".splitlines() or [""])[0][:300], "code": 10})
    out.flush()
    os._exit(0)  # some libraries hang or crash when they are torn down


def measured(version_of: Callable[[], str], layout: Layout, spec: dict[str, Any], asked: int,
             say: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """A way that fails is left out and told of in the notes, as long as another one works."""
    measurement = Measurement(layout.engine, spec, say)
    figures: dict[str, float] = {}
    notes = [layout.notes] if layout.notes else []
    failures = []
    for make in layout.ways:
        try:
            directory = make()
        except Exception as error:
            failures.append(error)
            notes.append(f"{make.__name__} not measured: {type(error).__name__}: {error}".splitlines()[0])
            continue
        try:
            ours = measurement.run(directory)
        except Exception as error:
            failures.append(error)
            notes.append(f"{directory.way} not measured: {type(error).__name__}: {error}".splitlines()[0])
            continue
        finally:
            directory.close()
        figures |= {f"remote_{name}" if directory.way == "remote" else name: value for name, value in ours.items()}
    if not figures:
        raise failures[0]
    if spec["hashes"] < asked // PREFIX_KEYS * PREFIX_KEYS:
        notes.append(f"with {spec['hashes']} hashes of {asked}")
    if measurement.answers.note():
        notes.append(measurement.answers.note())
    figures["hashes"] = spec["hashes"]
    figures |= {f"answers_{kind}": count for kind, count in measurement.answers.counts.items()}
    return {"engine": layout.engine, "version": version_of(), "figures": figures, "notes": "; ".join(notes)}


if __name__ == "__main__":
    sys.exit("a peer's program imports this")
