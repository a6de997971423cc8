"""Tests launch/examples/monitoring: promtool accepts its files, alerts fire when they should, and every metric in it
exists.
"""

import importlib.util
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvferry_launch.paths import LAUNCH, REPO

MONITORING = LAUNCH / "examples" / "monitoring"
PAGES = {name: (LAUNCH / "docs" / f"{name}.md").read_text() for name in ("metrics", "operations")}
METRIC = re.compile(r"\b(?:kvferry_|vllm:)[a-z_]+")
SUFFIX = re.compile(r"_(bucket|sum|count)$")


def documented() -> set[str]:
    """Returns the metrics on the page, which metrics_page_test.py compares with the exported metrics."""
    return set(re.findall(r"^\| `(kvferry_\w+)`", PAGES["metrics"], re.MULTILINE))


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
            for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    return found


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel.get("targets", [])]


def test_every_metric_of_alerts_and_panels_exists() -> None:
    named = {SUFFIX.sub("", name) for text in [*expressions(), *(rule["expr"] for rule in alerts())]
             for name in METRIC.findall(text)}
    of_vllm = {name for name in named if name.startswith("vllm:")}
    assert len(named) > 40
    assert not named - of_vllm - documented()
    if (found := importlib.util.find_spec("vllm")) and found.origin:
        loggers = (Path(found.origin).parent / "v1" / "metrics" / "loggers.py").read_text()
        assert all(f'name="{name.removesuffix("_total")}"' in loggers for name in of_vllm)


def test_every_counter_of_failures_has_an_alarm_or_a_panel() -> None:
    shown = (MONITORING / "alerts.yml").read_text() + (MONITORING / "dashboard.json").read_text()
    failures = {name for name in documented() if re.search("fail|refused|timeouts|full|mislabeled|unasked|lost", name)}
    # A full pool causes both, and has an alert of its own.
    told_elsewhere = {"kvferry_pins_refused_total", "kvferry_leases_refused_total"}
    assert not {name for name in failures - told_elsewhere if name not in shown}


def test_documents_name_no_alert_that_is_gone() -> None:
    named = set(re.findall(r"\bKvferry\w+", "".join(PAGES.values())))
    assert named == {alert["alert"] for alert in alerts()}


def test_panels_lie_beside_each_other() -> None:
    taken = [(x, y) for panel in panels() for place in [panel["gridPos"]]
             for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24
    assert len({panel["id"] for panel in panels()}) == len(panels())


def promtool(*words: str | Path, folder: Path = MONITORING) -> None:
    done = subprocess.run(["promtool", *map(str, words)], capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_rules_panels_and_configuration(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(expressions())]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", tmp_path / "panels.yml")
    for name in ("alerts.yml", "prometheus.yml"):
        (tmp_path / name).write_text((MONITORING / name).read_text())
    (tmp_path / "kvferry.token").write_text("0" * 64)
    promtool("check", "config", "prometheus.yml", folder=tmp_path)


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_an_alert_has_all_that_who_is_woken_needs(alert: dict[str, Any]) -> None:
    assert re.fullmatch(r"\d+m", alert["for"])
    assert alert["labels"]["severity"] in ("warning", "critical")
    assert alert["annotations"]["summary"].endswith(".")
    page, _, anchor = alert["annotations"]["runbook"].partition("#")
    assert (REPO / page).read_text() == PAGES["operations"]
    section = next(one for one in re.split(r"^##+ ", PAGES["operations"], flags=re.MULTILINE)
                   if re.sub(r"[^\w\- ]", "", one.splitlines()[0].lower()).replace(" ", "-") == anchor)
    assert f"`{alert['alert']}`" in section


# For each alert, pairs of series by name: series at which the alert fires, and similar series at which it must not
# fire. The values are in Prometheus' notation, one for each minute.
UP = {"controller": 'up{job="kvferry-controller"}', "proxy": 'up{job="kvferry-proxy"}', "vllm": 'up{job="vllm"}'}
BY_SOURCE = 'vllm:prompt_tokens_by_source_total{role="%s", source="%s"}'
STATE, UPTIME = (f"kvferry_controller_{name}" for name in ("state_durable", "up_seconds"))
GROWS, STANDS = "0+1x30", "7x30"
PER_SECOND = "0+60x30"
Series = dict[str, str]
WHEN: dict[str, list[tuple[Series, Series]]] = {
    "KvferryControllerDown": [({UP["controller"]: "1 0x30"}, {UP["controller"]: "1x17 0 1x30", UP["vllm"]: "0x30"})],
    "KvferryNodeLost": [({"kvferry_controller_nodes_expired_total": "0x15 1x15"},
                         {"kvferry_controller_nodes_expired_total": STANDS, "kvferry_controller_nodes": "4x15 3x15"})],
    "KvferryNodeRefused": [({"kvferry_controller_nodes_refused_total": GROWS},
                            {"kvferry_controller_nodes_refused_total": STANDS})],
    "KvferryDrainLosesChunks": [({"kvferry_controller_drain_chunks_lost": "0x10 1x20"},
                                 {"kvferry_controller_drain_chunks_lost": "0x30"})],
    "KvferryStateNotOnDisk": [({STATE: "1x2 0x30"}, {STATE: "1x30"}),
                              ({STATE: "0x30"}, {UPTIME: PER_SECOND})],  # the second has --state none
    "KvferryIndexFull": [({"kvferry_controller_chunks_dropped_total": GROWS},
                          {"kvferry_controller_chunks_dropped_total": STANDS})],
    "KvferryEtcdDown": [({"kvferry_controller_etcd_up": "0x30"}, {"kvferry_controller_etcd_up": "1x30"})],
    "KvferryEventLogDown": [({"kvferry_controller_event_log_up": "0x30"}, {"kvferry_controller_event_log_up": "1x30"})],
    "KvferryServerDown": [({UP["vllm"]: "1 0x30"}, {UP["vllm"]: "1x17 0 1x30", UP["proxy"]: "0x30"})],
    "KvferryRecomputes": [({BY_SOURCE % ("decode", "local_compute"): "0+30x30",
                            BY_SOURCE % ("decode", "external_kv_transfer"): "0+100x30"},
                           {BY_SOURCE % ("decode", "local_compute"): "0+20x30",
                            BY_SOURCE % ("decode", "external_kv_transfer"): "0+100x30",
                            BY_SOURCE % ("prefill", "local_compute"): "0+100x30"})],
    "KvferryPreemptedRecompute": [({"kvferry_resumed_total": GROWS, "kvferry_resumed_hit_tokens_total": STANDS},
                                   {"kvferry_resumed_total": GROWS, "kvferry_resumed_hit_tokens_total": PER_SECOND})],
    "KvferryWaitsInVain": [({"kvferry_fetch_timeouts_total": PER_SECOND}, {"kvferry_fetch_timeouts_total": GROWS}),
                           ({"kvferry_holders_suspected_total": GROWS}, {"kvferry_holders_suspected_total": STANDS})],
    "KvferryPullsFail": [({"kvferry_pull_failures_total": PER_SECOND}, {"kvferry_pull_failures_total": GROWS})],
    "KvferryPushesFail": [({"kvferry_push_failures_total": PER_SECOND}, {"kvferry_push_failures_total": GROWS})],
    "KvferrySavesFail": [({"kvferry_save_failures_total": PER_SECOND}, {"kvferry_save_failures_total": GROWS})],
    "KvferryMemoryErrors": [({"kvferry_load_failures_total": "0 0 1x30"}, {"kvferry_load_failures_total": STANDS})],
    "KvferryPoolFull": [({"kvferry_pool_full_total": "0+90x30"}, {"kvferry_pool_full_total": "0+30x30"})],
    "KvferryPoolTooSmall": [
        ({"kvferry_evicted_chunks_total": "0+95x30", "kvferry_saved_chunks_total": "0+100x30",
          "kvferry_lookups_total": "0+100x30", "kvferry_lookup_hits_total": "0+5x30"},
         {"kvferry_evicted_chunks_total": "0+95x30", "kvferry_saved_chunks_total": "0+100x30",
          "kvferry_lookups_total": "0+100x30", "kvferry_lookup_hits_total": "0+50x30"})],
    "KvferryNodesWithoutKey": [({f"kvferry_controller_{of}_refused_total": GROWS},
                                {f"kvferry_controller_{of}_refused_total": STANDS}) for of in ("handshakes", "http")],
    "KvferryForgedAddresses": [({"kvferry_tickets_refused_total": GROWS}, {"kvferry_tickets_refused_total": STANDS})],
    "KvferryProtocolBroken": [
        ({"kvferry_mislabeled_chunks_total": GROWS, "kvferry_unasked_answers_total": STANDS},
         {"kvferry_mislabeled_chunks_total": STANDS, "kvferry_unasked_answers_total": STANDS}),
        ({"kvferry_controller_messages_malformed_total": GROWS},
         {"kvferry_controller_messages_malformed_total": STANDS})],
    "KvferryProxyDown": [({UP["proxy"]: "1 0x30"}, {UP["proxy"]: "1x17 0 1x30", UP["vllm"]: "0x30"})],
    "KvferryProxyWithoutController": [({"kvferry_proxy_controller_up": "0x30"},
                                       {"kvferry_proxy_controller_up": "1x30"})],
    "KvferryNoPair": [({"kvferry_proxy_unpaired_total": GROWS}, {"kvferry_proxy_unpaired_total": STANDS})],
    "KvferryRequestsFail": [({'kvferry_proxy_requests_total{status="502"}': "0+3x30",
                              'kvferry_proxy_requests_total{status="200"}': "0+97x30"},
                             {'kvferry_proxy_requests_total{status="502"}': "0+1x30",
                              'kvferry_proxy_requests_total{status="400"}': "0+50x30",
                              'kvferry_proxy_requests_total{status="200"}': "0+97x30"})],
    "KvferryServersFail": [({'kvferry_proxy_retries_total{role="decode"}': PER_SECOND},
                            {'kvferry_proxy_retries_total{role="decode"}': GROWS})],
    "KvferryServerNotReady": [({'kvferry_proxy_nodes{role="kv_consumer", state="not ready"}': "1x30"},
                               {'kvferry_proxy_nodes{role="kv_consumer", state="draining"}': "1x30"})],
    "KvferryBrokenStreams": [({"kvferry_proxy_broken_streams_total": GROWS},
                              {"kvferry_proxy_broken_streams_total": STANDS})],
}


def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    assert list(WHEN) == [alert["alert"] for alert in alerts()]
    tests = [{"name": f"{alert}: {'fires' if number else 'is silent'}", "interval": "1m",
              "input_series": [{"series": name, "values": values} for name, values in series.items()],
              "promql_expr_test": [{"expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})',
                                    "eval_time": "20m",
                                    "exp_samples": [{"labels": "{}", "value": 1}] * number}]}
             for alert, cases in WHEN.items() for fires, is_silent in cases for number, series in
             ((1, fires), (0, is_silent))]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(MONITORING / "alerts.yml")], "tests": tests}))
    promtool("test", "rules", file)
