"""Tests tickets: a node uses an address only if its ticket is valid."""

import itertools
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvferry.tickets import (
    HANDOFF,
    LIFETIME_S,
    LOOK_EVERY_S,
    PUSH_TARGET,
    TICKET,
    KeyFileError,
    Signer,
    member_of,
    signer_of,
)  # fmt: skip
from kvferry_launch.node.cluster_key import ensure_key
from kvferry_launch.paths import KVFERRY

KEY = b"k" * 32
PARAMS: dict[str, Any] = {
    "do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "p0", "remote_request_id": "r",
    "remote_host": "10.0.0.1", "remote_port": 5000, "remote_num_tokens": 100, "tp_size": 1,
    "kvferry_fingerprint": "model=m kv_heads=2"}
TARGET = {"engine_id": "d0", "endpoint": "tcp://10.0.0.2:5000"}
NOW = 1_800_000_000.0
REFUSED = ("a malformed ticket", "a ticket with a wrong signature")


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.01)


def signer(at: float = NOW, key: bytes = KEY) -> Signer:
    return Signer(key, clock=lambda: at)


SIGNED = signer().signed(HANDOFF, PARAMS)


def test_the_http_tokens_are_those_of_the_controller() -> None:
    assert signer().http_token() == "90aa5daf3b2d3703f8c4cd988ab7640a1b2d2dedc84cdee6eb769135365d265a"
    assert signer().http_token("admin") == "3595a76d2133d8726dc93eec074492fcf65fbf36bf678fe5326bd53de656f1b2"


def test_what_another_node_signed_is_valid() -> None:
    assert {name: value for name, value in SIGNED.items() if name != TICKET} == PARAMS
    for later in (-LIFETIME_S, 0, LIFETIME_S):
        assert signer(NOW + later).refusal(HANDOFF, SIGNED) is None
    assert signer().refusal(HANDOFF, SIGNED | {"tp_size": 2, "remote_block_ids": None}) is None, "these are not used"
    assert signer().refusal(PUSH_TARGET, signer().signed(PUSH_TARGET, TARGET)) is None
    odd = PARAMS | {"remote_request_id": 'é\ud800"],["remote_host","x'}
    assert signer().refusal(HANDOFF, signer().signed(HANDOFF, odd)) is None


@pytest.mark.parametrize(("name", "value"), [
    ("remote_engine_id", "p1"), ("remote_host", "10.0.0.66"), ("remote_port", 5001), ("remote_request_id", "q"),
    ("remote_num_tokens", 101), ("kvferry_fingerprint", "model=n kv_heads=2"),
    ("remote_port", "5000"), ("remote_port", 5000.0), ("remote_num_tokens", True), ("remote_host", ["10.0.0.1"]),
    ("remote_host", {"a": 1}), ("remote_host", None), ("remote_num_tokens", 2**63)])
def test_a_ticket_is_for_these_fields_only(name: str, value: Any) -> None:
    assert signer().refusal(HANDOFF, SIGNED | {name: value}) in REFUSED
    assert signer().refusal(HANDOFF, {key: kept for key, kept in SIGNED.items() if key != name}) is not None


def test_a_ticket_ends() -> None:
    assert signer(NOW + LIFETIME_S + 1).refusal(HANDOFF, SIGNED) == "an expired ticket"
    version, expiry, signature = SIGNED[TICKET].split(".")
    for longer in (int(expiry) + 1, 10**12 - 1):
        forged = SIGNED | {TICKET: f"{version}.{longer}.{signature}"}
        assert signer().refusal(HANDOFF, forged) == "a ticket with a wrong signature"


def test_another_key_and_another_kind_are_refused() -> None:
    assert signer(key=b"x" * 32).refusal(HANDOFF, SIGNED) == "a ticket with a wrong signature"
    both = PARAMS | TARGET
    assert signer().refusal(PUSH_TARGET, signer().signed(HANDOFF, both)) == "a ticket with a wrong signature"
    assert signer().refusal(HANDOFF, signer().signed(PUSH_TARGET, both)) == "a ticket with a wrong signature"


def test_fields_can_not_be_moved_into_each_other() -> None:
    tickets = {signer().signed(PUSH_TARGET, {"engine_id": first, "endpoint": second})[TICKET]
               for first, second in itertools.permutations(["a", "b", "ab", "", 'a","b', "a, b", "0"], 2)}
    assert len(tickets) == 7 * 6


@pytest.mark.parametrize("ticket", [
    "", "1", "1..", SIGNED[TICKET][:-1], SIGNED[TICKET] + "0", SIGNED[TICKET] + "\n", "2" + SIGNED[TICKET][1:],
    SIGNED[TICKET].upper(), SIGNED[TICKET].replace("1.", "1.0", 1), "1.٣.".ljust(68, "0"),
    "1." + "9" * 5000 + "." + "0" * 64, 7, True, [SIGNED[TICKET]], {"a": SIGNED[TICKET]}, SIGNED[TICKET].encode()])
def test_what_is_no_ticket_is_refused(ticket: Any) -> None:
    assert signer().refusal(HANDOFF, SIGNED | {TICKET: ticket}) in REFUSED


def test_every_letter_of_a_signature_counts() -> None:
    ticket = SIGNED[TICKET]
    for index in range(len(ticket)):
        for letter in "0f.":
            changed = ticket[:index] + letter + ticket[index + 1:]
            assert changed == ticket or signer().refusal(HANDOFF, SIGNED | {TICKET: changed}) is not None
    assert signer().refusal(HANDOFF, PARAMS) == "no ticket"


def test_a_key_that_was_made_here_is_read(tmp_path: Path) -> None:
    file = ensure_key(tmp_path / "new" / "cluster.key")
    assert file.stat().st_mode & 0o777 == 0o600
    key = file.read_bytes()
    assert ensure_key(file).read_bytes() == key, "nodes that run already have it"
    assert signer_of(str(file)).http_token() == Signer(key).http_token()
    file.chmod(0o400)
    assert signer_of(str(file)).http_token() == Signer(key).http_token()
    assert ensure_key(tmp_path / "other.key").read_bytes() != key


@pytest.mark.parametrize(("size", "mode", "words"), [
    (31, 0o600, "31 bytes; allowed: 32 to 65536"), (0, 0o600, "0 bytes"), (65537, 0o600, "more than 65536 bytes"),
    (32, 0o640, "mode 0640; allowed: 0600 and 0400"), (32, 0o604, "mode 0604"), (32, 0o700, "mode 0700")])
def test_a_key_file_that_others_read_or_is_short_is_named(tmp_path: Path, size: int, mode: int, words: str) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"k" * size)
    file.chmod(mode)
    with pytest.raises(KeyFileError, match=f"^cluster_key_file {file} has {words}"):
        signer_of(str(file))


def test_a_key_file_that_is_none_is_named(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none", "can't be read: No such file"), (tmp_path, "can't be read: Is a directory"),
                        (Path("/dev/null"), "is not a regular file")):
        with pytest.raises(KeyFileError, match=f"^cluster_key_file {path} {words}"):
            signer_of(str(path))


def test_the_keys_of_a_file_are_followed_and_both_are_valid_until_one_is_removed(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, new = tmp_path / "cluster.key", b"n" * 40
    subprocess.run([KVFERRY, "keygen", file], check=True, capture_output=True)

    def change(step: str) -> None:
        subprocess.run([KVFERRY, "keygen", step, file], check=True, capture_output=True)

    member = signer_of(str(file))
    by_old, token_of_old = member.signed(HANDOFF, PARAMS), member.http_token()
    for step in ("--add", "--switch"):
        change(step)
    eventually(lambda: member.http_token() != token_of_old)
    assert member.refusal(HANDOFF, by_old) is None
    by_new, token = member.signed(HANDOFF, PARAMS), member.http_token()
    assert by_new != by_old and member.refusal(HANDOFF, by_new) is None
    assert subprocess.check_output([KVFERRY, "token", "--cluster-key-file", file], text=True).strip() == token
    change("--retire")
    changed_at = time.monotonic()
    eventually(lambda: member.refusal(HANDOFF, by_old) == "a ticket with a wrong signature")
    assert time.monotonic() - changed_at < 1
    assert member.refusal(HANDOFF, by_new) is None
    file.write_bytes(new[:31])
    eventually(lambda: member.http_token() == token and "has 31 bytes" in caplog.text)
    time.sleep(2 * LOOK_EVERY_S)
    assert member.http_token() == token
    assert caplog.text.count("has 31 bytes") == 1
    file.write_bytes(new)
    eventually(lambda: member.http_token() == Signer(new).http_token())


def test_a_member_that_has_not_looked_for_long_accepts_no_removed_key(tmp_path: Path) -> None:
    file = tmp_path / "cluster.key"
    file.write_bytes(KEY)
    file.chmod(0o600)
    member = signer_of(str(file))
    by_old = member.signed(HANDOFF, PARAMS)
    file.write_bytes(b"n" * 32)
    time.sleep(1)
    assert member.refusal(HANDOFF, by_old) == "a ticket with a wrong signature"


@pytest.mark.parametrize(("lines", "words"), [
    ([], "lists 0 keys"), (["61" * 32], "lists 1 keys"), (["61" * 32] * 2, "two different ones"),
    (["61" * 32, "xy"], "a line that is no key"), (["61" * 32, "62" * 31], "31 bytes")])
def test_a_list_that_is_none_is_refused_in_one_sentence(tmp_path: Path, lines: list[str], words: str) -> None:
    file = tmp_path / "cluster.key"
    file.write_text("".join(f"{line}\n" for line in ["kvferry cluster keys 1", *lines]))
    file.chmod(0o600)
    with pytest.raises(KeyFileError, match=f"^cluster_key_file {file} .*{words}"):
        signer_of(str(file))


class Deployment:
    """A cluster key and the keys of members, in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.keygen()
        self.one_key = signer_of(str(folder / "cluster.key"))
        for name, role in (("w0", "worker"), ("w1", "worker"), ("r", "reader"), ("a", "admin")):
            self.keygen("--add-node", name, "--role", role)
        self.whole, self.w0, self.w1, self.reader, self.admin = (self.of(name) for name in ("cluster", "w0", "w1", "r",
                                                                                            "a"))

    def keygen(self, *arguments: str) -> None:
        subprocess.run([KVFERRY, "keygen", *arguments, "cluster.key"], cwd=self._folder, check=True,
                       capture_output=True)

    def of(self, name: str) -> Signer:
        return signer_of(str(self._folder / f"{name}.key"))


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return Deployment(tmp_path)


def named(engine_id: str) -> dict[str, Any]:
    return PARAMS | {"remote_engine_id": engine_id}


def test_members_sign_and_accept_what_their_role_allows(deployment: Deployment, tmp_path: Path) -> None:
    whole, w0, w1, reader, admin = (deployment.whole, deployment.w0, deployment.w1, deployment.reader,
                                    deployment.admin)
    signed = {name: one.signed(HANDOFF, named(name)) for name, one in
              {"w0": w0, "w1": w1, "w1_dp3": w1, "a.b": admin, "anybody": whole}.items()}
    for one, params in itertools.product((whole, w0, w1, admin, reader), signed.values()):
        assert one.refusal(HANDOFF, params) is None
    assert [member_of(params) for params in signed.values()] == ["w0", "w1", "w1", "a", ""]
    assert member_of(SIGNED) == "", "signed with the cluster key, without members"
    for one, other in itertools.product((whole, w0, w1, admin, reader), repeat=2):
        assert one.refusal(PUSH_TARGET, other.signed(PUSH_TARGET, TARGET)) is None
        assert one.tenant_secret() == other.tenant_secret()
    foreign = [w1.signed(HANDOFF, PARAMS | {"remote_engine_id": one}) for one in ("w0", "w10", "w", "", 7)]
    for forged in (reader.signed(HANDOFF, named("r")), *foreign):
        for one in (whole, w0, admin, reader):
            engine_id = forged["remote_engine_id"]
            signer = "r" if engine_id == "r" else "w1"
            assert one.refusal(HANDOFF, forged) == (
                f"a ticket of member {signer}, which may not sign for node {engine_id!r}")
    assert len({one.http_token() for one in (whole, w0, w1, admin, reader)}) == 5
    for one in (w0, reader, admin):
        assert one.http_token("admin") == one.http_token(), "the role is that of the member"
    eventually(lambda: deployment.one_key.refusal(HANDOFF, signed["w0"]) is None)  # the list is new for this one
    (tmp_path / "kvferry.members").unlink()
    time.sleep(3 * LOOK_EVERY_S)
    assert whole.refusal(HANDOFF, signed["w0"]) is None, "a removed list revokes nobody"


def test_a_members_ticket_is_of_one_signer_for_these_fields_only(deployment: Deployment) -> None:
    reader_of_it, signed = deployment.w0, deployment.w1.signed(HANDOFF, named("w1"))
    version, expiry, name, signature = signed[TICKET].split(".")
    assert (version, name) == ("2", "w1")
    for field, value in (("remote_host", "10.0.0.66"), ("remote_port", 5001), ("remote_num_tokens", 101)):
        assert reader_of_it.refusal(HANDOFF, signed | {field: value}) == "a ticket with a wrong signature"
    both = signed | TARGET
    for ticket in (f"2.{int(expiry) + 1}.w1.{signature}", f"2.{expiry}..{signature}", f"2.{expiry}.w1.{'0' * 128}",
                   deployment.w0.signed(HANDOFF, named("w1"))[TICKET].replace(".w0.", ".w1.")):
        assert reader_of_it.refusal(HANDOFF, signed | {TICKET: ticket}) == "a ticket with a wrong signature"
    assert reader_of_it.refusal(PUSH_TARGET, both) == "a ticket with a wrong signature"
    for ticket in (signer().signed(HANDOFF, named("w1"))[TICKET], f"2.{expiry}.w1.{signature[1:]}",
                   f"2.{expiry}.w_1.{signature}", f"2.{expiry}.{signature}", signed[TICKET] + "\n"):
        assert reader_of_it.refusal(HANDOFF, signed | {TICKET: ticket}) == "a malformed ticket"
    late = signer_of(reader_of_it._file)
    late._clock = lambda: time.time() + LIFETIME_S + 2
    assert late.refusal(HANDOFF, signed) == "an expired ticket"


def test_a_revoked_member_signs_nothing_more_and_others_go_on(deployment: Deployment, tmp_path: Path) -> None:
    stolen, kept = deployment.w1.signed(HANDOFF, named("w1")), deployment.w0.signed(HANDOFF, named("w0"))
    target = deployment.reader.signed(PUSH_TARGET, TARGET)
    revoked_at = time.monotonic()
    deployment.keygen("--revoke", "w1", "--revoke", "r")
    gone = {name: f"a ticket of member {name}, which is not in the list of members" for name in ("w0", "w1", "r")}
    eventually(lambda: deployment.w0.refusal(HANDOFF, stolen) == gone["w1"])
    assert time.monotonic() - revoked_at < 1
    for one in (deployment.whole, deployment.w0, deployment.admin):
        eventually(lambda one=one: one.refusal(HANDOFF, stolen) == gone["w1"])
        assert one.refusal(HANDOFF, deployment.w1.signed(HANDOFF, named("w1"))) == gone["w1"]
        assert one.refusal(PUSH_TARGET, target) == gone["r"]
        assert one.refusal(HANDOFF, kept) is None
    (tmp_path / "kvferry.members").write_text("kvferry members 1\n")
    eventually(lambda: deployment.w0.refusal(HANDOFF, kept) == gone["w0"])
    deployment.keygen("--add-node", "w1")
    anew = deployment.of("w1").signed(HANDOFF, named("w1"))
    eventually(lambda: deployment.whole.refusal(HANDOFF, anew) is None)
    assert deployment.whole.refusal(HANDOFF, stolen) == "a ticket with a wrong signature"


def test_tickets_of_members_outlive_a_rotation_and_those_of_the_former_key_do_not(deployment: Deployment) -> None:
    of_member, of_former = deployment.w1.signed(HANDOFF, named("w1")), deployment.whole.signed(HANDOFF, PARAMS)
    for step in ("--add", "--switch"):
        deployment.keygen(step)
    time.sleep(1)  # as long a process may need to see the new files
    assert deployment.w0.refusal(HANDOFF, of_former) is None
    of_newer = deployment.whole.signed(HANDOFF, PARAMS)
    deployment.keygen("--retire")
    eventually(lambda: deployment.w0.refusal(HANDOFF, of_former) == "a ticket with a wrong signature")
    assert deployment.w0.refusal(HANDOFF, of_newer) is None
    assert deployment.w0.refusal(HANDOFF, of_member) is None


@pytest.mark.parametrize("damage", [
    lambda text: text[:-1], lambda text: text.replace("worker", "root", 1), lambda text: "x" + text,
    lambda text: text.replace("w0 ", "w_0 ", 1), lambda text: text + "\n"])
def test_a_damaged_list_revokes_nobody(deployment: Deployment, tmp_path: Path, damage: Callable[[str], str],
                                      caplog: pytest.LogCaptureFixture) -> None:
    signed = deployment.w1.signed(HANDOFF, named("w1"))
    list_of_members = tmp_path / "kvferry.members"
    list_of_members.write_text(damage(list_of_members.read_text()))
    eventually(lambda: deployment.w0.refusal(HANDOFF, signed) is not None or "is damaged" in caplog.text)
    assert deployment.w0.refusal(HANDOFF, signed) is None


def test_a_damaged_key_of_a_member_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "w.key"
    good = f"kvferry member key 1\nw worker {'0' * 64}\n{'1' * 64} {'2' * 64} {'3' * 64}\n"
    for content in (good[:-1], good.replace("worker", "root"), good.replace("w worker", "w_ worker"),
                    good.replace("3", "g"), good + good[-195:] * 2):
        file.unlink(missing_ok=True)
        file.write_text(content)
        file.chmod(0o600)
        with pytest.raises(KeyFileError, match="is a damaged key of a member"):
            signer_of(str(file))
