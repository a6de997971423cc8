"""Tests tenants, who are told apart by cache_salt: none can observe which prompts another has sent, and none evicts
what another has of the pool as its share.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from kvferry_harness.prompts import prompt
from kvferry_harness.waiting import wait_until
from kvferry_launch.testbed.servers import Controller

if TYPE_CHECKING:
    from kvferry_harness.engine import Engine
    from kvferry_harness.prober import Observed

MakeEngine = Callable[..., "Engine"]
PAIRS = 60  # without --tenant-pairs
AREA_OF_TIMES_MAX = 0.55
PLACES = pytest.mark.parametrize("elsewhere", [False, True], ids=["same engine", "another engine"])


@pytest.fixture
def wait_published(controller: Controller) -> Callable[["Engine"], None]:
    """Waits until other nodes can find all that an engine has in its pool, which must not be full."""

    def wait(engine: "Engine") -> None:
        wait_until(lambda: (engine.engine_id, engine.metrics()["pool_chunks"]) in [
            (node["engine_id"], node["chunks"]) for node in controller.nodes()])

    return wait


def shown_areas(seen: list["Observed"], who: str) -> tuple[float, float]:
    """Prints and returns the areas under the curve of the tokens that were found, and of the times."""
    from kvferry_harness.prober import area_under_curve

    def of(value: Callable[["Observed"], float]) -> float:
        return area_under_curve(*([value(one) for one in seen if one.was_sent == was_sent]
                                  for was_sent in (True, False)))

    found = of(lambda one: one.num_local + one.num_external), of(lambda one: one.seconds)
    print(f"{len(seen)} prompts, {who}: area under the curve {found[0]:.3f} of tokens, {found[1]:.3f} of times")
    return found


@PLACES
def test_a_tenant_can_not_tell_which_prompts_another_has_sent(
        make_engine: MakeEngine, wait_published: Callable[["Engine"], None], pytestconfig: pytest.Config,
        elsewhere: bool) -> None:
    from kvferry_harness.prober import probe

    asked = pytestconfig.getoption("--tenant-pairs")
    victims = make_engine()
    seen = probe(victims, make_engine() if elsewhere else victims, int(asked or PAIRS), "victim", "prober", 1,
                 wait_published)
    of_tokens, of_times = shown_areas(seen, "another tenant")
    assert {(one.num_local, one.num_external) for one in seen} == {(0, 0)}
    assert of_tokens == 0.5
    if asked:  # times are judged only on request, because they need many prompts
        assert of_times <= AREA_OF_TIMES_MAX


@PLACES
def test_the_same_tenant_can_tell(
        make_engine: MakeEngine, wait_published: Callable[["Engine"], None], elsewhere: bool) -> None:
    """Otherwise the test above would prove nothing."""
    from kvferry_harness.prober import probe

    victims = make_engine()
    seen = probe(victims, make_engine() if elsewhere else victims, 12, "victim", "victim", 2, wait_published)
    found = shown_areas(seen, "the same tenant")[0]
    assert found > 0.8 if elsewhere else found == 1.0  # on a busy machine a lookup may go unanswered for its 2 ms
    assert max(one.num_local + one.num_external for one in seen if one.was_sent) == 99


@pytest.mark.parametrize("in_multi", [False, True], ids=["alone", "in MultiConnector"])
def test_without_a_salt_nothing_is_shared_where_one_is_required(make_engine: MakeEngine, in_multi: bool) -> None:
    multi = ("IdleConnector", "RecordingConnector") if in_multi else ()
    engine = make_engine(extra={"require_cache_salt": True}, multi=multi)
    for name, salt in (("plain", ""), ("salted", "s")):
        engine.add(name, prompt(1, 100), salt=salt)
        engine.run()
    assert engine.metrics()["saved_tokens_total"] == 100, "only the salted one is saved"
    for name, salt in (("plain2", ""), ("salted2", "s")):
        engine.add(name, prompt(1, 100), 3, salt=salt)
        engine.run()

    def found(name: str) -> tuple[int, int]:
        match = engine.log.of("vllm_match", name)[0]
        return match["local"], match["answer"][0]

    assert found("plain2") == (0, 0), "vLLM's own prefix cache shares nothing either"
    assert sum(found("salted2")) == 99
    saved = engine.metrics()["saved_tokens_total"]
    engine.add("handed over", prompt(1, 100), 1, params={"do_remote_decode": True})
    engine.run()
    assert engine.metrics()["saved_tokens_total"] == saved, "no decode server can take it"
    engine.check_done()


def test_without_a_salt_kv_is_shared_where_none_is_required(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for name in ("first", "second"):
        engine.add(name, prompt(1, 100))
        engine.run()
    match = engine.log.of("vllm_match", "second")[0]
    assert match["local"] + match["answer"][0] == 99
    engine.check_done()


POOL_CHUNKS, CHUNKS_OF_PROMPT = 24, 3
PROMPT_TOKENS = CHUNKS_OF_PROMPT * 64 + 1


@pytest.mark.parametrize("elsewhere", [False, True], ids=["computed here", "from another engine"])
@pytest.mark.parametrize(("busy", "other"), [("busy", "other"), ("", "other"), ("", "")],
                         ids=["two tenants", "one without a salt", "one tenant"])
def test_a_tenant_at_ten_times_the_load_evicts_nobody_beyond_its_share(
        make_engine: MakeEngine, wait_published: Callable[["Engine"], None], busy: str, other: str,
        elsewhere: bool) -> None:
    """The other tenant sends the same four prompts in every round, whose chunks are half of the pool: its share. The
    engine has no prefix cache of its own, so that all it has of them is in the pool.
    """
    engine = make_engine(pool_chunks=POOL_CHUNKS, prefix_caching=False, extra={"save_partial_chunks": False})
    prefill = make_engine(pool_chunks=40 * POOL_CHUNKS) if elsewhere else None
    num_prompts = POOL_CHUNKS // 2 // CHUNKS_OF_PROMPT
    kept = []

    def serve(name: str, seeds: range, salt: str) -> list[int]:
        """Returns how many tokens of each prompt the engine had in its pool when the prompt came."""
        if prefill is not None:
            for seed in seeds:
                prefill.add(f"{name} {seed}", prompt(seed, PROMPT_TOKENS), salt=salt)
                prefill.run()
            wait_published(prefill)
        had = []
        for seed in seeds:
            pulled = engine.metrics()["pulled_chunks_total"]
            engine.add(f"{name} {seed}", prompt(seed, PROMPT_TOKENS), 2, salt=salt)
            engine.run()
            found: int = engine.log.of("vllm_match", f"{name} {seed}")[-1]["answer"][0]
            had.append(found - 64 * int(engine.metrics()["pulled_chunks_total"] - pulled))
        return had

    for number in range(5):
        first = 1000 + 100 * number
        assert serve("busy", range(first, first + 10 * num_prompts), busy) == [0] * 10 * num_prompts
        kept.append(serve(f"other {number}", range(num_prompts), other))
    metrics = engine.metrics()
    print(f"kept of the other's prompts: {kept}; {metrics['evicted_chunks_total']:.0f} chunks were evicted, "
          f"{metrics['evicted_for_tenants_total']:.0f} for another tenant; {metrics['pulled_chunks_total']:.0f} pulled")
    expected = 0 if busy == other else PROMPT_TOKENS - 1
    assert kept == [[0] * num_prompts] + 4 * [[expected] * num_prompts]
    assert metrics["pool_tenants"] == (1 if busy == other else 2)
    if elsewhere:  # on a busy machine a lookup may go unanswered for its 2 ms
        assert metrics["pulled_chunks_total"] > 5 * 10 * num_prompts * CHUNKS_OF_PROMPT / 2
    engine.check_done()
