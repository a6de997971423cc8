"""Tests one engine alone: vLLM's calls during the life of a request, their answers, and that nothing is left at the
end.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from kvferry_harness.prompts import prompt

if TYPE_CHECKING:
    from kvferry_harness.engine import Engine

MakeEngine = Callable[..., "Engine"]


def answers(engine: "Engine", request_id: str) -> list[tuple[int, int | None]]:
    """Returns (tokens in the engine's prefix cache, answer) for each lookup of the request that reached the core."""
    return [(call["local"], call["answer"]) for call in engine.log.of("lookup", request_id)]


def answered(engine: "Engine", request_id: str) -> tuple[int, int]:
    """Returns the last lookup of the request, whose answer vLLM used."""
    local, answer = answers(engine, request_id)[-1]
    assert answer is not None
    return local, answer


BOTH = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])


def test_every_counter_of_the_node_is_a_metric_of_vllm(make_engine: MakeEngine) -> None:
    added_by_python = {"tickets_refused_total"}
    from kvferry import stats

    assert set(make_engine().metrics()) == (stats.COUNTERS | stats.GAUGES).keys() - added_by_python


def exporter() -> tuple[Any, Any]:
    from kvferry import stats
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    registry = CollectorRegistry()
    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    return registry, stats.KvFerryPromMetrics(SimpleNamespace(kv_transfer_config=None), types,
                                              ["model_name", "engine"], {0: ["m", "0"]})


def test_transfers_are_observed_by_direction_path_and_stage() -> None:
    from kvferry import stats
    from kvferry.ended_transfers import EndedTransfer

    registry, exported = exporter()
    ended: list[tuple[Any, ...]] = []
    node: Any = SimpleNamespace(transfers_after=lambda last: (len(ended), ended[last:]))
    source, others = stats.StatsSource(node), dict.fromkeys(stats.COUNTERS | stats.GAUGES, 0.0)
    pulled = EndedTransfer("r", "pull", 0, 10_000_000, 64, 2, 4000, "tcp", "ok", (1_000_000, 5_000_000, 2_000_000))
    pushed = EndedTransfer("r", "push", 0, 900_000_000, 96, 3, 6000, "shm", "ok", (0, 7_000_000, 0))
    ignored = [pulled._replace(chunks=0, path=""), pulled._replace(kind="load")]
    ended += [pulled, *ignored]
    both = source.take(others).aggregate(source.take(others))
    ended += [pushed, pulled]
    both.aggregate(source.take(others))
    assert both.reduce().keys() == stats.GAUGES.keys()
    exported.observe(both.data)
    exported.observe(source.take(others).data)

    def value(name: str, **labels: str) -> float:
        found: float = registry.get_sample_value(f"kvferry_{name}", {"model_name": "m", "engine": "0"} | labels)
        return found

    of_pulls, of_pushes = ({"direction": "pull", "path": "tcp"}, {"direction": "push", "path": "shm"})
    assert value("transfer_seconds_count", **of_pulls) == 2
    assert value("transfer_seconds_sum", **of_pulls) == pytest.approx(0.02)
    assert value("transfer_seconds_sum", **of_pushes) == pytest.approx(0.007)
    assert value("transfer_bytes_sum", **of_pushes) == 6000
    assert value("transfer_chunks_sum", **of_pulls) == 4
    stages = {stage: value("pull_stage_seconds_sum", path="tcp", stage=stage) / 2
              for stage in ("queue", "post", "wire", "unpack")}
    assert stages == pytest.approx({"queue": 0.002, "post": 0.001, "wire": 0.005, "unpack": 0.002})
    assert len([one for metric in registry.collect() for one in metric.samples if one.name.endswith("_count")]) == 10


def test_tokens_that_are_computed_again_are_counted_by_reason() -> None:
    from kvferry import stats

    registry, exported = exporter()
    node: Any = SimpleNamespace(transfers_after=lambda last: (last, []))
    source, others = stats.StatsSource(node), dict.fromkeys(stats.COUNTERS | stats.GAUGES, 0.0)
    name = "recomputed_tokens_total"
    first = source.take(others | {f"{name}{{evicted}}": 5.0})
    both = first.aggregate(source.take(others | {f"{name}{{evicted}}": 7.0, f"{name}{{no_answer}}": 1.0}))
    assert {key: value for key, value in both.reduce().items() if value} == {
        f"{name}{{evicted}}": 7, f"{name}{{no_answer}}": 1}
    exported.observe(both.data)
    for reason, tokens in (("evicted", 7.0), ("no_answer", 1.0)):
        labels = {"model_name": "m", "engine": "0", "reason": reason}
        assert registry.get_sample_value(f"kvferry_{name}", labels) == tokens


def test_integers_that_do_not_fit_are_refused(make_engine: MakeEngine) -> None:
    node = make_engine().connector._scheduler._node._node  # the node itself, without the recorder around it
    for token in (2**31, -2**31 - 1, 2**32 + 5, 2**64):
        with pytest.raises(OverflowError):
            node.update_tokens("nobody", 0, [1, token, 2])
    for computed, scheduled in ((2**32, 1), (-1, 1), (2**64, 1), (1, 2**32 + 1), (1, -1)):
        with pytest.raises(OverflowError):
            node.build_step([], ["nobody"], [computed], [None], set(), {"nobody": scheduled}, [], lambda *_: [])
    with pytest.raises(TypeError):
        node.update_tokens("nobody", 0, [1, "two"])


@BOTH
def test_a_request_is_saved_while_it_lives_and_leaves_nothing_behind(
        make_engine: MakeEngine, async_scheduling: bool) -> None:
    engine = make_engine(async_scheduling=async_scheduling)
    engine.add("a", prompt(1, 150), 10)
    engine.run()

    assert [call["call"] for call in engine.log.calls if call.get("request") == "a"][:4] == [
        "add", "vllm_match", "lookup", "vllm_allocated"]
    assert answered(engine, "a") == (0, 0)
    assert engine.log.of("allocated", "a")[0]["external"] == 0
    finished, = engine.log.of("vllm_finished", "a")
    assert finished["status"] == "FINISHED_LENGTH_CAPPED"
    assert finished["holds"] is False
    assert engine.metrics()["saved_tokens_total"] == 159  # all tokens except the last one, whose KV was never computed
    engine.check_done()


def test_the_last_step_is_empty_and_saves_what_the_finished_request_left(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add("a", prompt(1, 100), 1)
    engine.step()
    assert engine.metrics()["saved_tokens_total"] == 64
    assert engine.scheduler.has_requests()
    engine.step()
    last = engine.log.of("vllm_step")[-1]
    assert last["counts"] == {}
    assert last["finished"] == ["a"]
    engine.step()  # this step has nothing to do, so the connector is not called
    assert engine.log.of("vllm_step")[-1] is last
    assert engine.metrics()["saved_tokens_total"] == 100
    engine.check_done()


@pytest.mark.parametrize("v2_runner", [False, True], ids=["v1", "v2"])
@BOTH
def test_a_full_hit_leaves_one_token_to_compute(
        make_engine: MakeEngine, async_scheduling: bool, v2_runner: bool) -> None:
    engine = make_engine(prefix_caching=False, async_scheduling=async_scheduling, v2_runner=v2_runner)
    engine.add("a", prompt(1, 128), 1)
    engine.run()
    engine.add("b", prompt(1, 128), 20)
    engine.run()

    assert answered(engine, "b") == (0, 127)
    assert engine.log.of("allocated", "b")[0]["external"] == 127
    step = next(call for call in engine.log.of("vllm_step") if "b" in call["counts"])
    assert step["counts"]["b"] == 1
    # An engine that plans ahead waits for its loads, because it could not repair a failed load later.
    assert step["sync_loads"] is not async_scheduling
    received = [call for call in engine.log.of("vllm_output") if "b" in call["received"]]
    assert len(received) == int(async_scheduling)
    assert engine.metrics()["loaded_tokens_total"] == 127
    engine.check_done()


def test_a_partial_hit_ends_inside_a_block(make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_caching=False, chunk_tokens=64)
    engine.add("a", prompt(1, 110), 1)  # this makes a chunk of 64 tokens and a tail of 46
    engine.run()
    engine.add("b", prompt(1, 110) + prompt(2, 60), 8)
    engine.add("c", prompt(1, 100) + prompt(3, 60), 8)  # the tail of "a" is not a prefix of this prompt
    engine.run()

    assert answered(engine, "b") == (0, 110)
    assert answered(engine, "c") == (0, 64)
    engine.check_done()


def test_the_engines_own_hit_comes_first_and_the_rest_is_loaded(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=10, token_budget=512)
    engine.add("a", prompt(1, 220), 1)
    engine.run()
    engine.add("filler", prompt(9, 150), 1)  # takes the blocks at the end of a's cached prefix
    engine.run()
    engine.add("a2", prompt(1, 220), 5)
    engine.run()

    local, external = answered(engine, "a2")
    assert 0 < local < 192
    assert local + external == 219
    engine.check_done()


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33])
def test_prompts_shorter_than_a_block_and_around_it(make_engine: MakeEngine, length: int) -> None:
    engine = make_engine(prefix_caching=False)
    engine.add("a", prompt(1, length), 3)
    engine.run()
    engine.add("b", prompt(1, length) + engine.told["a"].expected, 3)
    engine.run()

    _, external = answered(engine, "b")
    # Tails are found from 16 tokens on, because the name of a tail's group depends on the first 16 tokens.
    assert external == (length + 2 if length + 2 >= 16 else 0)
    engine.check_done()


def test_prompt_logprobs_read_no_cache_and_hold_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add("a", prompt(1, 100), 1)
    engine.run()
    engine.add("b", prompt(1, 100), 4, prompt_logprobs=True)
    engine.step()

    match, = engine.log.of("vllm_match", "b")
    assert match["skips_cache"] is True
    assert match["answer"] == [0, False]
    assert engine.log.of("vllm_step")[-1]["counts"] == {"b": 100}
    assert engine.metrics()["pool_pinned_chunks"] == 0
    engine.check_done()


@BOTH
def test_several_samples_of_one_prompt(make_engine: MakeEngine, async_scheduling: bool) -> None:
    """For n > 1, vLLM makes a request for each sample. The requests share blocks, and preemption takes some of these
    blocks.
    """
    engine = make_engine(num_blocks=14, async_scheduling=async_scheduling)
    for sample in range(4):
        engine.add(f"{sample}_n", prompt(1, 90), 70)
    engine.run()
    assert engine.metrics()["resumed_total"] > 0, "nobody was preempted"
    engine.check_done()


@BOTH
def test_chunked_prefill(make_engine: MakeEngine, async_scheduling: bool) -> None:
    engine = make_engine(token_budget=48, async_scheduling=async_scheduling, prefix_caching=False)
    for index in range(3):
        engine.add(f"a{index}", prompt(index, 300), 10)
    engine.run()
    for index in range(3):
        engine.add(f"b{index}", prompt(index, 300), 10)
    engine.run()

    assert max(sum(call["counts"].values()) for call in engine.log.of("vllm_step")) == 48
    for index in range(3):
        assert answered(engine, f"b{index}")[1] >= 256
    engine.check_done()


@pytest.mark.parametrize("draft_model", [False, True], ids=["n-gram", "draft model"])
def test_kv_of_rejected_drafts_is_saved_nowhere(make_engine: MakeEngine, draft_model: bool) -> None:
    engine = make_engine(prefix_caching=False, num_blocks=20, num_drafts=3, draft_model=draft_model)
    for index in range(3):
        engine.add(f"a{index}", prompt(index, 50), 170)
    engine.run()
    assert engine.metrics()["resumed_hit_tokens_total"] > 0, "nobody was preempted"
    drafts = sum(sum(call["speculative"].values()) for call in engine.log.of("vllm_step"))
    assert 0 < sum(len(engine.told[f"a{index}"].tokens) for index in range(3)) < drafts
    for index in range(3):
        engine.add(f"b{index}", prompt(index, 50) + engine.told[f"a{index}"].tokens, 5)
        engine.run()
        assert answered(engine, f"b{index}")[1] >= 218
    engine.check_done()


def test_prefill_in_one_step_only(make_engine: MakeEngine) -> None:
    engine = make_engine(token_budget=256, chunked_prefill=False, prefix_caching=False)
    for index in range(3):
        engine.add(f"a{index}", prompt(index, 200), 4)
    engine.run()
    engine.add("b", prompt(0, 200) + prompt(7, 50), 4)
    engine.run()
    assert answered(engine, "b") == (0, 202) or answered(engine, "b")[1] >= 192
    engine.check_done()


def test_lora_and_cache_salt_have_keys_of_their_own(make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_caching=False)
    engine.add("plain", prompt(1, 100), 1)
    engine.add("lora", prompt(1, 100), 1, lora="adapter")
    engine.add("salt", prompt(1, 100), 1, salt="tenant")
    engine.run()
    engine.add("plain2", prompt(1, 100), 4)
    engine.add("lora2", prompt(1, 100), 4, lora="adapter")
    engine.add("salt2", prompt(1, 100), 4, salt="tenant")
    engine.add("lora3", prompt(1, 100), 4, lora="another")
    engine.add("salt3", prompt(1, 100), 4, salt="another")
    engine.add("both", prompt(1, 100), 4, lora="adapter", salt="tenant")
    engine.run()

    # If equal tokens of another LoRA or salt were loaded, the stamps would also give wrong tokens.
    assert [answered(engine, name)[1] for name in ("plain2", "lora2", "salt2", "lora3", "salt3", "both")] == [
        99, 99, 99, 0, 0, 0]
    engine.check_done()


@BOTH
def test_an_adapter_that_is_loaded_again_has_other_keys(make_engine: MakeEngine, async_scheduling: bool) -> None:
    engine = make_engine(prefix_caching=False, async_scheduling=async_scheduling)
    engine.add("before", prompt(1, 100), 1, lora="adapter")
    engine.run()
    engine.add("running", prompt(1, 100), 60, lora="adapter")
    engine.step()
    engine.add("waiting", prompt(1, 100), 1, lora="adapter")
    engine.load_adapter("adapter")
    engine.add("after", prompt(1, 100), 1, lora="adapter")
    # the KV that the other requests compute is not saved
    assert set(engine.connector._scheduler._requests) == {"after"}
    engine.abort("running", "waiting")
    engine.run()
    engine.add("again", prompt(1, 100), 4, lora="adapter")
    engine.run()

    assert [answered(engine, name)[1] for name in ("running", "after", "again")] == [99, 0, 99]
    engine.check_done()


def test_blocks_of_an_adapter_before_it_was_loaded_again_are_not_saved(make_engine: MakeEngine) -> None:
    """vLLM's own prefix cache distinguishes adapters only by name and path."""
    engine = make_engine()
    engine.add("before", prompt(1, 100), 1, lora="adapter")
    engine.run()
    engine.load_adapter("adapter")
    engine.add("other", prompt(2, 100), 1, lora="adapter")
    engine.run()
    engine.add("after", prompt(1, 100), 1, lora="adapter")
    engine.scheduler.schedule()  # the step is not executed, because vLLM finds outdated blocks
    assert engine.log.of("vllm_match", "after")[-1]["local"] == 96
    assert [call["cacheable"] for call in engine.log.of("add", "after")] == [True, False]


ORDERS = [("RecordingConnector",), ("RecordingConnector", "IdleConnector"), ("IdleConnector", "RecordingConnector")]


@pytest.mark.parametrize("children", ORDERS, ids=["alone", "first", "second"])
def test_inside_vllms_multi_connector(make_engine: MakeEngine, children: tuple[str, ...]) -> None:
    engine = make_engine(multi=children, prefix_caching=False, num_blocks=16)
    engine.add("a", prompt(1, 128), 1, params={"do_remote_decode": True})
    engine.run()
    for index in range(4):
        engine.add(f"b{index}", prompt(1, 128), 30)
    engine.run()
    params = engine.told["a"].params or {}
    assert params["remote_num_tokens"] == 128
    assert ("idle" in params) == (len(children) > 1)
    assert answered(engine, "b0")[1] >= 127
    engine.check_done(held_chunks=None)


def test_multi_connector_finds_the_class_of_its_metrics_by_name() -> None:
    from kvferry.stats import KvFerryStats
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    stats = MultiConnector.build_kv_connector_stats({"KvFerryConnector": {"lookups_total": 3.0}})
    assert isinstance(stats["KvFerryConnector"], KvFerryStats)


def test_a_session_that_goes_on_is_left_alone(make_engine: MakeEngine) -> None:
    """vLLM's streaming input rewrites the history of a session. So the session's tokens are neither saved nor looked
    up.
    """
    engine = make_engine()
    engine.add("s", prompt(1, 70), 4, resumable=True)
    for _ in range(6):
        engine.step()
    said = list(engine.told["s"].tokens)
    assert len(said) == 4
    history = prompt(1, 70) + said[:-1] + prompt(2, 40)
    engine.expect_more("s", history, 3)
    engine.add("s", prompt(2, 40), 3, resumable=True)
    for _ in range(6):
        engine.step()
    engine.add("s", [1], 1)  # not resumable, so the session ends
    engine.run()

    assert engine.metrics()["saved_tokens_total"] == 0
    engine.check_done()
