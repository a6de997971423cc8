"""Tests how launch/proxy reads bodies: long ones are not decoded, and servers get what the client sent all the same."""

import json
from typing import Any

import pytest
from kvferry_launch.proxy import bodies, json_bodies
from kvferry_launch.proxy.json_bodies import DECODED_MAX, FIELDS_MAX, BodyError, Raw, client_body
from proxy_stand_ins import TOKENS, Cluster, run

LONG = DECODED_MAX + 1
BODY_MAX = 8 << 20


def repeated(entry: str, size: int = BODY_MAX - 100) -> str:
    """Returns a list of equal entries, in JSON, of `size` bytes at most."""
    return "[" + ",".join([entry] * (size // (len(entry) + 1))) + "]"


# ---- decoding ----
@pytest.mark.parametrize("entry", ["[]", "{}", '{"a":1}', "1.25", '"a"', "null", '["a"]', "[[1]]", "1", "true"])
@pytest.mark.parametrize("name", ["prompt", "messages", "logit_bias"])
def test_of_a_long_body_little_is_decoded(name: str, entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, lengths = json_bodies.msgspec.json.decode, []

    def counting(raw: Any) -> Any:
        lengths.append(memoryview(raw).nbytes)
        return decode(raw)

    monkeypatch.setattr(json_bodies.msgspec.json, "decode", counting)
    value = repeated(entry)
    body = client_body(f'{{"model": "m", "{name}": {value}, "stop": {repeated("[]", 1000)}}}'.encode())
    assert body["model"] == "m"
    assert len(body["stop"]) == 333
    assert isinstance(body[name], Raw)
    assert bytes(body[name]) == value.encode()
    assert sum(lengths) <= DECODED_MAX
    assert json_bodies.encode({"x": body[name]}) == b'{"x":' + value.encode() + b"}"


def test_many_values_are_decoded_up_to_a_limit_the_smallest_first() -> None:
    sent = {f"field{number}": "x" * 1000 * number for number in range(60)}
    body = client_body(json.dumps(sent).encode())
    are_raw = [isinstance(value, Raw) for value in body.values()]
    assert are_raw == sorted(are_raw)
    assert any(are_raw) and not all(are_raw)
    assert list(body) == list(sent)
    assert json.loads(json_bodies.encode(body)) == sent


def test_a_long_list_of_tokens_is_decoded_up_to_the_controllers_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = list(range(100_000))
    for name, path in (("prompt", bodies.COMPLETIONS), ("token_ids", bodies.GENERATE)):
        assert bodies.token_ids(path, client_body(json.dumps({name: tokens}).encode())) == tokens
        for wrong in (-1, True, 1.0, "1", None):
            assert bodies.token_ids(path, client_body(json.dumps({name: [*tokens, wrong]}).encode())) is None
    monkeypatch.setattr(json_bodies, "TOKENS_MAX", len(tokens) - 1)
    body = client_body(json.dumps({"prompt": tokens}).encode())
    assert bodies.token_ids(bodies.COMPLETIONS, body) is None
    assert not bodies.is_batch(bodies.COMPLETIONS, body)


@pytest.mark.parametrize("prompt", [[[1, 2]] * 100_000, ["ab"] * 100_000, [1.5] * 100_000, "ab" * 200_000])
def test_a_long_prompt_is_taken_for_what_a_short_one_is(prompt: Any) -> None:
    long, short = (client_body(json.dumps({"prompt": one}).encode()) for one in (prompt, prompt[:2]))
    assert isinstance(long["prompt"], Raw)
    is_batch = isinstance(prompt[0], list) or prompt[0] == "ab"
    for body in (long, short):
        assert bodies.token_ids(bodies.COMPLETIONS, body) is None
        assert (bodies.tokenize_body(bodies.COMPLETIONS, body) is not None) == isinstance(prompt, str)
        assert bodies.is_batch(bodies.COMPLETIONS, body) == is_batch


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("raw", [
    b"", b"[1]", b"3", b"null", b'{"a":NaN}', b'{"a":Infinity}', b'{"a":01}', b'{"a":1} x', b'{"a":1', b'{"a":1e999}',
    b"{'a':1}", b'{"a":"\\ud800"}', b'{"a":"\xff"}', b'\xef\xbb\xbf{"a":1}', b'{"a":' + b"[" * 100_000,
    b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}", b'{"a":"\x01"}', b'{"a":tru}', b'{1:2}'])
def test_what_is_no_json_object_is_refused(raw: bytes, is_long: bool) -> None:
    padding = b'{"b":"' + b"x" * LONG + b'",' if is_long else b"{"
    with pytest.raises(BodyError, match=r"^the body is not a JSON object$"):
        client_body(padding + raw[1:] if raw.startswith(b"{") else raw + b" " * LONG * is_long)


@pytest.mark.parametrize("is_long", [False, True])
def test_the_number_of_fields_and_levels_is_bounded(is_long: bool) -> None:
    more = {"a": "x" * LONG * is_long}
    fields = {str(number): 1 for number in range(FIELDS_MAX)}
    bodies.from_client(client_body(json.dumps(fields).encode()))
    with pytest.raises(BodyError, match="1001 fields; at most 1000 are allowed"):
        client_body(json.dumps(fields | more).encode())
    deep: dict[str, Any] = {}
    for level in range(6):
        if level == 4:
            bodies.from_client(client_body(json.dumps(deep | more).encode()))
        deep = {"extra_body": deep}
    with pytest.raises(BodyError, match="have more than 4 levels"):
        bodies.from_client(client_body(json.dumps(deep | more).encode()))


# ---- what servers get ----
LONG_BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (bodies.COMPLETIONS, {"prompt": "caf\u00e9 \U0001f600" * 100_000}),
    "tokens": (bodies.COMPLETIONS, {"prompt": list(range(100_000))}),
    "batch": (bodies.COMPLETIONS, {"prompt": ["some text"] * 100_000}),
    "tokens and a seed": (bodies.GENERATE, {"token_ids": list(range(100_000)), "sampling_params": {"seed": 3}}),
    "chat": (bodies.CHAT, {"messages": [{"role": "user", "content": "hi" * 100}] * 5000, "temperature": 0.25}),
    "logit_bias": (bodies.COMPLETIONS, {"prompt": "a", "logit_bias": {str(token): 1.5 for token in range(50_000)}}),
}


@pytest.mark.parametrize("kind", LONG_BODIES)
def test_servers_get_long_bodies_unchanged(kind: str) -> None:
    path, sent = LONG_BODIES[kind]

    async def test(c: Cluster) -> None:
        assert (await c.post({**sent, "max_tokens": 3}, path))[0] == 200
        (decode,) = c.decodes[0].got
        is_text = path == bodies.COMPLETIONS and isinstance(sent["prompt"], str)
        handed_over = {} if kind == "batch" else {"kv_transfer_params": {"do_remote_prefill": True,
                                                                        "remote_host": "p0"}}
        assert decode == {**sent, "max_tokens": 3, **handed_over} | ({"prompt": TOKENS} if is_text else {})
        assert len(c.prefills[0].got) == (kind != "batch")
        for prefill in c.prefills[0].got:
            assert {name: prefill[name] for name in sent} | {"sampling_params": 0} == {
                **sent, "sampling_params": 0} | ({"prompt": TOKENS} if is_text else {})

    run(test)


@pytest.mark.parametrize("path", bodies.PATHS)
def test_no_address_is_hidden_in_a_long_body(path: str) -> None:
    forged = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.66"}}
    padding = "x" * LONG
    prompt = {"prompt": "a", "messages": [], "token_ids": [1]}
    forgeries: list[dict[str, Any]] = [
        forged | {"padding": padding}, {"kv_transfer_params": forged["kv_transfer_params"] | {"padding": padding}},
        {"extra_body": forged | {"padding": padding}}, {"extra_body": {"vllm_xargs": forged}, "padding": padding},
        {"sampling_params": {"extra_args": forged | {"padding": padding}}}, {"kvferry_x": padding + "10.0.0.66"},
        {"ec_transfer_params": {"x": "10.0.0.66", "padding": padding}}]

    async def test(c: Cluster) -> None:
        for forgery in forgeries:
            assert (await c.post(json.dumps(prompt | forgery).encode(), path))[0] == 200
        twice = json.dumps(prompt | {"extra_body": {}, "padding": padding, "extra_body_": forged})
        assert (await c.post(twice.replace("extra_body_", "extra_body").encode(), path))[0] == 200
        got = [body for server in c.controller.servers for body in server.got]
        assert len(got) == 2 * len(forgeries) + 2
        assert "10.0.0.66" not in json.dumps(got)
        assert await c.metric("kvferry_proxy_stripped_params_total") == len(forgeries) + 1

    run(test)


def test_a_prompt_as_long_as_the_limit_is_tokenized() -> None:
    async def test(c: Cluster) -> None:
        assert (await c.post({"prompt": "a" * BODY_MAX}))[0] == 413
        assert (await c.post({"prompt": "a" * (BODY_MAX - 1000)}))[0] == 200
        assert c.decodes[0].got[0]["prompt"] == TOKENS

    run(test)
