"""Tests which outputs of the simulator and of GoogleTest count as caught, and the verdict for each output."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from verdicts import Ended, Evidence, Outcome, of_simulator, of_tests, summary, worst

CHECK = "kvferry: failed check: exact-load: request a loads 3 tokens (next == n) [promises.cpp:21]"


def simulated(promise: str, message: str, status: int = 1) -> Ended:
    return Ended(status, f"""         400  schedules
1.5 s on 1 threads, 266 schedules/s
broken promise: {promise}
  seed 17: {message}
  replay: tests/sim/run --replay 17
17 schedules, 1 broken promises
""")


def failed(test: str, *failures: str, status: int = 1) -> Ended:
    return Ended(status, "\n".join([*failures, f"[  FAILED  ] {test} (3 ms)", "", "1 FAILED TEST", ""]))


def thrown(message: str) -> str:
    return f'unknown file: Failure\nC++ exception with description "{message}" thrown in the test body.\n'


ASSERTION = "/src/core_steps_test.cpp:46: Failure\nExpected equality of these values:\n  saved\n    Which is: 3\n  2\n"


@pytest.mark.parametrize(("ended", "outcome"), [
    (Ended(0, "400 schedules, 0 broken promises\n"), Outcome.SURVIVES),
    (simulated("exact-load", CHECK), Outcome.CAUGHT),
    (simulated("exact-load", "exact-load: the load of r1 names other blocks than it was given"), Outcome.CAUGHT),
    (simulated("verified-only", "verified-only: request r1 says a wrong token at 3"), Outcome.ANOTHER),
    (simulated("no-engine-death", "map::at"), Outcome.ANOTHER),
    (simulated("no-engine-death", "hangs for 60 s"), Outcome.HANGS),
    (simulated("no-engine-death", "ended by signal 11", -11), Outcome.CRASHES),
    (Ended(None, ""), Outcome.HANGS),
    (Ended(-9, ""), Outcome.CRASHES),
    (Ended(1, "never happened: loads (loads)\n"), Outcome.NAMELESS),
])
def test_the_simulator_catches_a_mutant_if_it_names_its_promise(ended: Ended, outcome: Outcome) -> None:
    assert of_simulator(ended, "exact-load").outcome is outcome


def test_hangs_and_crashes_of_the_simulator_are_no_proof_of_no_engine_death_but_an_exception_is() -> None:
    assert of_simulator(simulated("no-engine-death", "hangs for 60 s"), "no-engine-death").outcome is Outcome.HANGS
    crash = simulated("no-engine-death", "ended by signal 11", -11)
    assert of_simulator(crash, "no-engine-death").outcome is Outcome.CRASHES
    thrown_out = of_simulator(simulated("no-engine-death", "unordered_map::at"), "no-engine-death")
    assert thrown_out == Evidence(Outcome.CAUGHT, "no-engine-death: seed 17: unordered_map::at")


@pytest.mark.parametrize(("ended", "outcome"), [
    (Ended(0, ""), Outcome.SURVIVES),
    (failed("Steps.A", thrown(CHECK)), Outcome.CAUGHT),
    (failed("Rows/Row000.A/On, where GetParam() = true", thrown("exact-load: 5 tokens")), Outcome.CAUGHT),
    (failed("Steps.A", "a.cpp:1: Failure\nFailed\nf() breaks no promise, expected exact-load\n"), Outcome.CAUGHT),
    (failed("Steps.A", "a.cpp:1: Failure\nFailed\nf() breaks no promise, expected sane-counts\n"), Outcome.ANOTHER),
    (failed("Steps.A", thrown("kvferry: failed check: sane-counts: 3 of 2")), Outcome.ANOTHER),
    (failed("Steps.A", thrown("map::at")), Outcome.ANOTHER),
    (failed("Steps.A", ASSERTION), Outcome.NAMELESS),
    (failed("Steps.A", "a.cpp:1: Failure\nthe name of a request is exact-load: x\n"), Outcome.NAMELESS),
    (failed("Steps.A", ASSERTION, thrown(CHECK)), Outcome.CAUGHT),
    (failed("Steps.A", ASSERTION, status=-11), Outcome.CRASHES),
    (failed("Steps.A", thrown(CHECK), status=-11), Outcome.CAUGHT),
    (Ended(-6, f"{CHECK}\n"), Outcome.CAUGHT),
    (Ended(-6, "kvferry: failed check: sane-counts: 3 of 2\n"), Outcome.ANOTHER),
    (Ended(-6, "terminate called after throwing an instance of 'std::bad_alloc'\n"), Outcome.CRASHES),
    (Ended(None, f"{CHECK}\n"), Outcome.HANGS),
    (Ended(127, "error while loading shared libraries\n"), Outcome.NAMELESS),
])
def test_a_unit_test_catches_a_mutant_if_its_failure_names_the_promise(ended: Ended, outcome: Outcome) -> None:
    assert of_tests(ended, "exact-load").outcome is outcome


def test_an_assertion_counts_in_the_test_that_the_table_names_alone() -> None:
    assert of_tests(failed("Steps.A", ASSERTION), "exact-load", "Steps.A").outcome is Outcome.CAUGHT
    assert of_tests(failed("Steps.B", ASSERTION), "exact-load", "Steps.A").outcome is Outcome.NAMELESS
    assert of_tests(failed("Steps.A", thrown("map::at")), "exact-load", "Steps.A").outcome is Outcome.ANOTHER
    assert of_tests(Ended(-11, ""), "exact-load", "Steps.A").outcome is Outcome.CRASHES
    assert of_tests(Ended(None, ""), "exact-load", "Steps.A").outcome is Outcome.HANGS
    assert of_tests(Ended(0, ""), "exact-load", "Steps.A").outcome is Outcome.SURVIVES


def test_its_own_promise_decides_and_without_it_what_is_worst() -> None:
    every = [Evidence(outcome) for outcome in reversed(Outcome)]
    assert worst(every).outcome is Outcome.CAUGHT
    assert worst([evidence for evidence in every if evidence.outcome is not Outcome.CAUGHT]) == Evidence(
        Outcome.UNUSABLE)
    assert worst([Evidence(Outcome.ANOTHER), Evidence(Outcome.SURVIVES), Evidence(Outcome.HANGS)]) == Evidence(
        Outcome.HANGS)


def test_the_last_line_counts_each_outcome() -> None:
    assert summary([Outcome.CAUGHT] * 3, 12.2) == "3 mutants, all caught by their own promise, in 12 s"
    several = [Outcome.CAUGHT, Outcome.SURVIVES, Outcome.HANGS, Outcome.HANGS]
    assert summary(several, 90) == "4 mutants, 1 caught by their own promise, 2 hangs, 1 survives, in 1.5 min"
