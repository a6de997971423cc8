"""Decodes and encodes JSON. Decoding a client's request takes a bounded time, because the proxy serves no other request
meanwhile. No I/O.

In a long request, only the small values and lists of tokens are decoded. Other values stay `Raw`: JSON text whose
syntax was checked, and which is sent to servers unchanged. So 8 MiB of nested lists take 30 ms instead of more than a
second.
"""

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Raw

Body = dict[str, Any]

# Fields whose value is an object with further parameters for vLLM or for a client's library.
NESTED = ("extra_body", "sampling_params", "extra_args", "vllm_xargs")
_TOKENS = ("prompt", "token_ids")  # fields whose value may be a list of tokens

DECODED_MAX = 256 << 10  # limit on the bytes of a request that are decoded besides lists of tokens
TOKENS_MAX = 1 << 20  # the controller's limit for `POST /pair`; longer lists of tokens stay Raw
FIELDS_MAX = 1000
LEVELS_MAX = 4  # limit on the levels of NESTED objects in a request; in a long request, each level is parsed again

_fields = msgspec.json.Decoder(dict[str, Raw])
_token_list = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0)]])
_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError)  # TypeError: the value is not bytes


class Tokens(list[int]):
    """A list that is known to have only integers from 0 on, so that it is not checked again, which would take 40 ms for
    2^20 tokens.
    """


class BodyError(ValueError):
    """The request's body can't be used; the message says why."""


def encode(body: Body) -> bytes:
    return msgspec.json.encode(body)


def json_object(raw: Any) -> Body | None:
    """Decodes `raw`. Returns None if it is not a JSON object. Use this function only for answers of servers and for
    short bodies, because its time is not bounded.
    """
    try:
        body = msgspec.json.decode(raw)
    except _ERRORS:
        return None
    return body if isinstance(body, dict) else None


def client_body(raw: bytes) -> Body:
    """Returns a client's request, with Raw for values that would take long to decode. Errors: BodyError."""
    try:
        body = msgspec.json.decode(raw) if len(raw) <= DECODED_MAX else _long_body(raw)
    except _ERRORS:
        raise BodyError("the body is not a JSON object") from None
    if not isinstance(body, dict):
        raise BodyError("the body is not a JSON object")
    _check_fields(body)
    return body


def _check_fields(body: Body) -> None:
    if len(body) > FIELDS_MAX:
        raise BodyError(f"an object in the body has {len(body)} fields; at most {FIELDS_MAX} are allowed")


def check_level(level: int) -> None:
    """Raises BodyError if a NESTED object lies too deep."""
    if level > LEVELS_MAX:
        raise BodyError(f"objects in the fields {', '.join(NESTED)} have more than {LEVELS_MAX} levels")


def _long_body(raw: bytes) -> Body:
    body = _objects(raw, 0)
    left = DECODED_MAX
    for holder, name, value in sorted(_values(body), key=lambda found: memoryview(found[2]).nbytes):
        left -= memoryview(value).nbytes
        if left >= 0:
            holder[name] = msgspec.json.decode(value)
        elif name in _TOKENS:
            holder[name] = _tokens_or_raw(value)
    return body


def _tokens_or_raw(value: Raw) -> Tokens | Raw:
    if not is_list_of_numbers(value) or bytes(value).count(b",") >= TOKENS_MAX:
        return value
    try:
        return Tokens(_token_list.decode(value))
    except msgspec.ValidationError:
        return value


def _objects(raw: bytes | Raw, level: int) -> Body:
    check_level(level)
    body: Body = dict(_fields.decode(raw))
    _check_fields(body)
    for name in NESTED:
        if name in body and begins_with(body[name], b"{"):
            body[name] = _objects(body[name], level + 1)
    return body


def _values(body: Body) -> Iterator[tuple[Body, str, Raw]]:
    for name, value in body.items():
        if isinstance(value, Raw):
            yield body, name, value
        else:
            yield from _values(value)


def begins_with(value: Raw, mark: bytes) -> bool:
    return memoryview(value)[:1] == mark


def is_list_of_numbers(value: Raw) -> bool:
    """Returns True if the value is a list whose first entry is a number that begins in the value's first 100 bytes."""
    begin = bytes(memoryview(value)[:100])
    first = begin[1:].lstrip()[:1]
    return begin.startswith(b"[") and (first.isdigit() or first == b"-")
