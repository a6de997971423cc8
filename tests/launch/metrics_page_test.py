"""Tests that launch/docs/metrics.md has a row for every metric that controllers, nodes and proxies export, and no
other. With KVFERRY_WRITE_PAGE=1 it writes the rows, except for the last column of nodes and proxies, which is written
by hand.
"""

import ast
import importlib.util
import json
import os
import re
import subprocess
import urllib.request
from pathlib import Path

import pytest
from kvferry_launch.paths import KVFERRY, LAUNCH, REPO
from kvferry_launch.process import free_port
from kvferry_launch.proxy.metrics import Metrics
from kvferry_launch.testbed.servers import Controller
from nodes_by_hand import Node

PAGE = LAUNCH / "docs" / "metrics.md"
HOW_TO_WRITE = "to write the rows: KVFERRY_WRITE_PAGE=1 .venv/bin/python -m pytest tests/launch/metrics_page_test.py"
VLLM_LABELS = ["model_name", "engine"]
Row = list[str]


def row(name: str, kind: str, labels: list[str], *more: str) -> Row:
    return [f"`{name}`", kind, ", ".join(f"`{label}`" for label in labels), *more]


def of_controller(folder: Path) -> list[Row]:
    """Returns the metrics of a running controller that exports every metric: it has a node that has pulled and is
    drained, an engine, etcd and an event log.
    """
    http = free_port()
    controller = Controller("documented", log_folder=folder, flags=(
        "--state", str(folder / "state"), "--http", f"127.0.0.1:{http}", "--stream", f"unix://{folder}/stream",
        "--etcd", "http://127.0.0.1:1", "--event-log", "redis://127.0.0.1:1"))  # neither etcd nor Redis runs there
    controller.start()
    try:
        controller.wait_ready()
        node = Node(f"{folder}/stream", "d0", "kv_consumer", "http://d0:1")
        node.holds([b"k" * 16])
        node.report([["tcp://p0:1", "shm", False, 5, 0, 0, 1, 10, 0]], [])
        subprocess.run([KVFERRY, "drain", "d0", "--force", "--timeout", "1", "--controller", controller.address],
                       capture_output=True, check=False)  # this fails, because no other node can take the chunk
        engine = {"instance_id": "e", "endpoint": "tcp://127.0.0.1:9", "modelname": "m", "block_size": 16}
        urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{http}/register",
                                                      data=json.dumps(engine).encode()), timeout=10).close()
        with urllib.request.urlopen(f"http://127.0.0.1:{http}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        node.close()
    finally:
        controller.stop()
    samples = {name: re.findall(r'(\w+)="', labels or "")
               for name, labels in re.findall(r"^(kvferry_\w+)(\{.*\})? \S+$", text, re.MULTILINE)}
    # This metric is added by hand, because an engine that publishes nothing has no blocks.
    samples["kvferry_controller_engine_blocks"] = [*samples["kvferry_controller_engine_live"], "dp_rank", "tier"]
    described = re.findall(r"^# HELP (\w+) (.+)\n# TYPE \1 (\w+)$", text, re.MULTILINE)
    assert {name for name, _, _ in described} == set(samples), "described and exported by this controller"
    return [row(name, kind, samples[name], help_text) for name, help_text, kind in described]


def of_nodes() -> list[Row]:
    """Returns the metrics of nodes. They are read from the source, because vLLM, which exports them, need not be
    installed.
    """
    source = (REPO / "connector" / "python" / "kvferry" / "stats.py").read_text()
    tables = {node.targets[0].id: ast.literal_eval(node.value) for node in ast.parse(source).body  # type: ignore
              if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)}
    return [row(f"kvferry_{name}", kind, VLLM_LABELS + more, text) for kind, table, more in (
                ("counter", "COUNTERS", []), ("counter", "COUNTERS_BY_REASON", ["reason"]), ("gauge", "GAUGES", []),
                ("histogram", "HISTOGRAMS", ["direction", "path"]),
                ("histogram", "HISTOGRAMS_BY_STAGE", ["path", "stage"]))
            for name, text in tables[table].items()]


def of_proxy() -> list[Row]:
    metrics = [metric for metric in vars(Metrics()).values() if hasattr(metric, "_labelnames")]
    return [row(one.name + "_total" * (one.type == "counter"), one.type, list(metric._labelnames), one.documentation)
            for metric in metrics for one in metric.describe()]


def rows_below(heading: str) -> list[Row]:
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.strip().strip("|").split(" | ")]
            for line in section.splitlines() if line.startswith("| `")]


def check(heading: str, rows: list[Row]) -> None:
    """The rows of the page have one more column than `rows`, which is written by hand."""
    known = {one[0]: one[-1] for one in rows_below(heading)}
    write(heading, [[*one, known.get(one[0], "TODO")] for one in rows])
    assert [one[:-1] for one in rows_below(heading)] == rows, HOW_TO_WRITE
    unexplained = [one[0] for one in rows_below(heading) if len(one[-1]) < 10]
    assert not unexplained, f"the last column does not say what it tells: {unexplained}"


def write(heading: str, rows: list[Row]) -> None:
    text = "".join(f"| {' | '.join(one)} |\n" for one in rows)
    if os.environ.get("KVFERRY_WRITE_PAGE"):
        before, _, after = PAGE.read_text().partition(f"\n## {heading}\n")
        after = re.sub(r"(\n\|---.*\n)(\| `.*\n)*", lambda found: found[1] + text, after, count=1)
        PAGE.write_text(f"{before}\n## {heading}\n{after}")


def test_controllers(tmp_path: Path) -> None:
    rows = of_controller(tmp_path)
    write("Controllers", rows)
    assert rows_below("Controllers") == rows, HOW_TO_WRITE


def test_nodes() -> None:
    check("Nodes", of_nodes())


def test_proxies() -> None:
    check("Proxies", of_proxy())


def test_vllm_gives_the_connector_the_labels_of_the_page() -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    loggers = Path(found.origin).parent / "v1" / "metrics" / "loggers.py"
    assert f"labelnames = {VLLM_LABELS}".replace("'", '"') in loggers.read_text()
