"""Begins a stream with the token that the prefill server sampled; the decode server continues the stream. No I/O.

The decode server gets the prompt followed by that token, so it can load the KV of the whole prompt instead of computing
a part of it. The answer must be the same as from a single server. So the proxy uses the prefill server's token only if
all parameters of the request are known to allow this; otherwise the decode server samples the first token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvferry_launch.proxy.bodies import COMPLETIONS, token_ids
from kvferry_launch.proxy.json_bodies import Body

# A token's text has this replacement character if the token ends inside a character, which the next token may complete.
_NOT_DECODED = "\ufffd"


def _any(_: Any) -> bool:
    return True


def _is_one(value: Any) -> bool:
    return type(value) is int and value == 1


# Parameters that allow the decode server to sample the second token as if the first token belonged to the prompt, each
# with a check of its value. Stop strings are not here, because they may begin in the first token. Penalties that count
# only output tokens, and parameters that ask for data about each token, are not here either.
_EXACT: dict[str, Callable[[Any], bool]] = {
    "model": _any, "prompt": _any, "user": _any, "seed": _any, "priority": _any, "cache_salt": _any, "top_p": _any,
    "top_k": _any, "min_p": _any, "ignore_eos": _any, "stop_token_ids": _any, "logit_bias": _any,
    "repetition_penalty": _any, "add_special_tokens": _any, "skip_special_tokens": _any,
    "n": _is_one, "best_of": _is_one,
    "temperature": lambda value: value == 0,
    "max_tokens": lambda value: type(value) is int and value > 1,
    "stream": lambda value: value is True,
    "stream_options": lambda value: isinstance(value, dict) and value.keys() <= {"include_usage"},
}
_NEEDED = ("temperature", "max_tokens", "stream")


@dataclass(frozen=True)
class FirstToken:
    token: int
    text: str
    names: Body  # the answer's id, creation time and model

    def event(self) -> Body:
        choice = {"index": 0, "text": self.text, "logprobs": None, "finish_reason": None, "stop_reason": None}
        return {**self.names, "object": "text_completion", "choices": [choice]}

    def rest_body(self, body: Body) -> Body:
        """Returns the request for the decode server, which asks for the tokens after the first one."""
        return {**body, "prompt": [*body["prompt"], self.token], "max_tokens": body["max_tokens"] - 1}


def keeps_from_prefill(path: str, body: Body) -> str:
    """Returns the reason why the prefill server must not sample the answer's first token, or "" if it may. The reason
    is a label of a metric.
    """
    if path != COMPLETIONS:
        return "path"
    if body.get("stream") is not True:
        return "not streamed"
    if token_ids(path, body) is None:
        return "prompt"
    given = {name: value for name, value in body.items() if value is not None}
    if any(name not in given for name in _NEEDED) or given["temperature"] != 0:
        return "sampling"
    return "" if all(name in _EXACT and _EXACT[name](value) for name, value in given.items()) else "parameter"


def with_token_id(prefill_body: Body) -> Body:
    return {**prefill_body, "return_token_ids": True}


def first_token(answer: Body) -> FirstToken | None:
    """Returns the token in a prefill server's answer. Returns None if the token ends the answer or has no text of its
    own, or if the answer does not have the expected form.
    """
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    if not isinstance(choice, dict) or choice.get("finish_reason") != "length":
        return None
    text, ids = choice.get("text"), choice.get("token_ids")
    if not isinstance(text, str) or not text or _NOT_DECODED in text:
        return None
    if not isinstance(ids, list) or len(ids) != 1 or type(ids[0]) is not int or ids[0] < 0:
        return None
    return FirstToken(ids[0], text, {name: answer[name] for name in ("id", "created", "model") if name in answer})


def counted_as_output(usage: Any) -> Any:
    """Returns `usage` of the decode server with one token moved from the prompt to the output: the first token of the
    answer, which the decode server got as the last token of its prompt.
    """
    if not isinstance(usage, dict):
        return usage
    moved = {"prompt_tokens": -1, "completion_tokens": 1}
    return {name: value + moved.get(name, 0) if type(value) is int else value for name, value in usage.items()}
