"""The proof's judge: what it must complain of, and what not."""

from typing import Any

import pytest
from configurations import Configuration, Kill
from judge import MIN_REQUESTS_FOR_ALL, Outcome, judge_answer, judge_whole
from kvferry_launch.testbed.answers import Generation

REFERENCE = Generation([5, 6, 7], [0.5, 0.2, 0.3])
CHUNKS_OF_64 = Configuration("a", extra={"chunk_tokens": 64})


def admission(**values: Any) -> dict[str, Any]:
    return {"hit": 128, "local": 0, "to_load": 128, "loaded": 128, "resumed": False, "tokens": 200} | values


def answer(*admissions: dict[str, Any], tokens: tuple[int, ...] = (5, 6, 7), preemptions: int = 0) -> Generation:
    report = {"admissions": list(admissions), "preemptions": preemptions, "transfer_ms": 1.0}
    return Generation(list(tokens), [0.1] * len(tokens), {"kvferry_report": report})


def judged(generation: Generation, seconds: float = 1.0) -> Outcome:
    outcome = Outcome(CHUNKS_OF_64, requests=1)
    judge_answer(outcome, 0, REFERENCE, generation, seconds)
    return outcome


def good(configuration: Configuration = CHUNKS_OF_64, **values: Any) -> Outcome:
    """A whole run of which nothing can be said."""
    fields = {"requests": MIN_REQUESTS_FOR_ALL, "preemptions": 3, "resumed": 3, "aborted": 2, "loaded_tokens": 500,
              "chunks": 40, "chunks_back": 40, "kills": len(configuration.kills)}
    return Outcome(configuration, **(fields | values))  # type: ignore[arg-type]


def test_a_right_answer_has_no_complaint() -> None:
    outcome = judged(answer(admission()))
    assert (outcome.right, outcome.complaints, outcome.loaded_tokens) == (1, [], 128)


@pytest.mark.parametrize(("generation", "seconds", "complaint"), [
    (answer(admission(), tokens=(5, 9, 7)), 1.0, "token 1 is 9"),
    (answer(admission(), tokens=(5, 6)), 1.0, "token 2 is None"),
    (answer(admission()), 20.5, "took 20.5 s"),
    (Generation([5, 6, 7], [0.1] * 3), 1.0, "without its report"),
    (answer(admission(loaded=129)), 1.0, "loaded=129"),
    (answer(admission(loaded=-1)), 1.0, "loaded=-1"),
    (answer(admission(hit=200)), 1.0, "hit=200"),
])
def test_what_is_wrong_with_an_answer_is_a_complaint(generation: Generation, seconds: float, complaint: str) -> None:
    outcome = judged(generation, seconds)
    assert len(outcome.complaints) == 1
    assert complaint in outcome.complaints[0]


def test_chunks_are_back_only_if_they_were_loaded() -> None:
    planned = admission(resumed=True, local=64, to_load=128, loaded=64, tokens=200)
    outcome = judged(answer(planned, preemptions=1))
    assert (outcome.chunks, outcome.chunks_back, outcome.resumed, outcome.preemptions) == (3, 2, 1, 1)


def test_a_good_run_has_no_complaint() -> None:
    assert judge_whole(good()) == []


EVICTING = Configuration("b", evicts=True, recovers=False)
KILLING = Configuration("c", kills=(Kill("prefill", 0.3),))
OVER_TCP = Configuration("d", extra={"path": "tcp"})


@pytest.mark.parametrize(("outcome", "complaint"), [
    (good(preemptions=0), "no request was preempted"),
    (good(resumed=0, chunks=0, chunks_back=0), "no request was resumed"),
    (good(aborted=0), "no request was given up"),
    (good(loaded_tokens=0), "loaded nothing"),
    (good(chunks_back=37), "92.5% of preempted requests' chunks came back"),
    (good(KILLING, kills=0), "0 kills, 1 were wanted"),
    (good(EVICTING), "no chunk was evicted"),
    (good(OVER_TCP), "no log names a path"),
    (good(OVER_TCP, paths=["p0 says: path shm; shm"]), "a path other than tcp"),
])
def test_a_run_in_which_its_subject_did_not_happen_is_a_complaint(outcome: Outcome, complaint: str) -> None:
    assert [complaint in line for line in judge_whole(outcome)] == [True]


def test_what_happened_as_wanted_is_no_complaint() -> None:
    assert judge_whole(good(EVICTING, counters={"kvferry_evicted_chunks_total": 4.0})) == []
    assert judge_whole(good(KILLING)) == []
    assert judge_whole(good(OVER_TCP, paths=["p0 says: path tcp; tcp"])) == []


def test_a_short_run_need_not_preempt() -> None:
    assert judge_whole(good(requests=16, preemptions=0, resumed=0, aborted=0)) == []
