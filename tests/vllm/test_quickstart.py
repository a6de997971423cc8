"""Tests the first commands that a new user runs: launch/quickstart, then the deployment of its page that stays."""

import json
import re
import subprocess
from pathlib import Path

import yaml
from deployment import Deployment, eventually
from documents import fenced_commands
from kvferry_launch.node.vllm import KvConnector
from kvferry_launch.paths import REPO
from kvferry_launch.process import free_port
from kvferry_launch.testbed import quickstart_job
from kvferry_launch.testbed.reference import Reference
from real_deployment import READY_WITHIN_S, assert_answers_are_right, end, expected

REQUESTS = 8
PAGE = (REPO / "launch" / "docs" / "quickstart.md").read_text()


def ask_reference(reference: Reference) -> None:
    reference.generations(quickstart_job.prompt_set(REQUESTS).prompts(), quickstart_job.OUTPUT_TOKENS)
    expected(reference)


def test_the_quickstart_ends_with_equal_tokens_and_a_recovered_request(
        kvferry_connector: KvConnector, reference: Reference, tmp_path: Path) -> None:
    del kvferry_connector, reference
    # tests/run may still build the C++ tests; the quickstart would wait for that, which is not its time.
    subprocess.run([REPO / "launch" / "setup"], capture_output=True, check=True)
    command = [REPO / "launch" / "quickstart", "--requests", str(REQUESTS), "--json", tmp_path / "table.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.rstrip().splitlines()[-1]
    assert re.fullmatch(r"8 requests, 8 external hits, [1-9]\d* preemptions, 0 wrong tokens, 0 errors", last), last
    table = json.loads((tmp_path / "table.json").read_text())
    assert len(table["rows"]) == 8
    assert table["totals"]["wrong_tokens"] == 0


def without_numbers(line: str) -> str:
    return re.sub(r"[0-9a-f]*\d[0-9a-f.:,-]*", "#", line)


def test_the_deployment_of_the_page_answers_as_the_page_shows_and_as_the_plain_server_and_ends_clean(
        kvferry_connector: KvConnector, reference: Reference, tmp_path: Path) -> None:
    del kvferry_connector
    up = next(line for line in fenced_commands(PAGE) if line.endswith("local.yaml"))
    curl = next(line for line in fenced_commands(PAGE) if line.startswith("curl "))
    example = yaml.safe_load((REPO / up.split()[-1]).read_text())
    port = free_port()
    assert f":{example['router']['port']}/" in curl
    example["router"]["port"] = port
    deployment = Deployment(tmp_path, **example, vllm=[])
    try:
        deployment.start_ready(READY_WITHIN_S)
        assert f"ready: http://127.0.0.1:{port}\n" in deployment.text()
        router_log = tmp_path / "run" / "demo" / "logs" / "router.log"
        # The router looks at the servers' health pages itself, up to a second after they are told to be ready.
        eventually(lambda: router_log.read_text().count(" takes requests") >= 2, router_log.read_text)
        done = subprocess.run(["bash", "-c", curl.replace(":8000", f":{port}")], capture_output=True, text=True,
                              timeout=60, check=True)
        log = router_log.read_text()
        assert_answers_are_right(deployment, expected(reference))
        end(deployment)
    finally:
        deployment.clean_up()
    line, = [line for line in log.splitlines() if "POST" in line]
    print(done.stdout, line, sep="\n")
    answer, = re.findall(r"```json\n(.*?)\n```", PAGE, re.DOTALL)
    shown, said = json.loads(answer), json.loads(done.stdout)
    assert said["usage"].items() >= shown["usage"].items()
    assert [choice["finish_reason"] for choice in said["choices"]] == ["length"]
    assert len(said["choices"][0]["text"].split()) == len(shown["choices"][0]["text"].split())
    wanted, = re.findall(r"```\n(\S+ \S+ INFO POST .*?)\n```", PAGE, re.DOTALL)
    assert without_numbers(line) == without_numbers(" ".join(wanted.split()))
