"""Compiles a broken copy of one core file, links it in front of the library into the tests, and runs these tests."""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from kvferry_launch import setup
from kvferry_launch.paths import RELEASE, REPO
from kvferry_launch.progress import Step
from table import MUTANTS, Mutant
from verdicts import Ended, Evidence, Outcome, of_simulator, of_tests, summary, worst

CORE = REPO / "connector" / "core"
UNIT_TESTS = ("connector_core_test", "regression_rows_test")
SIMULATOR = "kvferry_sim"
FEW_SCHEDULES, MORE_SCHEDULES = 400, 20_000
"""The simulator runs FEW_SCHEDULES first, which show most breaks, then MORE_SCHEDULES for the rare breaks."""
TIMEOUT_S = 600
"""Limit on each run. The simulator ends by itself when a schedule hangs, and all unit tests take less than a second."""


class MutantError(Exception):
    """The mutant can't be judged; the message says why in one sentence."""


@dataclass
class Verdict:
    mutant: Mutant
    evidence: Evidence


def broken_source(mutant: Mutant, folder: Path = CORE) -> str:
    """Returns the text of the mutant's file with the broken line. Errors: MutantError if the original line does not
    occur exactly once.
    """
    text = (folder / mutant.file).read_text()
    count = text.count(mutant.line)
    if count != 1:
        raise MutantError(f"no longer applies: its line is there {count} times in connector/core/{mutant.file}")
    return text.replace(mutant.line, mutant.broken)


def compile_command(file: str) -> list[str]:
    """Returns the build's own compile command for a core file, without its input and output, and with options for fast
    compilation.
    """
    for entry in json.loads((RELEASE / "compile_commands.json").read_text()):
        if Path(entry["file"]) == (CORE / file).resolve():
            words = shlex.split(entry["command"])
            return [*words[:words.index("-o")], "-O0", "-g0", "-w"]
    raise MutantError(f"connector/core/{file} is not part of the build")


def link_command(target: str) -> list[str]:
    """Returns the build's own link command, without the commands that ninja runs before and after it."""
    asked = subprocess.run(["ninja", "-C", str(RELEASE), "-t", "commands", target], capture_output=True, text=True,
                           check=True)
    parts = asked.stdout.splitlines()[-1].split(" && ")
    return shlex.split(next(part for part in parts if f" -o bin/{target} " in part))


@dataclass
class Bench:
    """A mutant's compiled file, and its test programs, each of which is linked before its first run."""
    scratch: Path

    def compile(self, mutant: Mutant) -> None:
        """Compiles the mutant's file. Errors: MutantError."""
        source = Path(mutant.file).name
        (self.scratch / source).write_text(broken_source(mutant))
        # The compiler runs in the file's folder and gets a name without a path, so that ccache finds the object in the
        # next run.
        made = subprocess.run([*compile_command(mutant.file), "-c", source, "-o", "broken.o"], cwd=self.scratch,
                              capture_output=True, text=True, check=False)
        if made.returncode != 0:
            raise MutantError(f"does not compile: {made.stderr.splitlines()[0] if made.stderr else 'no message'}")

    def link(self, target: str) -> None:
        words = link_command(target)
        at = words.index("-o")
        # The mutant's object comes before the library, and the linker takes the first definition, so the library's copy
        # is not used.
        words = [*words[:at], str(self.scratch / "broken.o"), "-Wl,--allow-multiple-definition", "-o",
                 str(self.scratch / target), *words[at + 2:]]
        linked = subprocess.run(words, cwd=RELEASE, capture_output=True, text=True, check=False)
        if linked.returncode != 0:
            raise MutantError(f"does not link into {target}: {linked.stderr.splitlines()[-1:]}")

    def run(self, target: str, *arguments: str) -> Ended:
        """Runs a test program with the mutant, and links it first if necessary. Errors: MutantError."""
        if not (self.scratch / target).exists():
            self.link(target)
        return ended(self.scratch / target, *arguments)


def ended(program: Path, *arguments: str) -> Ended:
    try:
        ran = subprocess.run([str(program), *arguments], capture_output=True, text=True, errors="replace",
                             timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Ended(None, "")
    return Ended(ran.returncode, ran.stdout + ran.stderr)


def simulate(num_schedules: int) -> tuple[str, ...]:
    return (SIMULATOR, "--schedules", str(num_schedules), "--jobs", "1")


def has_test(target: str, test: str) -> bool:
    return "\n  " in ended(RELEASE / "bin" / target, "--gtest_list_tests", f"--gtest_filter={test}").output


def evidence(mutant: Mutant, run: Callable[..., Ended]) -> Iterator[Evidence]:
    """Yields the evidence of each test program that may show the mutant, the fastest program first. If the table names
    a test, only that test runs. Errors: MutantError.
    """
    if mutant.test:
        target = next((target for target in UNIT_TESTS if has_test(target, mutant.test)), None)
        if target is None:
            raise MutantError(f"its test {mutant.test} is in none of {', '.join(UNIT_TESTS)}")
        yield of_tests(run(target, f"--gtest_filter={mutant.test}", "--gtest_brief=1"), mutant.promise, mutant.test)
        return
    yield of_simulator(run(*simulate(FEW_SCHEDULES)), mutant.promise)
    for target in UNIT_TESTS:
        yield of_tests(run(target, "--gtest_brief=1"), mutant.promise)
    yield of_simulator(run(*simulate(MORE_SCHEDULES)), mutant.promise)


def judge(mutant: Mutant) -> Verdict:
    seen: list[Evidence] = []
    with tempfile.TemporaryDirectory(prefix="kvferry-mutant-") as folder:
        try:
            bench = Bench(Path(folder))
            bench.compile(mutant)
            for evident in evidence(mutant, bench.run):
                seen.append(evident)
                if evident.outcome is Outcome.CAUGHT:
                    break
        except MutantError as error:
            seen.append(Evidence(Outcome.UNUSABLE, str(error)))
    return Verdict(mutant, worst(seen))


def chosen(names: str) -> list[Mutant]:
    if not names:
        return MUTANTS
    by_name = {mutant.name: mutant for mutant in MUTANTS}
    unknown = [name for name in names.split(",") if name not in by_name]
    if unknown:
        sys.exit(f"tests/mutants/run: no mutant is called {unknown[0]}; tests/mutants/table.py lists them")
    return [by_name[name] for name in names.split(",")]


def judged(mutants: list[Mutant], jobs: int, step: Step) -> Iterator[Verdict]:
    """Yields a verdict for each mutant, in the order of the table, as soon as it is known. The step shows which mutants
    are being judged.
    """
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(judge, mutant): mutant for mutant in mutants}
        try:
            for number, future in enumerate(as_completed(running), 1):
                under_way = [mutant.name for other, mutant in running.items() if other.running()]
                step.update(number / len(mutants), f"{number}/{len(mutants)} {', '.join(under_way)}")
                yield future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def print_table(verdicts: list[Verdict]) -> None:
    for verdict in verdicts:
        mutant, found = verdict.mutant, verdict.evidence
        print(f"\n{mutant.name}  ({mutant.promise}, {mutant.file})")
        print(f"  {found.outcome.value}{': ' if found.told else ''}{found.told[:200]}")


def check_unbroken() -> None:
    """Ends the run if the tests fail without any mutant."""
    unbroken = [of_simulator(ended(RELEASE / "bin" / SIMULATOR, *simulate(FEW_SCHEDULES)[1:]), "")]
    unbroken += [of_tests(ended(RELEASE / "bin" / target, "--gtest_brief=1"), "") for target in UNIT_TESTS]
    failed = worst(unbroken)
    if failed.outcome is not Outcome.SURVIVES:
        sys.exit(f"tests/mutants/run: the tests fail without any mutant: {failed.outcome.value}: {failed.told}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests/mutants/run",
                                     description="Break connector/core one line at a time; each break has to be caught "
                                                 "by the promise that it breaks.")
    parser.add_argument("--only", default="", metavar="NAME", help="this mutant, or several with commas between")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="at a time; default: all cores")
    parser.add_argument("--no-build", action="store_true", help="take build/release as it is")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error("--jobs is at least 1")
    mutants = chosen(options.only)
    if not options.no_build:
        setup.ensure_or_exit(vllm=False, tests=True, only=[*UNIT_TESTS, SIMULATOR])
    check_unbroken()
    verdicts: list[Verdict] = []
    is_interrupted = False
    step = Step(f"{len(mutants)} mutants")
    try:
        with step:
            for verdict in judged(mutants, options.jobs, step):
                verdicts.append(verdict)
    except KeyboardInterrupt:
        is_interrupted = True  # the table so far is printed also after Ctrl-C
    order = {mutant.name: index for index, mutant in enumerate(mutants)}
    verdicts.sort(key=lambda verdict: order[verdict.mutant.name])
    print_table(verdicts)
    outcomes = [verdict.evidence.outcome for verdict in verdicts]
    print(f"\n{summary(outcomes, step.elapsed_s)}")
    return 130 if is_interrupted else 0 if set(outcomes) <= {Outcome.CAUGHT} else 1
