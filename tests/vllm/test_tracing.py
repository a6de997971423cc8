"""Tests that a request through launch/proxy and real vLLM servers is one trace, with spans of all three and of kvferry.
"""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvferry_launch.node.vllm import KvConnector
from kvferry_launch.testbed.prompts import PromptSet
from otlp_collector import Collector, text_attributes
from proxy_deployment import ProxyDeployment
from texts import completion_body, text_of

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
MAX_TOKENS = 5


@pytest.fixture
def traced(toy: Path, kvferry_connector: KvConnector, servers: Any) -> Iterator[tuple[ProxyDeployment, Collector]]:
    servers.stop()  # two cores have no room for a second deployment
    with Collector() as collector:
        deployment = ProxyDeployment(toy, kvferry_connector, "traced", collector=collector.url)
        try:
            deployment.start()
            yield deployment, collector
        finally:
            deployment.stop()


def test_a_request_is_one_trace(traced: tuple[ProxyDeployment, Collector]) -> None:
    deployment, collector = traced
    (prompt,) = PromptSet(seed=88, count=1, tokens_min=200).prompts()
    request = urllib.request.Request(
        f"{deployment.url}/v1/completions", data=json.dumps(completion_body(text_of(prompt), MAX_TOKENS)).encode(),
        headers={"Content-Type": "application/json", "traceparent": f"00-{TRACE}-{SPAN}-01", "X-Request-Id": "by-id"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["choices"]
    prefilled, decoded = sorted(collector.wait_for("llm_request", 2), key=lambda span: span.start_time_unix_nano)
    prefill, decode = collector.wait_for("prefill")[0], collector.wait_for("decode")[0]
    assert (prefilled.parent_span_id, decoded.parent_span_id) == (prefill.span_id, decode.span_id)
    lookups = {span.parent_span_id: text_attributes(span) for span in collector.wait_for("kvferry.lookup", 2)}
    assert lookups[prefill.span_id]["kvferry.found_tokens"] == "0"
    assert lookups[decode.span_id]["kvferry.found_tokens"] == str(len(prompt) - 1)
    (loaded,), (pushed,) = collector.wait_for("kvferry.load"), collector.wait_for("kvferry.push")
    assert (pushed.parent_span_id, loaded.parent_span_id) == (prefill.span_id, decode.span_id)
    for span in (pushed, loaded):
        attributes = text_attributes(span)
        assert attributes["kvferry.outcome"] == "ok"
        assert int(attributes["kvferry.tokens"]) >= len(prompt) - 1
        assert int(attributes["kvferry.chunks"]) > 0
        assert int(attributes["kvferry.bytes"]) > 0
    assert text_attributes(pushed)["kvferry.path"] in ("shm", "cma", "tcp", "ucx")
    assert text_attributes(loaded)["kvferry.path"] == "pool", "its chunks were pushed"
    (whole,) = collector.wait_for("POST /v1/completions")
    assert whole.parent_span_id.hex() == SPAN
    of_request = [span for span in collector.spans if span.name.startswith(("llm_request", "kvferry.", "decode"))]
    assert {span.trace_id.hex() for span in of_request} == {TRACE}
    lives = deployment.controller.explain("by-id")["lives"]
    assert [life["role"] for life in lives] == ["kv_producer", "kv_consumer"], "kvferry explain knows X-Request-Id"
    told = json.loads(deployment.controller.run("explain", "--trace", TRACE, "--json"))
    assert [[life["role"] for life in one["lives"]] for one in told["requests"]] == [["kv_producer", "kv_consumer"]]
