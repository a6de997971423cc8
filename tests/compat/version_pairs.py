"""Sends the same prompts through pairs of vLLM servers of each version, and through pairs of unlike versions."""

import argparse
import asyncio
import sys
from itertools import pairwise

from kvferry_launch.node.vllm import KVFERRY_CONNECTOR
from kvferry_launch.paths import LOGS
from kvferry_launch.process import ProcessError
from kvferry_launch.setup import SetupError
from kvferry_launch.setup.steps import ensure_toy_model
from kvferry_launch.testbed.answers import Generation, LoadResult
from kvferry_launch.testbed.pair import Pair, PairSetup, own_cores, pair_load
from kvferry_launch.testbed.prompts import PromptSet
from kvferry_launch.testbed.reference import Reference
from vllm_versions import Engine, engine

VERSIONS = ("0.30", "0.31", "0.32")
PROMPTS = PromptSet(seed=1, count=20)
MAX_TOKENS = 100


def pairs_of(engines: list[Engine]) -> list[tuple[Engine, Engine]]:
    """Returns each version with itself, and each with the next one, both as prefill server."""
    return [*((one, one) for one in engines),
            *(pair for older, newer in pairwise(engines) for pair in ((older, newer), (newer, older)))]


def plain_tokens(one: Engine) -> list[Generation]:
    reference = Reference(ensure_toy_model(), own_cores()[0], python=one.python, version=one.version)
    try:
        return reference.generations(PROMPTS.prompts(), MAX_TOKENS)
    finally:
        reference.stop()


def complaints(result: LoadResult, prompts: list[list[int]]) -> list[str]:
    """Returns what is wrong with the answers of a pair, and what the run did not prove."""
    lines = result.complaints()
    first = [report.admissions[0] for report in result.reports if report is not None]
    handed_over = sum(admission.loaded > 0 for admission in first)
    if handed_over < 0.75 * len(prompts):
        lines.append(f"decode got KV of {handed_over} of {len(prompts)} prompts")
    if result.preemptions == 0:
        lines.append("the decode server never preempted")
    elif result.resumed_loaded_tokens == 0:
        lines.append("no preempted request got its KV back")
    return lines


def run_pair(prefill: Engine, decode: Engine, references: list[Generation]) -> tuple[str, list[str]]:
    """Returns a summary of the load, and the complaints."""
    name = f"compat-{prefill.version}-{decode.version}"
    setup = PairSetup(name, KVFERRY_CONNECTOR, prefill_python=prefill.python, decode_python=decode.python)
    pair = Pair(setup, ensure_toy_model(), LOGS / "compat")
    prompts = PROMPTS.prompts()
    try:
        pair.ensure_running()
        result = asyncio.run(pair_load(pair, prompts, references, MAX_TOKENS))
    except ProcessError as error:
        return "did not start", [str(error)]
    finally:
        pair.stop()
    loaded = sum(admission.loaded for report in result.reports if report for admission in report.admissions)
    return (f"{len(prompts)} requests, {result.preemptions} preempted, {loaded} tokens from KV",
            complaints(result, prompts))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tests/compat/run",
        description="Run a prefill and a decode server of each version of vLLM, and of unlike versions, and compare "
        "all tokens with a plain server of the decode server's version. The versions are installed in build/compat.")
    parser.add_argument("--only", action="append", choices=VERSIONS, metavar="VERSION",
                        help=f"only this version ({', '.join(VERSIONS)}); may be repeated")
    chosen = parser.parse_args(arguments).only or VERSIONS
    try:
        engines = [engine(version) for version in VERSIONS if version in chosen]
        references = {one: plain_tokens(one) for one in engines}
    except (SetupError, ProcessError) as error:
        print(error, file=sys.stderr)
        return 1
    wrong = 0
    pairs = pairs_of(engines)
    for prefill, decode in pairs:
        summary, found = run_pair(prefill, decode, references[decode])
        print(f"prefill {prefill.version}, decode {decode.version}: {summary}", flush=True)
        print("".join(f"  {line}\n" for line in found), end="", flush=True)
        wrong += len(found)
    print(f"{len(engines)} versions, {len(pairs)} pairs, {len(pairs) * PROMPTS.count} requests, {wrong} wrong")
    return 1 if wrong else 0
