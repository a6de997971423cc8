"""Tests the tenants of launch/proxy: each has a cache_salt that follows from its credential and from nothing else."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from kvferry.tickets import PUSH_TARGET, Signer, signer_of
from kvferry_launch.node.cluster_key import ensure_key
from kvferry_launch.proxy import bodies
from kvferry_launch.proxy.main import options_of_member, parse
from proxy_stand_ins import Cluster, run

ALICE, BOB = "Bearer key-of-alice", "Bearer key-of-bob"
PROMPTS: dict[str, dict[str, Any]] = {
    bodies.COMPLETIONS: {"prompt": "a"}, bodies.CHAT: {"messages": [{"role": "user", "content": "a"}]},
    bodies.GENERATE: {"token_ids": [1, 2]}}


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return options_of_member(str(ensure_key(tmp_path / "cluster.key")), tenant_header="Authorization")


@pytest.mark.parametrize("path", bodies.PATHS)
def test_each_tenant_has_its_salt_on_both_servers_and_at_the_controller(path: str, options: dict[str, Any]) -> None:
    async def test(c: Cluster) -> None:
        for credential in (ALICE, BOB, ALICE):
            assert (await c.post(PROMPTS[path], path, Authorization=credential))[0] == 200
        assert (await c.post(PROMPTS[path] | {"cache_salt": None}, path, Authorization=BOB))[0] == 200
        salts = [[one["cache_salt"] for one in asked]
                 for asked in (c.prefills[0].got, c.decodes[0].got, c.controller.asked)]
        assert salts[0] == salts[1] == salts[2]
        alice, bob, *again = salts[0]
        assert re.fullmatch("kvferry[.][0-9a-f]{32}[.][0-9a-f]{64}", alice)
        assert alice != bob
        assert again == [alice, bob]
        assert {server.headers[1]["Authorization"] for server in (c.prefills[0], c.decodes[0])} == {BOB}

    run(test, **options)


def test_what_is_not_prefilled_has_the_salt_too(options: dict[str, Any]) -> None:
    async def test(c: Cluster) -> None:
        assert (await c.post({"prompt": ["a", "b"]}, Authorization=ALICE))[0] == 200
        c.controller.skip_prefill = True
        assert (await c.post({"prompt": "a"}, Authorization=ALICE))[0] == 200
        assert (await c.post({"prompt": "a", "suffix": "x" * (300 << 10)}, Authorization=ALICE))[0] == 200
        assert len(c.decodes[0].got) == 3
        assert len({body["cache_salt"] for body in c.decodes[0].got}) == 1

    run(test, **options)


def test_a_tenant_separates_its_own_users_and_reaches_no_other_tenant(options: dict[str, Any]) -> None:
    async def test(c: Cluster) -> None:
        await c.post({"prompt": "a"}, Authorization=BOB)
        of_bob = c.decodes[0].got[0]["cache_salt"]
        for salt in (None, "u1", "u2", of_bob, "u1"):
            assert (await c.post({"prompt": "a", "cache_salt": salt}, Authorization=ALICE))[0] == 200
        of_alice = [body["cache_salt"] for body in c.decodes[0].got[1:]]
        assert len(set(of_alice) | {of_bob}) == 5
        assert of_alice[1] == of_alice[4]
        shares = {salt.rpartition(".")[0] for salt in of_alice}
        assert len(shares) == 1, "however many users it has, it is one tenant to the pools"
        assert not of_bob.startswith(shares.pop())
        await c.post({"prompt": "a", "cache_salt": "u1"}, Authorization=BOB)
        assert c.decodes[0].got[-1]["cache_salt"] not in of_alice
        for bad in ("", 7, ["u1"], "x" * 129, "x" * (300 << 10)):
            status, answer = await c.post({"prompt": "a", "cache_salt": bad}, Authorization=ALICE)
            assert status == 400
            assert answer["error"]["message"] == "cache_salt is not a string of 1 to 128 characters"

    run(test, **options)


def test_without_one_credential_a_request_is_refused(options: dict[str, Any]) -> None:
    async def test(c: Cluster) -> None:
        status, answer = await c.post({"prompt": "a"})
        assert status == 401
        assert answer["error"]["message"] == ("the request has no header Authorization, which tells the proxy whose "
                                              "request it is")
        assert (await c.post({"prompt": "a"}, Authorization=" "))[0] == 401
        twice = [("Authorization", ALICE), ("Authorization", BOB)]
        async with c.session.post(c.url + bodies.COMPLETIONS, json={"prompt": "a"}, headers=twice) as refused:
            assert refused.status == 401
            assert "more than one header" in await refused.text()
        assert not any(c.num_got().values())

    run(test, **options)


def test_another_header_may_tell_tenants_apart(tmp_path: Path) -> None:
    async def test(c: Cluster) -> None:
        for tenant in ("1", "2", "1"):
            assert (await c.post({"prompt": "a"}, **{"x-tenant": tenant, "Authorization": ALICE}))[0] == 200
        first, second, again = (body["cache_salt"] for body in c.decodes[0].got)
        assert first == again != second

    run(test, **options_of_member(str(ensure_key(tmp_path / "cluster.key")), tenant_header="X-Tenant"))


def test_salts_follow_from_the_key(tmp_path: Path) -> None:
    async def test(c: Cluster) -> None:
        await c.post({"prompt": "a"}, Authorization=ALICE)
        salts.append(c.decodes[0].got[0]["cache_salt"])

    salts: list[str] = []
    for name in ("one", "other", "one"):
        run(test, **options_of_member(str(ensure_key(tmp_path / name)), tenant_header="Authorization"))
    assert salts[0] == salts[2] != salts[1]


def test_a_running_proxy_follows_a_key_that_is_replaced(tmp_path: Path) -> None:
    file, old, new = tmp_path / "cluster.key", b"o" * 32, b"n" * 32
    file.write_bytes(old)
    file.chmod(0o600)

    async def test(c: Cluster) -> None:
        async def reaches(status_of_old: int, status_of_new: int) -> None:
            deadline = time.monotonic() + 1
            statuses = []
            while statuses != [status_of_old, status_of_new]:
                assert time.monotonic() < deadline, statuses
                statuses = []
                for key in (old, new):
                    headers = {"Authorization": f"Bearer {Signer(key).http_token()}"}
                    async with c.session.get(f"{c.url}/metrics", headers=headers) as answer:
                        statuses.append(answer.status)

        async def signed_with() -> bytes:
            assert (await c.post({"prompt": "a"}, Authorization=ALICE))[0] == 200
            target = c.prefills[0].got[-1]["kv_transfer_params"]["kvferry_push_to"]
            salts.append(c.decodes[0].got[-1]["cache_salt"])
            return next(key for key in (old, new) if Signer(key).refusal(PUSH_TARGET, target) is None)

        await reaches(200, 401)
        assert await signed_with() == old
        file.write_text(f"kvferry cluster keys 1\n{new.hex()}\n{old.hex()}\n")
        await reaches(200, 200)
        assert await signed_with() == new
        assert salts[0] != salts[1]
        c.controller.authorizations.clear()
        file.write_bytes(new)
        await reaches(401, 200)
        assert await signed_with() == new
        assert c.controller.authorizations == {f"Bearer {Signer(new).http_token()}"}

    salts: list[str] = []
    run(test, **options_of_member(str(file), tenant_header="Authorization"))


def test_neither_credential_nor_salt_is_logged_or_exported(
        options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    token = signer_of(str(tmp_path / "cluster.key")).http_token()
    told: list[str] = []

    async def test(c: Cluster) -> None:
        for credential in (ALICE, BOB, ALICE):
            told.append(json.dumps(await c.post({"prompt": "a"}, Authorization=credential)))
        await c.prefills[0].kill()
        told.append(json.dumps(await c.post({"prompt": "a"}, Authorization=ALICE)))
        told.append(json.dumps(await c.post({"prompt": "a", "cache_salt": ""}, Authorization=ALICE)))
        for refused in ({}, {"Authorization": ALICE}, {"Authorization": f"Bearer {token}x"}):
            async with c.session.get(f"{c.url}/metrics", headers=refused) as answer:
                assert answer.status == 401
                told.append(await answer.text())
                assert "kvferry_proxy_requests" not in told[-1], "they would tell what others do"
        async with c.session.get(f"{c.url}/metrics", headers={"Authorization": f"Bearer {token}"}) as answer:
            assert answer.status == 200
            told.append(await answer.text())
        assert 'kvferry_proxy_requests_total{path="/v1/completions",status="200"} 4.0' in told[-1]
        assert (await c.get("/health"))[0] == 200
        salts.update(body["cache_salt"] for body in c.decodes[0].got)

    salts: set[str] = set()
    run(test, **options)
    assert len(salts) == 2
    everything = "\n".join(told + caplog.messages + [repr(options)])
    digits = [part[:8] for salt in salts for part in salt.split(".")[1:]]
    secrets = ["key-of-alice", "key-of-bob", *salts, *digits, str(options["tenants"].secret())]
    assert not [secret for secret in secrets if secret in everything]
    tenants = re.findall(r"POST .* trace [0-9a-f]{32}, tenant ([0-9a-f]{8})[:;]", "\n".join(caplog.messages))
    assert len(tenants) == 5
    assert tenants[0] == tenants[2] == tenants[3] == tenants[4] != tenants[1]


def test_tenants_need_a_key_and_the_name_of_a_header(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^proxy: --tenant-header needs --cluster-key-file, because tenants' salts"):
        options_of_member("", tenant_header="Authorization")
    assert parse(["--tenant-header", "X-Tenant"]).tenant_header == "X-Tenant"
    with pytest.raises(SystemExit):
        parse(["--tenant-header", "Author ization"])
    assert "--tenant-header is 'Author ization', not the name of an HTTP header" in capsys.readouterr().err
