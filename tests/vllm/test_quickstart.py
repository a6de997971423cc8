"""Tests the first command of the README as a new user runs it: the table, the last line, the exit status."""

import json
import re
import subprocess
from pathlib import Path

from kvferry_launch.node.vllm import KvConnector
from kvferry_launch.paths import REPO
from kvferry_launch.testbed import quickstart_job
from kvferry_launch.testbed.reference import Reference

REQUESTS = 8


def ask_reference(reference: Reference) -> None:
    reference.generations(quickstart_job.prompt_set(REQUESTS).prompts(), quickstart_job.OUTPUT_TOKENS)


def test_the_quickstart_ends_with_equal_tokens_and_a_recovered_request(
        kvferry_connector: KvConnector, reference: Reference, tmp_path: Path) -> None:
    del kvferry_connector, reference
    command = [REPO / "launch" / "quickstart", "--requests", str(REQUESTS), "--json", tmp_path / "table.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.rstrip().splitlines()[-1]
    assert re.fullmatch(r"8 requests, 8 external hits, [1-9]\d* preemptions, 0 wrong tokens, 0 errors", last), last
    table = json.loads((tmp_path / "table.json").read_text())
    assert len(table["rows"]) == 8
    assert table["totals"]["wrong_tokens"] == 0
