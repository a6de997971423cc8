"""Compiles one broken copy of a core file, links it in front of the library into the tests, and runs these."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from kvferry_launch import setup
from kvferry_launch.paths import RELEASE, REPO
from kvferry_launch.progress import Step
from table import MUTANTS, Mutant

CORE = REPO / "connector" / "core"
UNIT_TESTS = ("connector_core_test", "regression_rows_test")
SIMULATOR = "kvferry_sim"
FEW_SCHEDULES, MORE_SCHEDULES = 400, 20_000
"""Most breaks show within the first; the second is for the rare ones."""
TIMEOUT_S = 120


class MutantError(Exception):
    """The mutant can't be judged; the message says why in one sentence."""


@dataclass
class Verdict:
    mutant: Mutant
    unit: str = ""
    """The first unit test that failed and what it said."""
    simulator: str = ""
    """The promise that the simulator saw broken, the seed and what it said."""
    problem: str = ""

    @property
    def caught(self) -> bool:
        return not self.problem and bool(self.unit or self.simulator)


def broken_source(mutant: Mutant, folder: Path = CORE) -> str:
    """The file with its line broken. Errors: MutantError if the line is not there exactly once."""
    text = (folder / mutant.file).read_text()
    count = text.count(mutant.line)
    if count != 1:
        raise MutantError(f"no longer applies: its line is there {count} times in connector/core/{mutant.file}")
    return text.replace(mutant.line, mutant.broken)


def compile_command(file: str) -> list[str]:
    """The build's own command for a core file, without its input and output, made quick to compile."""
    for entry in json.loads((RELEASE / "compile_commands.json").read_text()):
        if Path(entry["file"]) == CORE / file:
            words = shlex.split(entry["command"])
            return [*words[:words.index("-o")], "-O0", "-g0", "-w"]
    raise MutantError(f"connector/core/{file} is not part of the build")


def link_command(target: str) -> list[str]:
    """The build's own link command, without what ninja runs before and after it."""
    asked = subprocess.run(["ninja", "-C", str(RELEASE), "-t", "commands", target], capture_output=True, text=True,
                           check=True)
    parts = asked.stdout.splitlines()[-1].split(" && ")
    return shlex.split(next(part for part in parts if f" -o bin/{target} " in part))


def build(mutant: Mutant, scratch: Path) -> None:
    source = scratch / Path(mutant.file).name
    source.write_text(broken_source(mutant))
    broken = scratch / "broken.o"
    made = subprocess.run([*compile_command(mutant.file), "-c", str(source), "-o", str(broken)], cwd=RELEASE,
                          capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise MutantError(f"does not compile: {made.stderr.splitlines()[0] if made.stderr else 'no message'}")
    for target in (*UNIT_TESTS, SIMULATOR):
        words = link_command(target)
        at = words.index("-o")
        # Objects come before libraries and the first definition counts, so the library's own copy is not taken.
        words = [*words[:at], str(broken), "-Wl,--allow-multiple-definition", "-o", str(scratch / target),
                 *words[at + 2:]]
        linked = subprocess.run(words, cwd=RELEASE, capture_output=True, text=True, check=False)
        if linked.returncode != 0:
            raise MutantError(f"does not link into {target}: {linked.stderr.splitlines()[-1:]}")


def run_quietly(command: list[str]) -> tuple[int, str]:
    """Exit status and all output; a hang is status -1."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S,
                               check=False)
    except subprocess.TimeoutExpired:
        return (-1, "")
    return (ended.returncode, ended.stdout + ended.stderr)


def unit_verdict(scratch: Path, folder: Path | None = None) -> str:
    for test in UNIT_TESTS:
        code, output = run_quietly([str((folder or scratch) / test), "--gtest_brief=1"])
        if code == 0:
            continue
        failed = re.search(r"\[  FAILED  \] (\S+)", output)
        message = re.search(r"broken promise: (.*?) \(|(?:Failure\n)(.*(?:\n.+)?)", output)
        what = " ".join((message[1] or message[2]).split()) if message else ""
        if failed:
            return f"{failed[1].rstrip(',')}: {what}"
        crashed = re.findall(r"\[ RUN      \] (\S+)", output)
        how = "hangs" if code == -1 else f"ends with status {code}"
        return f"{test} {how}{' in ' + crashed[-1] if crashed else ''}"
    return ""


def simulator_verdict(scratch: Path, num_schedules: int) -> str:
    code, output = run_quietly([str(scratch / SIMULATOR), "--schedules", str(num_schedules), "--jobs", "1"])
    if code == 0:
        return ""
    promise = re.search(r"^broken promise: (\S+)", output, re.MULTILINE)
    seed = re.search(r"^  seed (\d+): (.*)", output, re.MULTILINE)
    if promise is None or seed is None:
        return "hangs" if code == -1 else f"ends with status {code}"
    what = re.sub(r"^kvferry: broken promise: ", "", seed[2]).removeprefix(f"{promise[1]}: ")
    return f"{promise[1]} (seed {seed[1]}): {what}"


def judge(mutant: Mutant) -> Verdict:
    verdict = Verdict(mutant)
    with tempfile.TemporaryDirectory(prefix="kvferry-mutant-") as folder:
        scratch = Path(folder)
        try:
            build(mutant, scratch)
        except MutantError as error:
            verdict.problem = str(error)
            return verdict
        verdict.unit = unit_verdict(scratch)
        verdict.simulator = simulator_verdict(scratch, FEW_SCHEDULES)
        if not verdict.simulator:
            verdict.simulator = simulator_verdict(scratch, MORE_SCHEDULES)
    return verdict


def chosen(names: str) -> list[Mutant]:
    if not names:
        return MUTANTS
    by_name = {mutant.name: mutant for mutant in MUTANTS}
    unknown = [name for name in names.split(",") if name not in by_name]
    if unknown:
        sys.exit(f"tests/mutants/run: no mutant is called {unknown[0]}; tests/mutants/table.py lists them")
    return [by_name[name] for name in names.split(",")]


def judged(mutants: list[Mutant], jobs: int) -> Iterator[Verdict]:
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(judge, mutant) for mutant in mutants]
        try:
            for future in as_completed(running):
                yield future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def print_table(verdicts: list[Verdict]) -> None:
    for verdict in verdicts:
        mutant = verdict.mutant
        print(f"\n{mutant.name}  ({mutant.promise}, {mutant.file})")
        if verdict.problem:
            print(f"  {verdict.problem}")
            continue
        print(f"  unit tests  {verdict.unit[:150] or '-'}")
        print(f"  simulator   {verdict.simulator[:150] or '-'}")
        if not verdict.caught:
            print("  SURVIVES")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests/mutants/run",
                                     description="Break connector/core one line at a time; some test has to see it.")
    parser.add_argument("--only", default="", metavar="NAME", help="this mutant, or several with commas between")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="at a time; default: all cores")
    parser.add_argument("--no-build", action="store_true", help="take build/release as it is")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error("--jobs is at least 1")
    mutants = chosen(options.only)
    if not options.no_build:
        setup.ensure_or_exit(vllm=False, tests=True, only=[*UNIT_TESTS, SIMULATOR])
    unbroken = unit_verdict(Path(), RELEASE / "bin") or simulator_verdict(RELEASE / "bin", FEW_SCHEDULES)
    if unbroken:
        sys.exit(f"tests/mutants/run: the tests fail without any mutant: {unbroken}")
    verdicts: list[Verdict] = []
    is_interrupted = False
    try:
        with Step(f"{len(mutants)} mutants") as step:
            for verdict in judged(mutants, options.jobs):
                verdicts.append(verdict)
                step.update(len(verdicts) / len(mutants), verdict.mutant.name)
    except KeyboardInterrupt:
        is_interrupted = True  # with the table of what was judged so far
    order = {mutant.name: index for index, mutant in enumerate(mutants)}
    verdicts.sort(key=lambda verdict: order[verdict.mutant.name])
    print_table(verdicts)
    caught = sum(verdict.caught for verdict in verdicts)
    by_simulator = sum(bool(verdict.simulator) for verdict in verdicts)
    print(f"\n{len(verdicts)} mutants, {caught} caught, {by_simulator} of them by the simulator too, "
          f"{len(verdicts) - caught} survived or do not apply")
    return 130 if is_interrupted else 0 if caught == len(verdicts) else 1
