"""Tests launch/examples/monitoring: promtool accepts the files, the alerts fire, and every metric that they name
exists.
"""

import ast
import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from kvferry_launch.paths import LAUNCH, REPO
from kvferry_launch.process import free_port
from kvferry_launch.proxy.metrics import Metrics
from kvferry_launch.testbed.servers import Controller

MONITORING = LAUNCH / "examples" / "monitoring"
OF_REPLICAS = ("etcd_up", "event_log_up")  # metrics that only a controller with replicas has
METRIC = re.compile(r"\bkvferry_[a-z_]+")
SUFFIX = re.compile(r"_(bucket|sum|count|created)$")


def names(prometheus_text: str) -> set[str]:
    return {SUFFIX.sub("", line.split()[2]) for line in prometheus_text.splitlines() if line.startswith("# TYPE ")}


def of_nodes() -> set[str]:
    """Returns the names of the nodes' metrics. They are read from the source, because vLLM, which exports them, need
    not be installed.
    """
    tables = [ast.literal_eval(node.value) for node in ast.parse(
        (REPO / "connector" / "python" / "kvferry" / "stats.py").read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)]
    return {f"kvferry_{name}" for table in tables for name in table}


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[set[str]]:
    port = free_port()
    controller = Controller("monitored", log_folder=tmp_path_factory.mktemp("logs"),
                            flags=("--state", "none", "--http", f"127.0.0.1:{port}"))
    controller.start()
    try:
        controller.wait_ready()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            of_controller = names(answer.read().decode())
    finally:
        controller.stop()
    views = (REPO / "controller" / "http" / "http_views.cpp").read_text()
    per_node = set(re.findall(r'metrics\.add\("(node_\w+)"', views))
    per_node |= {name for name in OF_REPLICAS if f'"{name}"' in views}
    of_proxy = names(Metrics().text().decode())
    yield of_nodes() | of_proxy | of_controller | {f"kvferry_controller_{name}" for name in per_node}


def alerts() -> list[dict[str, str]]:
    return [rule for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
            for rule in group["rules"]]


def panels() -> list[dict[str, list[dict[str, str]]]]:
    found: list[dict[str, list[dict[str, str]]]] = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    return found


def test_every_metric_of_alerts_and_panels_exists(known: set[str]) -> None:
    expressions = [rule["expr"] for rule in alerts()]
    expressions += [target["expr"] for panel in panels() for target in panel["targets"]]
    named = {SUFFIX.sub("", name) for expression in expressions for name in METRIC.findall(expression)}
    assert len(named) > 25
    assert not named - known


def test_every_counter_of_failures_has_an_alarm_or_a_panel() -> None:
    shown = (MONITORING / "alerts.yml").read_text() + (MONITORING / "dashboard.json").read_text()
    failures = {name for name in of_nodes() if re.search("fail|refused|timeouts|full|mislabeled|unasked", name)}
    # these follow from pool_full, which is shown
    told_elsewhere = {"kvferry_pins_refused_total", "kvferry_leases_refused_total"}
    assert not {name for name in failures - told_elsewhere if name not in shown}


def promtool(*words: str | Path, folder: Path = MONITORING) -> None:
    done = subprocess.run(["promtool", *map(str, words)], capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_rules_and_configuration() -> None:
    promtool("check", "rules", "alerts.yml")
    # --syntax-only, because the file with the token exists only at the operator
    promtool("check", "config", "--syntax-only", "prometheus.yml")


@pytest.mark.parametrize("alert,series,values", [
    ("KvferryControllerDown", 'up{job="kvferry-controller"}', "1 0x30"),
    ("KvferryNodesWithoutKey", "kvferry_controller_http_refused_total", "0+1x30"),
    ("KvferryNodeGone", "kvferry_controller_nodes", "4x3 3x30"),
    ("KvferryWaitsInVain", "kvferry_fetch_timeouts_total", "0+60x30"),
    ("KvferryWaitsInVain", "kvferry_holders_suspected_total", "0+1x30"),
    ("KvferryMemoryErrors", "kvferry_load_failures_total", "0 0 1x30"),
    ("KvferryNoPair", "kvferry_proxy_unpaired_total", "0+1x30")])
def test_alerts_fire_when_they_should(tmp_path: Path, alert: str, series: str, values: str) -> None:
    def count(values: str, expected: list[dict[str, object]]) -> dict[str, object]:
        firing = {"expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})', "eval_time": "20m",
                  "exp_samples": expected}
        return {"interval": "1m", "input_series": [{"series": series, "values": values}], "promql_expr_test": [firing]}

    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(MONITORING / "alerts.yml")],
                                    "tests": [count(values, [{"labels": "{}", "value": 1}]), count("1x30", [])]}))
    promtool("test", "rules", file)
