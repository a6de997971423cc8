"""Tests that Dynamo's indexer knows what pools hold from their KV events: the short form of tests/events/run."""

import sys

import pytest
from kvferry_launch.setup.commands import SetupError
from kvferry_launch.setup.dynamo import ensure_dynamo

pytest.importorskip("vllm", reason="the events are vLLM's")
pytest.importorskip("kvferry._core", reason="the Python module is not built")


@pytest.fixture(scope="module", autouse=True)
def _dynamo() -> None:
    try:
        sys.path.append(str(ensure_dynamo()))
    except SetupError as error:
        pytest.skip(f"ai-dynamo-runtime, whose indexer is asked, is not installable here: {error}")


@pytest.mark.parametrize("seed", [1, 2])
def test_dynamos_indexer_answers_what_the_pools_hold(seed: int) -> None:
    from indexer_proof import prove

    # small pools, so that much is evicted
    events, queries, wrong, stale = prove(15_000, seed, num_workers=4, num_nodes=600, capacity=80, events_per_query=5)
    assert events >= 15_000
    assert queries > 1000
    assert (wrong, stale) == (0, 0)
