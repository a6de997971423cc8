"""Members with keys of their own against real processes: what each role may do, and what a revoked member still can."""

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from handing_deployment import LOADED, REVOKED_WITHIN_S, Deployment, Process, Traffic, kill
from kvferry.tickets import HANDOFF, signer_of
from kvferry_launch.paths import KVFERRY


@pytest.fixture(scope="module", params=["tcp", "shm", "ucx"])
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    pytest.importorskip("kvferry._core", reason="the Python module is not built")
    with contextlib.ExitStack() as ended:
        yield Deployment(tmp_path_factory.mktemp("members"), ended, members=True, path=request.param)


def key_of(deployment: Deployment, name: str) -> Path:
    return deployment.folder / name / f"{name}.key"


def test_each_role_does_what_it_may_and_nothing_else(deployment: Deployment) -> None:
    for role in ("reader", "admin"):
        deployment.run(f"kvferry keygen --add-node {role} --role {role} cluster.key")
    deployment.copy_to(deployment.copies)
    time.sleep(REVOKED_WITHIN_S)  # as long the controller may need to see the new list
    reader, admin = (deployment.folder / f"{role}.key" for role in ("reader", "admin"))
    worker, whole = key_of(deployment, "other"), deployment.copies[0]
    for key_file in (reader, worker, admin, whole):
        assert {node["engine_id"] for node in json.loads(deployment.status(key_file).stdout)["nodes"]} == {
            "prefill", "decode", "other"}
        assert deployment.http_status(key_file) == 200
        printed = subprocess.run([KVFERRY, "token", "--cluster-key-file", key_file], capture_output=True, text=True)
        assert printed.stdout.strip() == signer_of(str(key_file)).http_token()
    for command in ("drain decode --no-wait --force", "drain decode --undo", "clear", "quota 100", "quota --none",
                    "purge --producer other --timeout 20"):
        for key_file, role in ((reader, "reader"), (worker, "worker")):
            refused = deployment.ask(command, key_file)
            assert refused.returncode == 1
            verb = "undrain" if "--undo" in command else command.split()[0]
            assert f"the command '{verb}' needs a key of the role admin, but the sender has" in refused.stderr
            assert f"(role {role})" in refused.stderr
        done = deployment.ask(command, admin)
        assert done.returncode == 0, done.stderr
    own = deployment.ask("drain other --force --timeout 20", worker)
    assert own.returncode == 0, own.stderr
    assert "can be stopped" in own.stdout
    assert deployment.ask("drain other --undo", worker).returncode == 1, "only an admin takes a drain back"
    assert deployment.ask("drain other --undo", admin).returncode == 0
    assert deployment.http_status(reader, "/register", b"{}") == 403
    assert deployment.http_status(worker, "/register", b"{}") == 403
    assert deployment.http_status(admin, "/register", b"{}") == 400  # it may, but this says nothing
    counters = json.loads(deployment.status(whole).stdout)["counters"]
    assert counters["messages_forbidden"] == 13


def test_a_purge_finds_what_a_member_gave_under_another_address(deployment: Deployment) -> None:
    deployment.run("kvferry keygen --add-node bad cluster.key")
    key_file = deployment.folder / "bad" / "bad.key"
    key_file.parent.mkdir()
    deployment.copy_to([*deployment.copies, key_file])
    time.sleep(REVOKED_WITHIN_S)

    def dropped(whom: str) -> dict[str, int]:
        done = deployment.ask(f"purge {whom} --json --timeout 20", deployment.copies[0])
        assert done.returncode == 0, done.stderr
        return {name: node["chunks"] for name, node in json.loads(done.stdout)["nodes"].items()}

    with contextlib.ExitStack() as ended:
        for name in ("bad", "bad.hidden"):
            hidden = Process("handing_node.py", deployment.endpoint, key_file, name, deployment.path)
            ended.callback(kill, hidden.process)
        params = signer_of(str(key_file)).signed(HANDOFF, hidden.ask({"prefill": 20_001}) | {"remote_engine_id": "bad"})
        assert deployment.decode.ask({"decode": 20_001, "params": params}) == {"loaded": LOADED, "right": True}
        passed_on = deployment.decode.ask({"prefill": 20_001})
        assert deployment.nodes["other"].ask({"decode": 20_001, "params": passed_on})["loaded"] == LOADED
        good = deployment.prefill.ask({"prefill": 20_002})
        assert deployment.decode.ask({"decode": 20_002, "params": good})["loaded"] == LOADED
        assert dropped("--producer bad")["decode"] == 0, "it is not the address that the chunks came from"
        deployment.run("kvferry keygen --revoke bad cluster.key")
        deployment.copy_to(deployment.copies)
    time.sleep(REVOKED_WITHIN_S)
    found = dropped("--member bad")
    assert found["prefill"] == 0
    assert min(found["decode"], found["other"]) >= LOADED // 32, "what the third node copied too"
    assert deployment.prefill.ask({"decode": 20_001, "params": passed_on})["loaded"] == 0, "nothing is left"
    assert deployment.decode.ask({"decode": 20_002, "params": good})["loaded"] == LOADED, "of another"


def test_a_revoked_member_is_out_within_a_second_and_no_other_notices(deployment: Deployment) -> None:
    thief, thiefs_key = deployment.nodes["other"], key_of(deployment, "other")
    params = deployment.prefill.ask({"prefill": 30_001})
    assert thief.ask({"decode": 30_001, "params": params}) == {"loaded": LOADED, "right": True}
    stolen = deployment.prefill.ask({"prefill": 30_002})
    with Traffic(deployment.prefill, deployment.decode) as traffic:
        traffic.goes_on()
        deployment.run("kvferry keygen --revoke other cluster.key")
        deployment.copy_to([copy for copy in deployment.copies if copy != thiefs_key])
        time.sleep(REVOKED_WITHIN_S)
        names = {node["engine_id"] for node in json.loads(deployment.status(deployment.copies[0]).stdout)["nodes"]}
        assert names == {"prefill", "decode"}
        assert deployment.http_status(thiefs_key) == 401
        traffic.goes_on()
        assert thief.ask({"decode": 30_002, "params": stolen}) == {"loaded": 0, "right": True}
        assert deployment.decode.ask({"decode": 30_003, "params": thief.ask({"prefill": 30_003})}) == {
            "loaded": 0, "right": True, "why": "a ticket of member other, which is not in the list of members"}
        assert deployment.status(thiefs_key).returncode != 0
        traffic.goes_on()
    assert traffic.failures == []
    assert traffic.num_computed == 0
    deployment.run("kvferry keygen --add-node other cluster.key")
    assert thiefs_key.read_bytes() != (deployment.folder / "other.key").read_bytes()


def test_keygen_says_what_is_wrong(tmp_path: Path) -> None:
    def keygen(arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([KVFERRY, "keygen", *arguments.split()], cwd=tmp_path, capture_output=True, text=True)

    assert keygen("cluster.key").returncode == 0
    assert keygen("--add-node p-0 cluster.key").stdout == "p-0.key\n"
    members = tmp_path / "kvferry.members"
    assert re.fullmatch(r"kvferry members 1\np-0 worker( [0-9a-f]{64}){3}\n", members.read_text())
    for arguments, why in (("--add-node p-0 cluster.key", "'p-0' is a member already; --revoke removes it"),
                           ("--add-node p_0 cluster.key", "'p_0' can't be a member's name; allowed: 1 to 63 letters"),
                           ("--add-node cluster cluster.key", "cluster.key exists; a key is never overwritten"),
                           ("--add-node p-1 p-0.key", "p-0.key is the key of a member; this command needs the cluster"),
                           ("--revoke p-1 cluster.key", "there is no member 'p-1' in kvferry.members"),
                           ("--add-node p-1 --role root cluster.key", "--role"),
                           ("--role worker new.key", "--role requires --add-node"),
                           ("--add-node p-1 --revoke p-0 cluster.key", "at most 1")):
        refused = keygen(arguments)
        assert refused.returncode == 2, arguments
        assert why in refused.stderr, refused.stderr
    assert keygen("--add-node p-1 --add-node p-2 cluster.key").stdout == "p-1.key\np-2.key\n"
    assert keygen("--add-node p-3 --add-node p-3 cluster.key").returncode == 2
    assert keygen("--revoke p-1 --revoke p-3 cluster.key").returncode == 2
    assert [line.split()[0] for line in members.read_text().splitlines()[1:]] == ["p-0", "p-1", "p-2"]
    assert not (tmp_path / "p-3.key").exists()
    assert keygen("--revoke p-2 --revoke p-0 --revoke p-1 cluster.key").stdout == "kvferry.members\n"
    assert members.read_text() == "kvferry members 1\n"
    assert not (tmp_path / "p-0.key").exists()
