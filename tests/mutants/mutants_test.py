"""The table of mutants stays true: each line is there, names are unique, every promise is broken; and some are run."""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from kvferry_launch.paths import RELEASE, REPO

sys.path.insert(0, str(Path(__file__).resolve().parent))

import mutants
from table import MUTANTS, Mutant

PROMISES = {"idempotent-lookup", "exact-load", "no-stale-spec", "saved-is-computed", "fenced-reuse", "exactly-once",
            "bounded-hold", "sane-counts", "verified-only", "no-engine-death"}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_line_is_there_once_and_its_break_changes_it(mutant: Mutant) -> None:
    assert mutants.broken_source(mutant) != (mutants.CORE / mutant.file).read_text()


def test_every_promise_is_broken_and_every_name_is_one_mutants() -> None:
    assert {mutant.promise for mutant in MUTANTS} == PROMISES
    assert Counter(mutant.name for mutant in MUTANTS).most_common(1)[0][1] == 1


def test_a_line_that_is_gone_is_told() -> None:
    gone = Mutant("gone", "exact-load", "chunk_pool.cpp", "no such line", "")
    with pytest.raises(mutants.MutantError, match="is there 0 times"):
        mutants.broken_source(gone)
    assert "no longer applies" in mutants.judge(gone).problem


@pytest.mark.parametrize("name", ["refused-lookups-stay", "evicts-under-a-reader"])
def test_a_mutant_is_caught(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (RELEASE / "bin" / mutants.SIMULATOR).exists(), "tests/run builds it"
    assert mutants.main(["--only", name, "--no-build"]) == 0
    told = capsys.readouterr().out
    assert "1 mutants, 1 caught, 1 of them by the simulator too" in told
    assert re.search(r"simulator   \S+ \(seed \d+\): ", told)


def test_one_that_nothing_catches_fails_the_run(monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    line = "a pool needs slots and ranks, not {} and {}"
    assert line in (REPO / "connector" / "core" / "chunk_pool.cpp").read_text()
    harmless = Mutant("another-wording", "exact-load", "chunk_pool.cpp", line, line + ".")
    monkeypatch.setattr(mutants, "MUTANTS", [harmless])
    assert mutants.main(["--no-build"]) == 1
    assert "SURVIVES" in capsys.readouterr().out
