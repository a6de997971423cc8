"""tests/cluster/run: makes the hosts, runs the scenario, judges its result, prints the table."""

import argparse
import contextlib
import dataclasses
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cluster_namespaces
from cluster_namespaces import NamespaceError, Namespaces
from cluster_scenario import HOSTS, Cluster, Options, Phase
from cluster_traffic import Traffic
from kvferry_launch.paths import MODELS
from kvferry_launch.process import ProcessError
from kvferry_launch.testbed.answers import Generation
from kvferry_launch.testbed.log_paths import path_complaints
from kvferry_launch.testbed.pair import own_cores
from kvferry_launch.testbed.prompts import PromptSet
from kvferry_launch.testbed.reference import Reference

# These sets and lengths are the same as in tests/vllm, so that the same reference answers can be used.
PROMPT_SETS = (PromptSet(1, 24), PromptSet(2, 24), PromptSet(1, 24, shared_prefixes=3))
REFERENCE_TOKENS = 100
SLOW_S = 60.0  # must be long, because other servers compute a killed server's requests again, on two shared cores
COLUMNS = ("front door", "phase", "s", "requests", "of vllm bench", "failed", "wrong", "sent again", "slowest s", "")


class _Teller:
    def __init__(self) -> None:
        self._begin = time.monotonic()

    def __call__(self, line: str) -> None:
        print(f"[{time.monotonic() - self._begin:5.0f} s] {line}", flush=True)


def reference_answers(say: _Teller) -> tuple[list[list[int]], list[Generation]]:
    """Returns the plain server's answers, which are computed only once."""
    plain = Reference(MODELS / "toy", own_cores()[0])
    prompts: list[list[int]] = []
    answers: list[Generation] = []
    try:
        for prompt_set in PROMPT_SETS:
            if not plain.cached(prompt_set.prompts(), REFERENCE_TOKENS):
                say(f"the plain server answers {prompt_set}")
            prompts += prompt_set.prompts()
            answers += plain.generations(prompt_set.prompts(), REFERENCE_TOKENS)
    finally:
        plain.stop()
    return prompts, answers


@contextlib.contextmanager
def hosts(local: bool, folder: Path, say: _Teller) -> Iterator[dict[str, Any]]:
    """Yields the keys that make a deployment's YAML use the hosts; no keys if all nodes run on this host."""
    reason = "--local" if local else cluster_namespaces.why_not()
    if reason is not None:
        say(f"LOCAL MODE, all nodes on this host: {reason}")
        yield {}
        return
    folder.mkdir()
    with Namespaces(folder, list(HOSTS)) as namespaces:
        say(f"{len(namespaces.hosts)} hosts: {', '.join(namespaces.hosts)}")
        yield namespaces.settings()


def run(options: argparse.Namespace, folder: Path, say: _Teller) -> dict[str, Any]:
    prompts, answers = reference_answers(say)
    found: dict[str, list[Phase]] = {}
    paths: set[str] = set()
    problems: list[str] = []
    mode = "local"
    with hosts(options.local, folder / "hosts", say) as settings:
        mode = "namespaces" if settings else "local"
        for router in ("proxy",) if options.quick else ("proxy", "vllm-router"):
            own = folder / router
            own.mkdir()
            cluster = Cluster(Options((MODELS / "toy").resolve(), own, router, options.quick, settings, say),
                              lambda url: Traffic(url, prompts, answers))
            try:
                cluster.run()
            except AssertionError as error:
                problems.append(f"{router}: {error}")
            finally:
                cluster.clean_up()
            found[router] = cluster.phases
            paths |= set(cluster.paths())
    if left := cluster_namespaces.ours():
        problems.append(f"namespaces are left: {', '.join(left)}")
    for line in sorted(paths)[:4]:
        say(f"bytes: {line}")
    wanted = "tcp" if mode == "namespaces" else "shm"
    problems += path_complaints(sorted(paths), wanted)
    for router, phases in found.items():
        problems += [f"{router}, {phase.name}: {complaint}" for phase in phases
                     for complaint in phase.complaints + phase.tally.failures]
        problems += [f"{router}, {phase.name}: {phase.tally.wrong} answers with wrong tokens" for phase in phases
                     if phase.tally.wrong]
        problems += [f"{router}, {phase.name}: an answer took {phase.tally.slowest_s:.0f} s, more than {SLOW_S:.0f}"
                     for phase in phases if phase.tally.slowest_s > SLOW_S]
    return {"mode": mode, "paths": sorted(paths), "problems": problems, "phases": [
        {"router": router} | dataclasses.asdict(phase) for router, phases in found.items() for phase in phases]}


def table(result: dict[str, Any]) -> str:
    lines = [COLUMNS]
    for phase in result["phases"]:
        tally = phase["tally"]
        lines.append((phase["router"], phase["name"], f"{phase['seconds']:.0f}", str(tally["requests"]),
                      str(phase["bench_requests"]), str(len(tally["failures"])), str(tally["wrong"]),
                      str(tally["sent_again"]), f"{tally['slowest_s']:.1f}", phase["note"]))
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], tuple("---" for _ in COLUMNS), *lines[1:]))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests/cluster/run",
        description="Two prefill and two decode servers, controller and front door on network namespaces as hosts, "
                    "reached by ssh; nodes are killed, added and drained under traffic. 0 only if every request was "
                    "answered with the right tokens and nothing is left.")
    parser.add_argument("--quick", action="store_true", help="launch/proxy only, and fewer requests")
    parser.add_argument("--local", action="store_true", help="all on this host, without namespaces and ssh")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    parser.add_argument("--keep", action="store_true", help="keep the folder with YAML, logs and vllm bench's results")
    options = parser.parse_args()
    say = _Teller()
    folder = Path(tempfile.mkdtemp(prefix="kvferry-cluster-"))
    if options.keep:
        say(f"all files are in {folder}")
    result: dict[str, Any] = {}
    try:
        result = run(options, folder, say)
    except (NamespaceError, ProcessError) as error:
        raise SystemExit(f"tests/cluster/run: {error}") from error
    finally:
        if not options.keep and not result.get("problems", True):
            shutil.rmtree(folder, ignore_errors=True)
        elif not options.keep:
            say(f"the files are in {folder}")
    print(table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    for problem in result["problems"]:
        print(f"PROBLEM: {problem}")
    answered = sum(phase["tally"]["requests"] + phase["bench_requests"] for phase in result["phases"])
    print(f"{answered} requests, {len(result['problems'])} problems ({result['mode']})")
    return 1 if result["problems"] else 0

