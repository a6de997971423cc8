"""Tests that the table of mutants is correct: each line exists, names are unique, every promise has a mutant. Runs some
mutants.
"""

import sys
from collections import Counter
from pathlib import Path

import pytest
from kvferry_launch.paths import RELEASE

sys.path.insert(0, str(Path(__file__).resolve().parent))

import mutants
from table import MUTANTS, Mutant
from verdicts import PROMISES, Ended, Outcome


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_line_is_there_once_and_its_break_changes_it(mutant: Mutant) -> None:
    assert mutants.broken_source(mutant) != (mutants.CORE / mutant.file).read_text()


def test_every_promise_is_broken_and_every_name_is_one_mutants() -> None:
    assert {mutant.promise for mutant in MUTANTS} == set(PROMISES)
    assert Counter(mutant.name for mutant in MUTANTS).most_common(1)[0][1] == 1


def test_a_line_that_is_gone_is_told() -> None:
    gone = Mutant("gone", "exact-load", "pool/chunk_pool.cpp", "no such line", "")
    with pytest.raises(mutants.MutantError, match="is there 0 times"):
        mutants.broken_source(gone)
    verdict = mutants.judge(gone)
    assert verdict.evidence.outcome is Outcome.UNUSABLE
    assert "no longer applies" in verdict.evidence.told


def test_a_test_that_no_binary_has_is_told() -> None:
    strange = MUTANTS[0]._replace(test="Steps:NoSuchTest")
    with pytest.raises(mutants.MutantError, match="its test Steps:NoSuchTest is in none of connector_core_test, "):
        list(mutants.evidence(strange, lambda *_: Ended(0, "")))


def test_what_the_table_names_is_run_alone_and_else_the_simulator_first_until_the_promise_is_named() -> None:
    mutant = MUTANTS[0]._replace(test="Pool.BreaksItsPromisesLoudly")
    ran: list[tuple[str, ...]] = []

    def run(*command: str) -> Ended:
        ran.append(command)
        return Ended(0, "")

    list(mutants.evidence(mutant, run))
    assert ran == [("connector_core_test", "--gtest_filter=Pool.BreaksItsPromisesLoudly", "--gtest_brief=1")]
    ran.clear()
    list(mutants.evidence(mutant._replace(test=""), run))
    assert [command[0] for command in ran] == ["kvferry_sim", "connector_core_test", "regression_rows_test",
                                               "kvferry_sim"]


@pytest.mark.parametrize("name", ["refused-lookups-stay", "evicts-under-a-reader"])
def test_a_mutant_is_caught_by_its_own_promise(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (RELEASE / "bin" / mutants.SIMULATOR).exists(), "tests/run builds it"
    assert mutants.main(["--only", name, "--no-build"]) == 0
    assert "1 mutants, all caught by their own promise, in " in capsys.readouterr().out


def test_whatever_is_not_caught_by_its_own_promise_fails_the_run_and_is_told_apart(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    line = "if (chunk.slot >= slots_.size()) return false;"
    breaks = {Outcome.SURVIVES: f"{line}  // harmless", Outcome.CRASHES: "__builtin_trap();", Outcome.UNUSABLE: "}",
              Outcome.HANGS: "while (chunk.slot < slots_.size()) {}",
              Outcome.ANOTHER: 'promise::sane_counts(1, 1, 1, "a");'}
    test = "Worker.ASlotIsReadableOnlyWholeAndInItsOwnGeneration"
    monkeypatch.setattr(mutants, "TIMEOUT_S", 10)
    monkeypatch.setattr(mutants, "MUTANTS", [
        Mutant(outcome.name, "verified-only", "worker_core.cpp", line, broken, test)
        for outcome, broken in breaks.items()])
    assert mutants.main(["--no-build"]) == 1
    told = capsys.readouterr().out
    for outcome in breaks:
        assert f"\n{outcome.name}  (verified-only, worker_core.cpp)\n  {outcome.value}" in told
    assert "5 mutants, 0 caught by their own promise, 1 can't be judged, 1 hangs, 1 crashes, " in told
