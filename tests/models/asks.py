"""What the features of the table ask an engine, and in which phases an engine with kvferry is asked.

Each function for a feature sends the same requests to every engine, so that answers can be compared.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from families import HIDDEN, VOCAB
from kvferry_launch.testbed.answers import Generation

if TYPE_CHECKING:
    from engine import Engine
    from features import Feature, Phases

LENGTHS = (200, 65, 129, 31, 150)
MAX_TOKENS = 24
LORA_RANK = 8
ABORT_AFTER_STEPS = 6
HAND_OVER = {"do_remote_decode": True}


@dataclass(frozen=True)
class Spoken(Generation):
    """The answer to one request. `values`: logprobs that must be the same but for rounding."""

    values: list[float] = field(default_factory=list)


def prompts_of(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(1, 500) for _ in range(length)] for length in lengths]


Params = list[dict[str, Any]] | None


def sampling(transfer: dict[str, Any] | None = None, **changes: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{
        "temperature": 0.0, "frequency_penalty": 1.5, "max_tokens": MAX_TOKENS, "ignore_eos": True, "detokenize": False,
        "logprobs": 2, "extra_args": {"kv_transfer_params": transfer} if transfer else None} | changes)


def spoken(found: list[Any]) -> list[Spoken]:
    """Returns the answers of all choices of all requests."""
    return [Spoken(list(choice.token_ids), [leads(step) for step in choice.logprobs or []], one.kv_transfer_params)
            for one in found for choice in one.outputs]


def leads(step: dict[int, Any]) -> float:
    """Returns by how much the best token's logprob is above the second best one's."""
    best = sorted(-entry.logprob for entry in step.values())[:2]
    return float(best[1] - best[0]) if len(best) == 2 else 0.0


def values(found: list[Any], step_of: Callable[[Any], list[Any]]) -> list[Spoken]:
    return [Spoken(one.tokens, one.margins, None, [round(entry.logprob, 4) for step in step_of(request) if step
                                                   for _, entry in sorted(step.items())])
            for one, request in zip(spoken(found), found, strict=True)]


# ---- a function for each feature ----
def greedy(engine: "Engine", params: Params = None, lengths: Sequence[int] = LENGTHS, seed: int = 1, **changes: Any
           ) -> list[Spoken]:
    return spoken(engine.generate(prompts_of(lengths, seed), [
        sampling(one, **changes) for one in params or [None] * len(lengths)]))


def one_by_one(engine: "Engine", params: Params = None, **changes: Any) -> list[Spoken]:
    """Sends the next request when the one before has ended: 16-bit kernels round otherwise when other requests share a
    step, and a lookup that is answered late moves a request to another step. None finds KV in vLLM's own prefix cache.
    """
    found: list[Spoken] = []
    prompts = prompts_of(LENGTHS)
    for prompt, one in zip(prompts, params or [None] * len(prompts), strict=True):
        engine.reset()
        found += spoken(engine.generate([prompt], [sampling(one, **changes)]))
    return found


def other_prompts(engine: "Engine", params: Params = None, **changes: Any) -> list[Spoken]:
    return greedy(engine, params, seed=2, **changes)


def changed(engine: "Engine", _: Params = None) -> list[Spoken]:
    """Asks with the prompts of greedy(), each with another token in one place that is within every window."""
    prompts = prompts_of(LENGTHS)
    for prompt in prompts:
        prompt[max(5, len(prompt) - 33)] = 505
    return spoken(engine.generate(prompts, [sampling()] * len(prompts)))


def long(engine: "Engine", params: Params = None) -> list[Spoken]:
    return greedy(engine, params, LONG)


def crowd(engine: "Engine", params: Params = None) -> list[Spoken]:
    return greedy(engine, params, CROWD, max_tokens=60)


LONG = (1500, 900)
CROWD = (200, 70, 150, 80, 120, 75, 160, 65)


def several(engine: "Engine", _: Params = None) -> list[Spoken]:
    return spoken(engine.generate(prompts_of((200, 129), 3), [
        sampling(n=3, temperature=0.8, seed=seed) for seed in range(2)]))


def sampled(engine: "Engine", _: Params = None) -> list[Spoken]:
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0.8, "seed": 5, "top_p": 0.9, "top_k": 20}, {"repetition_penalty": 1.3, "min_tokens": 4},
        {"presence_penalty": 0.5, "stop_token_ids": list(range(100, 140))}, {"logit_bias": {7: 3.0}},
        {"allowed_token_ids": list(range(50, 300))})
    return spoken(engine.generate(prompts_of(LENGTHS, 4), [sampling(**kind) for kind in kinds]))


def with_logprobs(engine: "Engine", _: Params = None) -> list[Spoken]:
    found = engine.generate(prompts_of(LENGTHS, 5), [sampling(logprobs=5)] * len(LENGTHS))
    return values(found, lambda request: request.outputs[0].logprobs)


def with_prompt_logprobs(engine: "Engine", _: Params = None) -> list[Spoken]:
    found = engine.generate(prompts_of(LENGTHS, 6), [sampling(prompt_logprobs=2)] * len(LENGTHS))
    return values(found, lambda request: request.prompt_logprobs)


def structured(engine: "Engine", _: Params = None) -> list[Spoken]:
    from vllm.sampling_params import StructuredOutputsParams

    found = spoken(engine.generate(prompts_of(LENGTHS, 7), [
        sampling(structured_outputs=StructuredOutputsParams(regex="(w1[0-9]*)+"), ignore_eos=False)
        for _ in LENGTHS]))
    stray = [token for one in found for token in one.tokens if str(token)[0] != "1" and token != VOCAB - 1]
    assert not stray, f"the answer is not as structured: {stray}"
    return found


def beams(engine: "Engine", _: Params = None) -> list[Spoken]:
    from vllm.sampling_params import BeamSearchParams

    lengths = (200, 129)
    found = engine.llm.beam_search(engine.inputs(prompts_of(lengths, 8)),
                                   BeamSearchParams(beam_width=2, max_tokens=8, ignore_eos=True))
    chosen = [list(one.sequences[0].tokens)[length:] for one, length in zip(found, lengths, strict=True)]
    return [Spoken(tokens, [1.0] * len(tokens)) for tokens in chosen]


def salted(engine: "Engine", params: Params = None, salt: str = "one") -> list[Spoken]:
    return spoken(engine.generate(prompts_of(LENGTHS, 9), [sampling(one) for one in params or [None] * len(LENGTHS)],
                                  cache_salt=salt))


def some_aborted(engine: "Engine", _: Params = None) -> list[Spoken]:
    """Aborts every other request after some steps; returns the answers to the others."""
    prompts = prompts_of((200, 180, 129, 150, 31, 170, 65, 140), 10)
    return spoken(engine.generate_and_abort(prompts, sampling(), ABORT_AFTER_STEPS))


def after_sleep(engine: "Engine", _: Params = None) -> list[Spoken]:
    return spoken(engine.generate(prompts_of(LENGTHS, 11), [sampling()] * len(LENGTHS)))


def adapted(engine: "Engine", _: Params = None) -> list[Spoken]:
    """Asks without an adapter, then with each of two adapters."""
    prompts = prompts_of((200, 129), 12)
    requests = [None, engine.adapter(1), engine.adapter(2)]
    answers = [spoken(engine.generate(prompts, [sampling()] * 2, lora_request=one)) for one in requests]
    assert answers[0] != answers[1] != answers[2] != answers[0], "the adapters change no tokens"
    return [one for found in answers for one in found]


def embedded(engine: "Engine", _: Params = None) -> list[Spoken]:
    import torch

    dice = torch.Generator().manual_seed(13)
    inputs = [{"prompt_embeds": torch.randn((length, HIDDEN), generator=dice)} for length in LENGTHS]
    return spoken(engine.llm.generate(inputs, [sampling()] * len(LENGTHS), use_tqdm=False))


def pictured(engine: "Engine", _: Params = None) -> list[Spoken]:
    """Asks twice with the same text, the second time with other images."""
    lengths = (200, 150)
    answers = [spoken(engine.generate(prompts_of(lengths, 14), [sampling()] * 2, images=first)) for first in (100, 200)]
    assert all(one.tokens != other.tokens for one, other in zip(*answers, strict=True)), "images change no tokens"
    return [one for found in answers for one in found]


# ---- the phases of an engine with kvferry, each after vLLM's own prefix cache was emptied ----
def whole_chunks(engine: "Engine", lengths: Sequence[int]) -> int:
    return sum((length - 1) // engine.chunk * engine.chunk for length in lengths)


def computed_and_loaded(engine: "Engine", feature: "Feature") -> "Phases":
    # of prompts with prompt logprobs or embeddings, vLLM computes every token
    expected = 0 if feature.ask in (with_prompt_logprobs, embedded) else whole_chunks(engine, (200,))
    return {"computed": engine.phase(lambda: feature.ask(engine, None)),
            "loaded": engine.phase(lambda: feature.ask(engine, None), expected)}


def also_handed_over(engine: "Engine", feature: "Feature") -> "Phases":
    """Loads whole chunks, and then, by a hand-over, all tokens of the prompts except the last one. If chunks are whole
    blocks, loads all blocks before the last token.
    """
    ask: Callable[..., list[Spoken]] = feature.ask
    found = {"computed": engine.phase(lambda: ask(engine)),
             "loaded": engine.phase(lambda: ask(engine), whole_chunks(engine, LENGTHS))}
    engine.reset()
    params = [one.kv_transfer_params or {} for one in ask(engine, [HAND_OVER] * len(LENGTHS), max_tokens=1)]
    return found | {"handed over": handed_over(engine, params, ask)}


def handed_over(engine: "Engine", params: list[dict[str, Any]], ask: Callable[..., list[Spoken]] = greedy
                ) -> dict[str, Any]:
    expected = sum((length - 1) // engine.hit_tokens * engine.hit_tokens for length in LENGTHS)
    return engine.phase(lambda: ask(engine, params), expected)


def preempted(engine: "Engine", feature: "Feature") -> "Phases":
    found = computed_and_loaded(engine, feature)
    assert any(one["preempted"] for one in found.values()), "no request was preempted"
    assert any(one["resumed"] for one in found.values()), "no preempted request got KV back"
    return found


def salted_apart(engine: "Engine", _: "Feature") -> "Phases":
    return {"computed": engine.phase(lambda: salted(engine)),
            "other salt": engine.phase(lambda: salted(engine, None, "other"), 0, at_most=0),
            "loaded": engine.phase(lambda: salted(engine), whole_chunks(engine, LENGTHS))}


def pictured_apart(engine: "Engine", _: "Feature") -> "Phases":
    """The first chunk of a prompt ends in its image, so the text alone would be found again with another image."""
    return {"computed": engine.phase(lambda: pictured(engine), 0, at_most=0),
            "loaded": engine.phase(lambda: pictured(engine), 2 * whole_chunks(engine, (200, 150)))}


def never_shared(engine: "Engine", _: "Feature") -> "Phases":
    return {name: engine.phase(lambda: pictured(engine), 0, at_most=0) for name in ("computed", "again")}


def slept_and_reset(engine: "Engine", _: "Feature") -> "Phases":
    found = {"computed": engine.phase(lambda: after_sleep(engine))}
    engine.llm.sleep(level=1)  # resets the connector too, since weights may change in between
    engine.llm.wake_up()
    found |= {"slept": engine.phase(lambda: after_sleep(engine), 0, at_most=0),
              "loaded": engine.phase(lambda: after_sleep(engine), whole_chunks(engine, LENGTHS))}
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    return found | {"reset": engine.phase(lambda: after_sleep(engine), 0, at_most=0)}


def as_json(answers: list[Spoken]) -> list[dict[str, Any]]:
    return [asdict(one) | {"kv_transfer_params": None} for one in answers]
