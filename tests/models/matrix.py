"""Makes the table of model families and features: see tests/models/run."""

import argparse
import datetime
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forks
import markdown_table
from asks import greedy
from cells import Cell, Outcome, blind, judged, moved, without_kvferry
from engine import DEFAULTS, write_model
from families import FAMILIES, LAYERS
from features import FEATURES, features_of
from forks import DECODE, FERRIED, PLAIN, PREFILL, Job
from kvferry_launch.paths import LOGS
from kvferry_launch.progress import Step
from kvferry_launch.testbed.servers import running_controller

FOLDER = LOGS / "models"
CONTROL = "control"
AT_ONCE = 2  # ranks of engines; a prefill engine runs beside its decode engine
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1",
    "NUMBA_DISABLE_JIT": "1"}  # each engine with n-gram drafts would compile them for ten seconds


@dataclass
class FamilyRun:
    """The engines of one family, and what they said."""

    family: str
    features: list[str]
    folder: Path
    controller: str
    jobs: list[Job] = field(default_factory=list)

    def plan(self) -> None:
        """Adds the first engines: a plain one for each set of arguments that may change tokens, and all with kvferry.
        """
        same_tokens = [name for name in self.features if not self._changes_tokens(name)]
        asked = {FEATURES[name].ask: name for name in reversed(same_tokens)}
        if asked:
            self._add(PLAIN, {}, [*reversed(asked.values()), *([CONTROL] if greedy in asked else [])])
        for names in self._groups(True):
            flags = self._flags(names[0])
            if "runner" not in flags:
                self._add(PLAIN, flags, names)
            self._add(FERRIED, flags, names)
        for names in alike([name for name in same_tokens if FEATURES[name].converts], self._flags):
            self._add(PLAIN, self._flags(names[0]), names)
        for names in self._groups(False):
            alone = [name for name in names if FEATURES[name].decode_flags is None]
            if alone:
                self._add(FERRIED, self._flags(alone[0]), alone)
        handed = [name for name in same_tokens if FEATURES[name].decode_flags is not None]
        for names in alike(handed, self._flags):
            namespace = self._add(PREFILL, self._flags(names[0]), names).namespace
            for some in alike(names, lambda name: FEATURES[name].decode_flags):
                self._add(DECODE, FEATURES[some[0]].decode_flags or {}, some, namespace)

    def _flags(self, name: str) -> dict[str, Any]:
        """Returns those arguments of the feature that the family's engines don't have anyway."""
        known = DEFAULTS | FAMILIES[self.family].flags
        return {key: value for key, value in FEATURES[name].flags.items() if known.get(key) != value}

    def _changes_tokens(self, name: str) -> bool:
        return FEATURES[name].changes_tokens and bool(self._flags(name))

    def _groups(self, changes_tokens: bool) -> list[list[str]]:
        """Returns the features with equal arguments together."""
        return alike([name for name in self.features if self._changes_tokens(name) == changes_tokens], self._flags)

    def _add(self, role: str, flags: dict[str, Any], features: list[str], namespace: str = "") -> Job:
        number = len(self.jobs)
        job = Job(self.family, role, flags, features, self.folder, self.controller,
                  namespace or f"{self.family}-{number}", number)
        self.jobs.append(job)
        return job

    def retry_plain(self) -> list[Job]:
        """Adds plain engines with the arguments of those features that are not right, to tell whose fault it is."""
        doubtful = [name for name, cell in self.cells().items() if cell.outcome in (Outcome.WRONG, Outcome.REFUSED)]
        first = len(self.jobs)
        for name in doubtful:
            flags = FEATURES[name].decode_flags or self._flags(name)
            if flags and "runner" not in flags and self._plain_with(flags, name) is None:
                self._add(PLAIN, flags, [name])
        return self.jobs[first:]

    def _plain_with(self, flags: dict[str, Any], name: str) -> Job | None:
        return next((job for job in self.jobs if job.role == PLAIN and job.flags == flags and name in job.features),
                    None)

    def cells(self) -> dict[str, Cell]:
        return {name: self._cell(name) for name in self.features}

    def _cell(self, name: str) -> Cell:
        feature = FEATURES[name]
        own = next(job for job in self.jobs if job.role in (FERRIED, DECODE) and name in job.features)
        plain = self._plain(name)
        if plain is not None:
            asked = next(one for one in plain.features if FEATURES[one].ask is feature.ask)
            same = plain.found["features"].get(asked, {"error": plain.found["error"]})
            if "error" in same:
                return without_kvferry(same["error"])
        prefills = [job for job in self.jobs if job.role == PREFILL and name in job.features]
        failed = [job.found for job in (*prefills, own) if name not in job.found["features"]]
        for found in failed:
            if found["is_refusal"]:
                return Cell(Outcome.REFUSED, found["error"])
        if plain is None:
            return Cell(Outcome.WRONG, failed[0]["error"] if failed else "it was not refused")
        if failed:
            return Cell(Outcome.WRONG, failed[0]["error"])
        if feature.ask is greedy and blind(same, plain.found["features"].get(CONTROL, {})):
            return Cell(Outcome.WRONG, "another prompt has the same answer, so wrong KV would not be seen")
        if not feature.converts:
            return judged(own.found["features"][name], same)
        other = self._plain_with(self._flags(name), name)
        assert other is not None
        if name not in other.found["features"]:
            return without_kvferry(other.found["error"])
        # twice, because moved() has seen few tokens; whether the KV is right is told by its elements (kv_content.py)
        return judged(own.found["features"][name], same, 2 * moved(same, other.found["features"][name]))

    def _plain(self, name: str) -> Job | None:
        """Returns the plain engine to compare with: one with the feature's own arguments if there is one."""
        feature = FEATURES[name]
        own = self._plain_with(feature.decode_flags or self._flags(name), name)
        if own is not None or self._changes_tokens(name):
            return own
        return next(job for job in self.jobs if job.role == PLAIN and not job.flags)


def alike(names: list[str], flags_of: Callable[[str], dict[str, Any] | None]) -> list[list[str]]:
    """Returns the features with equal flags together."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(json.dumps(flags_of(name)), []).append(name)
    return list(found.values())


def run_jobs(jobs: list[Job], cores: list[int], log: Path, step: Step, share: tuple[float, float]) -> None:
    """Runs the engines in order, with AT_ONCE ranks at a time."""
    waiting, running = list(jobs), list[Job]()
    try:
        while waiting or running:
            while waiting and sum(job.num_ranks for job in (*running, waiting[0])) <= AT_ONCE:
                used = [job.core for job in running]
                job = waiting.pop(0)
                job.start(next((core for core in cores if core not in used), cores[0]), log)
                running.append(job)
            ended = [job for job in running if job.poll()]
            running = [job for job in running if job not in ended]
            waiting[:0] = [job for job in ended if job.unasked()]
            done = 1 - (len(waiting) + len(running)) / len(jobs)
            step.update(share[0] + (share[1] - share[0]) * done,
                        "; ".join(f"{job.family}, {job.role}, {job.features[0]}" for job in running))
            forks.pause()
    finally:
        for job in running:
            job.kill()


def run(families: list[str], features: list[str], step: Step) -> Iterator[tuple[str, dict[str, Cell]]]:
    """Yields each family with the outcomes of its features."""
    cores = sorted(os.sched_getaffinity(0))
    for number, family in enumerate(families):
        share = (number / len(families), (number + 1) / len(families))
        log = FOLDER / f"{family}.log"
        log.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory() as folder, running_controller("controller", FOLDER) as controller:
            asked = [name for name in features_of(family) if name in features]
            one = FamilyRun(family, asked, Path(folder), controller.address)
            write_model(FAMILIES[family], Path(folder) / "model")
            one.plan()
            run_jobs(one.jobs, cores, log, step, share)
            run_jobs(one.retry_plain(), cores, log, step, (share[1], share[1]))
            (FOLDER / f"{family}.json").write_text(json.dumps([job.__dict__ | {"folder": ""} for job in one.jobs]))
            yield family, one.cells()


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tests/models/run", description="Compare vLLM with kvferry and without it, for each model family and "
        f"feature, on toys of at most {LAYERS} layers, and write the outcomes to tests/models/TABLE.md.")
    parser.add_argument("--only", metavar="FAMILY", action="append", choices=list(FAMILIES),
                        help=f"one family; may be repeated: {', '.join(FAMILIES)}")
    parser.add_argument("--feature", metavar="FEATURE", action="append", choices=list(FEATURES),
                        help=f"one feature; may be repeated: {', '.join(FEATURES)}")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON; the table is not written")
    options = parser.parse_args(words)
    os.environ |= ENVIRONMENT
    FOLDER.mkdir(parents=True, exist_ok=True)
    families, features = options.only or list(FAMILIES), options.feature or list(FEATURES)
    found: dict[str, dict[str, Cell]] = {}
    with Step(f"{len(families)} families, {len(features)} features", sys.stderr) as step:
        forks.import_vllm()
        for family, cells in run(families, features, step):
            found[family] = cells
            if options.json:
                continue
            markdown_table.write({family: cells}, datetime.date.today())
            for name, cell in cells.items():
                print(f"{family:15} {name:18} {cell.text}", flush=True)
    gc.unfreeze()  # or nanobind complains at exit that objects are left
    if options.json:
        print(json.dumps({family: {name: {"outcome": cell.outcome.value, "text": cell.text}
                                   for name, cell in cells.items()} for family, cells in found.items()}))
    print(markdown_table.totals(found), file=sys.stderr if options.json else sys.stdout)
    return 1 if any(cell.outcome is Outcome.WRONG for cells in found.values() for cell in cells.values()) else 0
