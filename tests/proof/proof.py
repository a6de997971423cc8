"""Proves the connector on real vLLM: runs every configuration, with clients that disconnect and servers that are
killed.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path

import report
import resume
from configurations import CONFIGURATIONS, MAX_TOKENS, Configuration
from families import FAMILIES
from judge import Outcome
from kvferry_launch.paths import LOGS
from kvferry_launch.progress import Step
from kvferry_launch.testbed.answers import Answer, Generation
from kvferry_launch.testbed.pair import own_cores
from kvferry_launch.testbed.preloaded import vllm_is_preloaded
from kvferry_launch.testbed.prompts import PromptSet
from kvferry_launch.testbed.reference import Reference
from load import Load
from proof_deployment import Deployment
from proof_models import Model, kept
from toy_weights import let_servers_generate

LARGE, LARGE_LAYERS = "wide", 32  # the model of --resume, and the layers of its other models
PROMPT_SETS = 3  # the configurations share the prompt sets, so that the plain server answers each prompt only once


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/proof/run", description=__doc__)
    parser.add_argument("--requests", type=int, default=1000, metavar="N", help="over all configurations [1000]")
    parser.add_argument("--seed", type=int, default=1, help="of prompts, aborts and choices [1]")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT",
                        help="only configurations whose name contains it; may be repeated")
    parser.add_argument("--list", action="store_true", help="name the configurations and end")
    parser.add_argument("--resume", nargs="?", const=LARGE, choices=[LARGE, *FAMILIES], metavar="MODEL",
                        help="instead: how long a preempted request waits, beside a plain server, on a model with "
                        f"the KV of one of 8B parameters, or on a family of tests/models with {LARGE_LAYERS} layers, "
                        "for example granite-hybrid")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    return parser.parse_args()


def chosen(only: list[str]) -> list[Configuration]:
    found = [configuration for configuration in CONFIGURATIONS
             if not only or any(text in configuration.name for text in only)]
    if not found:
        sys.exit(f"tests/proof/run: --only {' '.join(only)} fits no configuration; --list names them")
    return found


def prompt_set(configuration: Configuration, index: int, count: int, seed: int) -> PromptSet:
    return PromptSet(seed=100 * seed + index % PROMPT_SETS, count=count,
                     shared_prefixes=configuration.shared_prefixes)


def references(configurations: list[Configuration], models: dict[str, Model], count: int,
               seed: int) -> dict[tuple[str, PromptSet], list[Generation]]:
    """Returns the plain server's answers to all prompts of all configurations."""
    wanted = {(configuration.model, prompt_set(configuration, index, count, seed))
              for index, configuration in enumerate(configurations)}
    found = {}
    for name, model in models.items():
        plain = Reference(model.folder, own_cores()[0], flags=model.flags, env=model.env)
        try:
            for case in sorted((case for case in wanted if case[0] == name), key=str):
                with Step(f"plain server: {count} prompts, model {name}") as step:
                    found[case] = ask(plain, case[1].prompts(), step)
        finally:
            plain.stop()
    return found


def ask(plain: Reference, prompts: list[list[int]], step: Step) -> list[Generation]:
    ended = 0

    def on_answer(_index: int, _answer: Answer) -> None:
        nonlocal ended
        ended += 1
        step.update(ended / len(prompts), f"{ended} answers")

    return plain.generations(prompts, MAX_TOKENS, on_answer, tick=step.update)


async def prove(configuration: Configuration, models: dict[str, Model], prompts: list[list[int]],
                expected: list[Generation], seed: int) -> Outcome:
    deployment = Deployment(configuration, models, LOGS / "proof")
    try:
        with Step(configuration.name) as step:
            step.update(note="servers start")
            await deployment.start()
            load = Load(deployment, prompts, expected, seed)
            outcome = await load.run(lambda ended: step.update(ended / len(prompts), f"{ended} answers"))
            step.done(f"{outcome.right} right, {outcome.aborted} given up, {len(outcome.complaints)} complaints")
    finally:
        await deployment.stop()
    return outcome


def main() -> int:
    flags = arguments()
    if flags.list:
        print("\n".join(configuration.name for configuration in CONFIGURATIONS))
        return 0
    if flags.resume:
        let_servers_generate()
        with Step(f"time to resume, model {flags.resume}"):
            text = resume.table(kept(flags.resume, LARGE_LAYERS),
                                {} if flags.resume == LARGE else {"chunk_tokens": 64}, LOGS / "proof")
        print(text)
        return 0
    configurations = chosen(flags.only)
    if flags.requests < len(configurations):
        sys.exit(f"tests/proof/run: --requests is {flags.requests}; allowed: at least {len(configurations)}, "
                 "one for each configuration")
    let_servers_generate()
    with vllm_is_preloaded():
        return prove_all(flags, configurations)


def prove_all(flags: argparse.Namespace, configurations: list[Configuration]) -> int:
    count = -(-flags.requests // len(configurations))
    models = {name: kept(name) for name in sorted({configuration.model for configuration in configurations})}
    expected = references(configurations, models, count, flags.seed)
    outcomes: list[Outcome] = []
    try:
        for index, configuration in enumerate(configurations):
            prompts = prompt_set(configuration, index, count, flags.seed)
            outcomes.append(asyncio.run(prove(configuration, models, prompts.prompts(),
                                              expected[configuration.model, prompts], flags.seed + index)))
            for complaint in outcomes[-1].complaints:
                print(f"  {complaint}")
    finally:  # prints the results so far, after Ctrl-C too
        if outcomes:
            print("\n" + report.table(outcomes))
            print(report.verdict(outcomes))
        if flags.json:
            flags.json.write_text(json.dumps(report.as_json(outcomes), indent=2) + "\n")
        if flags.markdown:
            flags.markdown.write_text(report.markdown(outcomes) + "\n")
    return 1 if any(outcome.complaints for outcome in outcomes) else 0
