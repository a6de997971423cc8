"""Reads the body of a client's request, and makes the bodies of the requests to the prefill and the decode server.

This module does no I/O. Bodies are made of Python objects, except for `Raw` values (see json_bodies).
"""

from typing import Any

from msgspec import Raw

from kvferry_launch.proxy.json_bodies import NESTED, Body, Tokens, begins_with, check_level, is_list_of_numbers

REMOTE_DECODE: Body = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""kv_transfer_params that routers send to a prefill server."""

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"
PATHS = (COMPLETIONS, CHAT, GENERATE)

# Fields of a chat request on which the prompt's tokens depend, and which /tokenize takes by the same names.
_CHAT_FIELDS = ("model", "messages", "add_generation_prompt", "continue_final_message", "add_special_tokens",
                "chat_template", "chat_template_kwargs", "mm_processor_kwargs", "tools")
# Fields that are removed from the request to the prefill server and from a preparation, because a request for one token
# of output does not need them or must not have them. None of these fields changes the prompt's KV.
_NOT_FOR_PREFILL = ("stream_options", "min_tokens", "best_of", "logprobs", "top_logprobs", "prompt_logprobs",
                    "response_format", "structured_outputs", "echo")


_TRANSFER_PARAMS = ("kv_transfer_params", "ec_transfer_params")
_REPORT = "kvferry_report"


def from_client(body: Body, level: int = 0) -> tuple[Body, bool]:
    """Returns a client's request without the parameters that only routers may set, and whether any was removed.

    kv_transfer_params name addresses to which servers connect, so only their field `kvferry_report` is kept. `level`:
    number of objects around `body`. Errors: BodyError.
    """
    check_level(level)
    made: Body = {}
    removed = False
    for name, value in body.items():
        if name in _TRANSFER_PARAMS:
            params = value if isinstance(value, dict) else {}
            wants_report = name == "kv_transfer_params" and bool(params.get(_REPORT))
            if wants_report:
                made[name] = {_REPORT: True}
            removed = removed or (bool(value) and not (wants_report and params.keys() == {_REPORT}))
        elif name.startswith("kvferry_"):
            removed = True
        elif name in NESTED and isinstance(value, dict):
            made[name], inner = from_client(value, level + 1)
            removed = removed or inner
        else:
            made[name] = value
    return made, removed


def token_ids(path: str, body: Body) -> list[int] | None:
    """Returns the prompt's tokens, or None if the prompt is not a list of up to TOKENS_MAX (json_bodies.py) tokens."""
    ids = body.get("token_ids") if path == GENERATE else body.get("prompt") if path == COMPLETIONS else None
    if isinstance(ids, Tokens):
        return ids
    return ids if isinstance(ids, list) and set(map(type, ids)) == {int} and min(ids) >= 0 else None


def is_batch(path: str, body: Body) -> bool:
    """Returns True if the request has a list of prompts. A prefill server can hand over the KV of one prompt only."""
    prompt = body.get("prompt")
    if isinstance(prompt, Raw):
        return path == COMPLETIONS and begins_with(prompt, b"[") and not is_list_of_numbers(prompt)
    return path == COMPLETIONS and isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int | float)


def tokenize_body(path: str, body: Body) -> Body | None:
    """Returns the body for /tokenize, or None if the request has no text to tokenize."""
    if path == CHAT and _is(body.get("messages"), list, b"["):
        return {name: body[name] for name in _CHAT_FIELDS if name in body}
    if path == COMPLETIONS and _is(body.get("prompt"), str, b'"'):
        return {name: body[name] for name in ("model", "prompt", "add_special_tokens") if name in body}
    return None


def _is(value: Any, kind: type, mark: bytes) -> bool:
    return begins_with(value, mark) if isinstance(value, Raw) else isinstance(value, kind)


def with_tokens(path: str, body: Body, tokens: list[int] | None) -> Body:
    """Returns a completion request with `tokens` in place of the prompt's text, so that no server tokenizes the text
    again. Requests with `echo`, without a text or to other paths are returned unchanged, and so are all requests if
    `tokens` is None.
    """
    if path != COMPLETIONS or tokens is None or not _is(body.get("prompt"), str, b'"') or body.get("echo"):
        return body
    return {**body, "prompt": tokens}


def prefill_body(path: str, body: Body, push_to: Body | None, traceparent: str) -> Body:
    """Returns the body of the request to the prefill server: the same prompt with one token of output.

    `traceparent` is also a header of the request, but a vLLM that exports no spans drops the header.
    """
    params = REMOTE_DECODE | {"kvferry_traceparent": traceparent} | ({"kvferry_push_to": push_to} if push_to else {})
    made = {name: value for name, value in body.items() if name not in _NOT_FOR_PREFILL}
    made |= {"stream": False, "kv_transfer_params": params}
    if path == GENERATE:
        sampling = body.get("sampling_params")
        sampling = dict(sampling) if isinstance(sampling, dict) else {}
        for name in _NOT_FOR_PREFILL:
            sampling.pop(name, None)
        made["sampling_params"] = sampling | {"max_tokens": 1, "n": 1}
        return made
    made |= {"max_tokens": 1, "n": 1}
    if path == CHAT:
        made["max_completion_tokens"] = 1
    return made


def preparation_body(body: Body, push_to: Body) -> Body:
    """Returns the body of the request that lets the decode server load the KV of a completion's prompt while the
    prefill server computes this KV and pushes it to `push_to`.

    The request's prompt has one more token, which stands for the first token of the answer, because the server loads
    the KV of all tokens but the last one.
    """
    made = {name: value for name, value in body.items() if name not in _NOT_FOR_PREFILL}
    return made | {"prompt": [*body["prompt"], body["prompt"][-1]], "stream": False, "max_tokens": 1, "n": 1,
                   "kv_transfer_params": {"kvferry_prepare": push_to}}


def decode_body(body: Body, handed_over: Body | None) -> Body:
    """Returns the body of the request to the decode server. `body`: the client's request after from_client() and all
    other changes but this one.

    `handed_over`: kv_transfer_params from the prefill server's answer, which name the prompt's KV; None if no prefill
    server was used or its answer has none.
    """
    if not handed_over:
        return body
    return {**body, "kv_transfer_params": {**body.get("kv_transfer_params", {}), **handed_over}}
