#!/usr/bin/env python3
"""Takes the picture of Grafana's dashboard in launch/docs/operations.md, without Grafana: it runs launch/proxy in front
of one prefill and two decode servers of the toy model under traffic, has a real Prometheus scrape them as
launch/examples/monitoring/prometheus.yml says, asks it for the series of every panel of dashboard.json, and draws the
panels in their places. Takes about six minutes. Needs Debian's chromium and prometheus, and Playwright
(launch/requirements-tests.txt).
"""

import argparse
import asyncio
import json
import os
import random
import re
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / folder) for folder in ("launch/lib", "connector/python", "tests/launch/lib")]

import yaml  # noqa: E402
from dashboard_page import page_of  # noqa: E402
from kvferry.tickets import signer_of  # noqa: E402
from kvferry_launch.node.vllm import KVFERRY_CONNECTOR  # noqa: E402
from kvferry_launch.paths import LOGS, MODELS  # noqa: E402
from kvferry_launch.process import ManagedProcess, free_port, stop_all  # noqa: E402
from kvferry_launch.testbed.client import VllmClient  # noqa: E402
from kvferry_launch.testbed.preloaded import vllm_is_preloaded  # noqa: E402
from kvferry_launch.testbed.prompts import PromptSet  # noqa: E402
from proxy_deployment import ProxyDeployment  # noqa: E402
from status_scene import browser  # noqa: E402
from texts import complete_text, text_of  # noqa: E402

MONITORING = REPO / "launch" / "examples" / "monitoring"
PICTURE = REPO / "launch" / "docs" / "pictures" / "dashboard.png"
SERIES = LOGS / "dashboard-series.json"  # what --again draws
SCRAPE_S = 2
WIDTH = 1600
Series = list[tuple[str, list[tuple[float, float]]]]  # label, points


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    return found


def scraped(one: ProxyDeployment, folder: Path) -> Path:
    """Writes the example's prometheus.yml with the addresses of a deployment. Returns the file."""
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    (folder / "alerts.yml").write_text((MONITORING / "alerts.yml").read_text())
    (folder / "kvferry.token").write_text(signer_of(str(one.controller.key_file)).http_token())
    config["global"] = {"scrape_interval": f"{SCRAPE_S}s"}
    addresses: dict[str, list[tuple[str, str, dict[str, str]]]] = {
        "kvferry-controller": [("controller", one.http, {})], "kvferry-proxy": [("proxy", one.url, {})],
        "vllm": [("prefill-0", one.prefill.url, {"role": "prefill"}),
                 *((f"decode-{number}", server.url, {"role": "decode"}) for number, server in enumerate(one.decodes))]}
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [address.removeprefix("http://")], "labels": {"instance": name} | labels}
                                 for name, address, labels in addresses[job["job_name"]]]
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    return file


def ask(url: str, path: str, **query: Any) -> Any:
    with urllib.request.urlopen(f"{url}{path}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
        return json.load(answer)["data"]["result"]


def legend(pattern: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{\s*(\w+)\s*}}", lambda match: labels.get(match[1], ""), pattern).strip()


def series_of(panel: dict[str, Any], url: str, begin: float, end: float) -> Series:
    found: Series = []
    for target in panel.get("targets", []):
        for one in ask(url, "/api/v1/query_range", query=target["expr"], start=begin, end=end, step=SCRAPE_S):
            found.append((legend(target["legendFormat"], one["metric"]),
                          [(when, float(value)) for when, value in one["values"] if value != "NaN"]))
    return [(name, points) for name, points in found if points]


async def send_traffic(url: str, seconds: float) -> None:
    """Clients come and go in waves; some prompts begin alike, and some come again."""
    prompts = PromptSet(seed=91, count=60, tokens_min=150, shared_prefixes=4).prompts()
    dice = random.Random(7)
    end = time.monotonic() + seconds

    async def client(number: int) -> None:
        async with VllmClient(url) as connection:
            while (left := end - time.monotonic()) > 0:
                if number > 1 and int(left / 25) % 2 == 0:  # the third and fourth client rest now and then
                    await asyncio.sleep(1)
                    continue
                await complete_text(connection, text_of(dice.choice(prompts)), dice.randint(10, 60))
                await asyncio.sleep(dice.random())

    await asyncio.gather(*(client(number) for number in range(4)))


def gather(seconds: float) -> dict[str, Any]:
    """Returns the begin, the end and the series of each panel by its id, of a deployment under traffic."""
    with tempfile.TemporaryDirectory() as folder, vllm_is_preloaded():
        one = ProxyDeployment(MODELS / "toy", KVFERRY_CONNECTOR, "dashboard", 2, {"chunk_tokens": 64})
        address = f"127.0.0.1:{free_port()}"
        try:
            one.start()
            prometheus = ManagedProcess(
                "prometheus", ["prometheus", f"--config.file={scraped(one, Path(folder))}",
                               f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"],
                {}, LOGS / "dashboard-prometheus.log")
            prometheus.start()
            one.processes.append(prometheus)
            begin = time.time()
            asyncio.run(send_traffic(one.url, seconds))
            end = time.time()
            return {"begin": begin, "end": end, "panels": {
                panel["id"]: series_of(panel, f"http://{address}", begin, end) for panel in panels()}}
        finally:
            stop_all(reversed(one.processes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", action="store_true", help="draw the series of the last run")
    parser.add_argument("--seconds", type=float, default=210, help="how long traffic is sent")
    options = parser.parse_args()
    os.environ["TZ"] = "UTC"
    if not options.again:
        SERIES.parent.mkdir(parents=True, exist_ok=True)
        SERIES.write_text(json.dumps(gather(options.seconds)))
    shown = json.loads(SERIES.read_text())
    with browser() as chromium:
        page = chromium.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
        page.set_content(page_of(panels(), shown, WIDTH))
        page.screenshot(path=PICTURE, full_page=True)
    print(PICTURE, PICTURE.stat().st_size, "bytes; panels without data:",
          [panel["title"] for panel in panels() if panel["type"] != "row" and not shown["panels"][str(panel["id"])]])


if __name__ == "__main__":
    main()
