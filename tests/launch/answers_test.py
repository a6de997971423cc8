"""Tests how the stress test judges answers: which answers are wrong, failed, slow or impossible."""

import pytest
from kvferry_launch.testbed.answers import (
    Admission,
    Answer,
    Generation,
    LoadResult,
    Report,
    first_mismatch,
    growth,
    parse_metrics,
)

REFERENCE = Generation([5, 6, 7], [0.5, 0.2, 0.3])


def judged(*answers: Answer, grown: dict[str, float] | None = None) -> LoadResult:
    return LoadResult(list(answers), [REFERENCE] * len(answers), grown or {})


def answer(tokens: list[int], seconds: float = 1.0, params: dict[str, object] | None = None) -> Answer:
    return Answer([1], seconds, Generation(tokens, [0.1] * len(tokens), params))


def test_equal_tokens_are_no_mismatch() -> None:
    assert first_mismatch(REFERENCE, Generation([5, 6, 7], [9.0, 9.0, 9.0])) is None


def test_a_mismatch_tells_the_first_position_and_the_reference_margin_there() -> None:
    mismatch = first_mismatch(REFERENCE, Generation([5, 9, 8], [0.0, 0.0, 0.0]))
    assert mismatch is not None
    assert (mismatch.position, mismatch.expected, mismatch.got, mismatch.margin) == (1, 6, 9, 0.2)
    assert "wrong KV" in str(mismatch)


def test_a_narrow_margin_is_called_possible_rounding() -> None:
    assert "may be rounding" in str(first_mismatch(Generation([5], [0.001]), Generation([6], [0.001])))


@pytest.mark.parametrize("tokens", [[5, 6], [5, 6, 7, 8], []])
def test_a_missing_or_extra_token_is_a_mismatch(tokens: list[int]) -> None:
    mismatch = first_mismatch(REFERENCE, Generation(tokens, [0.0] * len(tokens)))
    assert mismatch is not None
    assert mismatch.position == min(len(tokens), 3)


def test_wrong_failed_and_slow_answers_are_complaints() -> None:
    result = judged(answer([5, 6, 7]), answer([5, 1, 2]), Answer([1], 1.0, error="status 500"),
                    answer([5, 6, 7], seconds=20.5))
    complaints = result.complaints()
    assert [line.split(":")[0] for line in complaints] == ["request 1", "request 2", "request 3"]
    assert result.wrong_tokens == 2
    assert result.errors == {2: "status 500"}


def test_a_load_without_wrong_failed_or_slow_answers_has_no_complaint() -> None:
    assert judged(answer([5, 6, 7]), answer([5, 6, 7])).complaints() == []


def test_only_what_a_resumed_admission_loaded_counts_as_recovered() -> None:
    admissions = [{"hit": 400, "local": 0, "to_load": 400, "loaded": 400, "resumed": False, "tokens": 401},
                  {"hit": 430, "local": 32, "to_load": 398, "loaded": 398, "resumed": True, "tokens": 431}]
    params = {"kvferry_report": {"admissions": admissions, "preemptions": 1, "transfer_ms": 2.5}}
    result = judged(answer([5, 6, 7], params=params), answer([5, 6, 7]))
    assert result.resumed_loaded_tokens == 398
    assert result.reports == [Report([Admission(**entry) for entry in admissions], 1, 2.5), None]  # type: ignore[arg-type]


def test_loading_more_than_was_asked_for_is_a_complaint() -> None:
    entry = {"hit": 32, "local": 0, "to_load": 32, "loaded": 64, "resumed": False, "tokens": 401}
    params = {"kvferry_report": {"admissions": [entry], "preemptions": 0}}
    assert judged(answer([5, 6, 7], params=params)).complaints() == [
        "request 0: loaded 64 tokens, more than the 32 that the engine asked for"]


def test_metrics_are_summed_over_labels_and_compared() -> None:
    name = "vllm:num_preemptions_total"
    before = parse_metrics(f'# HELP x y\n{name}{{engine="0"}} 2.0\n')
    after = parse_metrics(f'{name}{{engine="0"}} 5.0\n{name}{{engine="1"}} 1.0\nn 3\n')
    assert growth(before, after) == {name: 4.0, "n": 3.0}
    assert judged(grown=growth(before, after)).preemptions == 4
