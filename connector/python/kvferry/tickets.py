"""Tickets: signatures of the addresses in kv_transfer_params, made with a key that HTTP clients do not have.

A router, or any HTTP client, can put addresses into a request. A node with the key uses only addresses that come with a
valid ticket, and HTTP clients can't make a ticket. With a list of members a member signs with its own key, in its own
name, and its tickets are valid only while it is in the list.

Over 300 lines, because the forms of keys, of lists of members and of tickets are read here, without the native module.
"""

import hashlib
import hmac
import json
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

VERSION = 1  # version of a ticket that is signed with the cluster key itself
VERSION_OF_MEMBERS = 2
LIFETIME_S = 600  # longest time from the signing, by the signer's clock, to the use, by the reader's clock
KEY_BYTES_MIN, KEY_BYTES_MAX = 32, 65536
KEYS_HEAD = b"kvferry cluster keys 1\n"  # first line of a file with KEYS_MAX keys, each on a line in hexadecimal
KEYS_MAX = 2
LOOK_EVERY_S = 0.25  # shortest time between two looks at a key file
SETTLED_AFTER_S = 0.5  # a file that has not changed for this time counts as completely copied
TICKET = "kvferry_ticket"
# The names of the fields that a ticket signs: HANDOFF for a hand-off, PUSH_TARGET for the target of a push. The names
# are signed too, so that a ticket of one kind is not valid as the other kind.
HANDOFF = ("remote_engine_id", "remote_host", "remote_port", "remote_request_id", "remote_num_tokens",
           "kvferry_fingerprint")  # fmt: skip
PUSH_TARGET = ("engine_id", "endpoint")
_FORM = re.compile(rf"{VERSION}\.([0-9]{{1,12}})\.[0-9a-f]{{64}}")
_FORM_OF_MEMBERS = re.compile(rf"{VERSION_OF_MEMBERS}\.([0-9]{{1,12}})\.([A-Za-z0-9-]{{0,63}})\.([0-9a-f]{{128}})")
_KEY_LINES = re.compile(rb"(?:(?:[0-9a-f]{2})+\n)*")
MEMBERS = "kvferry.members"  # name of the list of members, which lies beside the key file
_MEMBER = re.compile(r"([A-Za-z0-9-]{1,63}) (reader|worker|admin) [0-9a-f]{64} ([0-9a-f]{64}) [0-9a-f]{64}\n")
_MEMBERS_LIST = re.compile(rf"kvferry members 1\n(?:{_MEMBER.pattern})*")
_MEMBER_KEY = re.compile(rb"kvferry member key 1\n([A-Za-z0-9-]{1,63}) (reader|worker|admin) ([0-9a-f]{64})\n"
                         rb"((?:[0-9a-f]{64} [0-9a-f]{64} [0-9a-f]{64}\n){1,2})")


class KeyFileError(Exception):
    """The key file can't be used; the message is one sentence."""


@dataclass(frozen=True)
class Key:
    """What a process has of one accepted cluster key."""

    routers: bytes  # secret that every process with a key has, and from which proxies make the tenants' salts
    whole: bytes = b""  # the cluster key itself; b"": this process is a member, which does not have it
    token: str = ""  # a member's own token for the controller's HTTP API; "": not a member

    def http_token(self, role: str) -> str:
        return self.token or _hmac(self.whole, f"kvferry HTTP {role} 1".encode()).hex()


def _hmac(key: bytes, purpose: bytes) -> bytes:
    return hmac.new(key, purpose, hashlib.sha256).digest()


@dataclass(frozen=True)
class Members:
    """The secret with which this process signs tickets, and the certificates with which it checks tickets."""

    own_name: str  # "": this process has the cluster key
    own_secret: bytes
    holders: tuple[bytes, ...]  # the certificates made from the accepted cluster keys, that of the key in use first
    listed: Mapping[str, tuple[str, bytes]] | None  # [name] role and certificate of a member; None: there is no list

    def refusal(self, names: tuple[str, ...], params: Mapping[str, Any], signer: str) -> str | None:
        """Returns why the ticket's signer may not sign these fields, or None if it may."""
        if not signer:
            return None
        role, _ = (self.listed or {}).get(signer, ("", b""))
        if not role:
            return f"a ticket of member {signer}, which is not in the list of members"
        if names == PUSH_TARGET:
            return None
        engine_id = params["remote_engine_id"]
        is_own = engine_id == signer or str(engine_id).startswith((f"{signer}_", f"{signer}."))
        return None if is_own and role != "reader" else (
            f"a ticket of member {signer}, which may not sign for node {engine_id!r:.60}")

    def certificates(self, signer: str) -> tuple[bytes, ...]:
        return (self.listed or {})[signer][1:] if signer else self.holders


@dataclass(frozen=True)
class Content:
    """What the key file and the list of members beside it say."""

    keys: tuple[Key, ...]  # the key in use first
    members: Members | None = None

    @property
    def has_list(self) -> bool:
        return self.members is not None and self.members.listed is not None


class Signer:
    """Signs fields of kv_transfer_params with the first of `keys`, and accepts what any of them has signed. `clock`
    returns seconds since 1970.

    With a `file` the signer has the keys of the file, and reads the file again before it uses them, at most every
    LOOK_EVERY_S. If the file can't be used any more, an error is logged once, and the former keys stay in use.
    """

    def __init__(self, *keys: bytes, clock: Callable[[], float] = time.time, file: str = "") -> None:
        self._file = file
        self._content = Content(tuple(Key(key, key) for key in keys)) if keys else _content_of(file)[0]
        self._seen: Content | str = self._content  # what the last look has found: the keys, or an error
        self._done: Content | str = self._content  # the keys taken last, or the error that was logged last
        self._looked_at = time.monotonic()
        self._clock = clock

    def signed(self, names: tuple[str, ...], params: Mapping[str, Any]) -> dict[str, Any]:
        """Returns `params` with a ticket. `params` must have a string or an integer for each of `names`."""
        expiry = int(self._clock()) + LIFETIME_S
        content = self._accepted()
        if content.members is None:
            return {**params, TICKET: _ticket(content.keys[0].whole, names, params, expiry)}
        own = content.members
        signature = _core().signature_of(own.own_secret, _text_of_member(own.own_name, names, params, expiry))
        return {**params, TICKET: f"{VERSION_OF_MEMBERS}.{expiry}.{own.own_name}.{signature.hex()}"}

    def refusal(self, names: tuple[str, ...], params: Mapping[str, Any]) -> str | None:
        """Returns why the ticket in `params` is refused, in a few words, or None if it is valid."""
        ticket = params.get(TICKET)
        if ticket is None:
            return "no ticket"
        content = self._accepted()
        form = _FORM if content.members is None else _FORM_OF_MEMBERS
        found = form.fullmatch(ticket) if isinstance(ticket, str) else None
        if found is None or not all(_can_be_signed(params.get(name)) for name in names):
            return "a malformed ticket"
        expiry = int(found[1])
        if content.members is None:
            is_signed = any(hmac.compare_digest(_ticket(key.whole, names, params, expiry), found[0])
                            for key in content.keys)
        else:
            if (why_not := content.members.refusal(names, params, found[2])) is not None:
                return why_not
            text, signature = _text_of_member(found[2], names, params, expiry), bytes.fromhex(found[3])
            is_signed = any(_core().is_signed_by(one, text, signature)
                            for one in content.members.certificates(found[2]))
        if not is_signed:
            return "a ticket with a wrong signature"
        return "an expired ticket" if self._clock() > expiry else None

    def http_token(self, role: str = "reader") -> str:
        """Returns the token for the controller's HTTP API that `kvferry token --role ROLE` prints. A member's token
        always has the member's own role.
        """
        return self.http_tokens(role)[0]

    def http_tokens(self, role: str = "reader") -> list[str]:
        """Returns the tokens of all accepted keys, of which http_token() is the first."""
        return [key.http_token(role) for key in self._accepted().keys]

    def tenant_secret(self) -> bytes:
        """Returns the key with which a proxy makes the cache_salt of each tenant."""
        return _hmac(self._accepted().keys[0].routers, b"kvferry tenants 1")

    def _accepted(self) -> Content:
        """Returns the accepted keys. A change of the files within the last half second is accepted only if two looks
        have found the same content, because a copy of the files may be incomplete.
        """
        if not self._file or time.monotonic() - self._looked_at < LOOK_EVERY_S:
            return self._content
        self._looked_at = time.monotonic()
        found: Content | str
        try:
            found, changed_at = _content_of(self._file)
            if self._content.has_list and not found.has_list:
                raise KeyFileError(f"the list of members {Path(self._file).parent / MEMBERS} is missing")
            is_settled = found == self._seen or time.time() - changed_at > SETTLED_AFTER_S
        except KeyFileError as error:
            found = str(error)
            is_settled = found == self._seen
        self._seen = found
        if not is_settled or found == self._done:
            return self._content
        self._done = found
        if isinstance(found, str):
            logger.error("kvferry: %s; the former keys stay in use", found)
        else:
            self._content = found
        return self._content


def _ticket(key: bytes, names: tuple[str, ...], params: Mapping[str, Any], expiry: int) -> str:
    signed = json.dumps(["kvferry ticket", VERSION, expiry, [[name, params[name]] for name in names]])
    return f"{VERSION}.{expiry}.{hmac.new(key, signed.encode(), hashlib.sha256).hexdigest()}"


def _text_of_member(name: str, names: tuple[str, ...], params: Mapping[str, Any], expiry: int) -> bytes:
    """Returns the text that is signed in a ticket of VERSION_OF_MEMBERS. It can't be mistaken for a certificate or a
    message of TLS, which are signed with the same key and begin in another way.
    """
    signed = [[field, params[field]] for field in names]
    return json.dumps(["kvferry ticket", VERSION_OF_MEMBERS, name, expiry, signed]).encode()


def _core() -> Any:
    """Returns the native module. Tickets need it only with a member's key or a list of members."""
    from kvferry import _core as core

    return core


def _can_be_signed(value: object) -> bool:
    return type(value) is str or (type(value) is int and abs(value) < 2**63)


def member_of(params: Mapping[str, Any]) -> str:
    """Returns the name of the member that signed the accepted ticket in `params`, or "" if no member has signed it."""
    found = _FORM_OF_MEMBERS.fullmatch(str(params.get(TICKET)))
    return found[2] if found else ""


def signer_of(key_file: str) -> Signer:
    """Returns a signer with the keys in a file, which follows changes of the file. Errors: KeyFileError."""
    return Signer(file=key_file)


def _content_of(key_file: str) -> tuple[Content, float]:
    """Returns the keys, and when the file or the list of members last changed. Errors: KeyFileError."""
    content, changed_at = _bytes_of(key_file)
    listed: dict[str, tuple[str, bytes]] | None = None
    members = Path(key_file).parent / MEMBERS
    try:
        text = members.read_text(encoding="ascii")
        changed_at = max(changed_at, members.stat().st_ctime)
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"the list of members {members} can't be read: {error}") from error
    else:
        if not _MEMBERS_LIST.fullmatch(text):
            raise KeyFileError(f"the list of members {members} is damaged; copy it again from where it was made")
        listed = {name: (role, bytes.fromhex(key)) for name, role, key in _MEMBER.findall(text)}
    if content.startswith(b"kvferry member key"):
        return _content_of_member(key_file, content, listed), changed_at
    keys = _cluster_keys(key_file, content)
    if listed is None:
        return Content(tuple(Key(key, key) for key in keys)), changed_at
    secrets = [_hmac(key, b"kvferry certificate 1") for key in keys]
    holders = tuple(_core().certificate_public(secret) for secret in secrets)
    return Content(tuple(Key(_hmac(_hmac(key, b"kvferry nodes 1"), b"kvferry routers 1"), key) for key in keys),
                   Members("", secrets[0], holders, listed)), changed_at


def _content_of_member(key_file: str, content: bytes, listed: Mapping[str, tuple[str, bytes]] | None) -> Content:
    found = _MEMBER_KEY.fullmatch(content)
    if found is None:
        raise KeyFileError(f"cluster_key_file {key_file} is a damaged key of a member; make a new key with 'kvferry "
                           "keygen --add-node'")
    own = bytes.fromhex(found[3].decode())
    token = _hmac(own, b"kvferry HTTP member 1").hex()
    shared = [[bytes.fromhex(word.decode()) for word in line.split()] for line in found[4].splitlines()]
    is_reader = found[2] == b"reader"  # a reader has the secret of routers instead of that of nodes
    keys = tuple(Key(secret if is_reader else _hmac(secret, b"kvferry routers 1"), token=token)
                 for _, _, secret in shared)
    holders = tuple(certificate for _, certificate, _ in shared)
    return Content(keys, Members(found[1].decode(), _hmac(own, b"kvferry certificate 1"), holders, listed))


def _bytes_of(key_file: str) -> tuple[bytes, float]:
    try:
        with open(key_file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            about = os.fstat(file.fileno())
            mode = stat.S_IMODE(about.st_mode)
            if not stat.S_ISREG(about.st_mode):
                raise KeyFileError(f"cluster_key_file {key_file} is not a regular file")
            if mode not in (0o600, 0o400):
                raise KeyFileError(f"cluster_key_file {key_file} has mode {mode:04o}; allowed: 0600 and 0400, so that "
                                   "only its owner reads it")
            return file.read(len(KEYS_HEAD) + KEYS_MAX * (2 * KEY_BYTES_MAX + 1) + 1), about.st_ctime
    except OSError as error:
        raise KeyFileError(f"cluster_key_file {key_file} can't be read: {error.strerror}") from error


def _cluster_keys(key_file: str, content: bytes) -> tuple[bytes, ...]:
    keys: tuple[bytes, ...] = (content,)
    if content.startswith(KEYS_HEAD):
        lines = content[len(KEYS_HEAD):]
        if not _KEY_LINES.fullmatch(lines):
            raise KeyFileError(f"cluster_key_file {key_file} has a line that is no key in hexadecimal (pairs of 0-9, "
                               "a-f)")
        keys = tuple(bytes.fromhex(line.decode()) for line in lines.splitlines())
        if len(set(keys)) != KEYS_MAX or len(keys) != KEYS_MAX:
            raise KeyFileError(f"cluster_key_file {key_file} lists {len(keys)} keys; allowed: two different ones")
    for key in keys:
        if not KEY_BYTES_MIN <= len(key) <= KEY_BYTES_MAX:
            raise KeyFileError(
                f"cluster_key_file {key_file} {'has' if len(keys) == 1 else 'lists a key of'} "
                f"{'more than 65536' if len(key) > KEY_BYTES_MAX else len(key)} bytes; allowed: {KEY_BYTES_MIN} to "
                f"{KEY_BYTES_MAX} (kvferry keygen makes one)"
            )
    return keys
