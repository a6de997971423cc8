"""Tests the proof's judge: what it must complain of, and what not."""

from typing import Any

import pytest
from configurations import Configuration, Kill
from judge import MIN_REQUESTS_FOR_ALL, Asked, Outcome, judge_answer, judge_whole
from kvferry_launch.testbed.answers import Generation
from report import verdict

REFERENCE = Generation([5, 6, 7], [0.5, 0.2, 0.3])
CHUNKS_OF_64 = Configuration("a", extra={"chunk_tokens": 64})


def admission(**values: Any) -> dict[str, Any]:
    return {"hit": 128, "local": 0, "to_load": 128, "loaded": 128, "resumed": False, "tokens": 200} | values


def answer(*admissions: dict[str, Any], tokens: tuple[int, ...] = (5, 6, 7), preemptions: int = 0) -> Generation:
    report = {"admissions": list(admissions), "preemptions": preemptions, "transfer_ms": 1.0}
    return Generation(list(tokens), [0.1] * len(tokens), {"kvferry_report": report})


def judged(generation: Generation, seconds: float = 1.0, prompt_tokens: int = 190, prefilled: bool = True) -> Outcome:
    outcome = Outcome(CHUNKS_OF_64, requests=1)
    judge_answer(outcome, Asked(0, prompt_tokens, prefilled, seconds), REFERENCE, generation)
    return outcome


def good(configuration: Configuration = CHUNKS_OF_64, **values: Any) -> Outcome:
    """Returns the outcome of a whole run without any fault."""
    counters = {"kvferry_loaded_tokens_total": 500.0, "kvferry_pulled_chunks_total": 5.0} | values.pop("counters", {})
    fields = {"requests": MIN_REQUESTS_FOR_ALL, "preemptions": 3, "resumed": 3, "aborted": 2, "chunks": 60,
              "chunks_local": 20, "chunks_loaded": 40, "prefilled": 30, "handed_over": 30,
              "kills": len(configuration.kills), "counters": counters}
    return Outcome(configuration, **(fields | values))  # type: ignore[arg-type]


def test_a_right_answer_has_no_complaint() -> None:
    outcome = judged(answer(admission()))
    assert (outcome.right, outcome.complaints) == (1, [])


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
    assert (outcome.chunks, outcome.chunks_local, outcome.chunks_loaded) == (3, 1, 1)
    assert (outcome.resumed, outcome.preemptions, outcome.unbegun) == (1, 1, 0)
    assert len(outcome.missing) == 1
    assert "computed 1 chunks again" in outcome.missing[0]


def test_what_the_engine_kept_does_not_count_as_loaded() -> None:
    outcome = judged(answer(admission(resumed=True, hit=192, local=192, to_load=0, loaded=0)))
    assert (outcome.chunks, outcome.chunks_local, outcome.chunks_loaded, outcome.recovered) == (3, 3, 0, None)


def test_a_request_preempted_before_its_first_token_had_computed_what_it_had_loaded() -> None:
    first, again = admission(tokens=400, loaded=128), admission(tokens=400, resumed=True, to_load=128, loaded=64)
    outcome = judged(answer(first, again, preemptions=1), prompt_tokens=400)
    assert (outcome.chunks, outcome.chunks_loaded, outcome.resumed, outcome.unbegun) == (2, 1, 1, 1)
    begun = judged(answer(first, again, preemptions=1), prompt_tokens=399)
    assert (begun.chunks, begun.chunks_loaded, begun.unbegun) == (6, 1, 0)


def test_only_the_first_admission_is_a_hand_over() -> None:
    none = admission(hit=0, to_load=0, loaded=0)
    assert judged(answer(admission())).handed_over == 1
    assert judged(answer(none, admission(resumed=True))).handed_over == 0
    assert judged(answer(admission()), prefilled=False).handed_over == 0


def test_a_good_run_has_no_complaint() -> None:
    assert judge_whole(good()) == []


EVICTING = Configuration("b", evicts=True, recovers=False)
KILLING = Configuration("c", kills=(Kill("prefill", 0.3),))
OVER_TCP = Configuration("d", extra={"path": "tcp"})
PUSHING = Configuration("e", pushes=True)
ALONE = Configuration("f", num_prefill=0)
FOUND = "d0 says: kvferry[7] info transport: measured the paths to peer 1, uses the fastest: pools by "


@pytest.mark.parametrize(("outcome", "complaint"), [
    (good(preemptions=0), "no request was preempted"),
    (good(resumed=0, chunks=0, chunks_local=0, chunks_loaded=0), "no request was resumed"),
    (good(aborted=0), "no request was given up"),
    (good(counters={"kvferry_loaded_tokens_total": 0.0}), "loaded nothing"),
    (good(counters={"kvferry_pulled_chunks_total": 0.0}), "no chunk came from another node"),
    (good(handed_over=14), "14 of 30 prompts were handed over"),
    (good(PUSHING), "no chunk was pushed"),
    (good(chunks_loaded=37), "kvferry loaded 92.5% of the 40 chunks"),
    (good(KILLING, kills=0), "0 kills, 1 were wanted"),
    (good(EVICTING), "no chunk was evicted"),
    (good(OVER_TCP), "no log says that a peer's pool is reached by tcp"),
    (good(OVER_TCP, paths=["p0 says: kvferry[7] info rank 0: its pool has 3 MiB; transport: path tcp; tcp"]),
     "no log says"),
    (good(OVER_TCP, paths=[FOUND + "tcp 1.6 GB/s", FOUND + "shm 17.7 GB/s, tcp 1.6 GB/s"]), "a path other than tcp"),
])
def test_a_run_in_which_its_subject_did_not_happen_is_a_complaint(outcome: Outcome, complaint: str) -> None:
    assert [complaint in line for line in judge_whole(outcome)] == [True]


def test_what_happened_as_wanted_is_no_complaint() -> None:
    assert judge_whole(good(EVICTING, counters={"kvferry_evicted_chunks_total": 4.0})) == []
    assert judge_whole(good(KILLING)) == []
    assert judge_whole(good(OVER_TCP, paths=[FOUND + "tcp 1.6 GB/s"])) == []
    assert judge_whole(good(PUSHING, counters={"kvferry_received_chunks_total": 1.0})) == []
    assert judge_whole(good(ALONE, counters={"kvferry_pulled_chunks_total": 0.0}, prefilled=0, handed_over=0)) == []


def test_a_short_run_need_not_preempt() -> None:
    assert judge_whole(good(requests=16, preemptions=0, resumed=0, aborted=0)) == []


def test_the_verdict_counts_what_settings_give_up_apart() -> None:
    keeps = good(requests=50, right=45, aborted=5, chunks=60, chunks_local=20, chunks_loaded=39)
    gives_up = good(EVICTING, requests=50, right=50, aborted=0, chunks=30, chunks_local=10, chunks_loaded=7)
    line = verdict([keeps, gives_up])
    assert line.startswith("100 requests, 95 right, 5 given up, ")
    assert ("of preempted requests' chunks 20 were in the engine and kvferry loaded 39 of the other 40 (97.5%), "
            "7 of 20 where settings give chunks up, ") in line
    assert "give chunks up" not in verdict([keeps])
