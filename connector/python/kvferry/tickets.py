"""Tickets: signatures of the addresses in kv_transfer_params, made with a key that only nodes and proxies have.

A router, or any HTTP client, can put addresses into a request. A node with the key uses only addresses that come with a
valid ticket, and HTTP clients can't make a ticket.
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

VERSION = 1
LIFETIME_S = 600  # longest time from the signing, by the signer's clock, to the use, by the reader's clock
KEY_BYTES_MIN = 32
KEY_BYTES_MAX = 65536
KEYS_HEAD = b"kvferry cluster keys 1\n"  # first line of a file with two keys, each on a line in hexadecimal
KEYS_MAX = 2
LOOK_EVERY_S = 0.25  # shortest time between two looks at a key file
SETTLED_AFTER_S = 0.5  # a file that has not changed for this time is not being copied
TICKET = "kvferry_ticket"
# The names of the fields that a ticket signs: HANDOFF for a hand-off, PUSH_TARGET for the target of a push. The names
# are signed too, so that a ticket of one kind is not valid as the other kind.
HANDOFF = ("remote_engine_id", "remote_host", "remote_port", "remote_request_id", "remote_num_tokens",
           "kvferry_fingerprint")  # fmt: skip
PUSH_TARGET = ("engine_id", "endpoint")
_FORM = re.compile(rf"{VERSION}\.([0-9]{{1,12}})\.[0-9a-f]{{64}}")
_KEY_LINES = re.compile(rb"(?:(?:[0-9a-f]{2})+\n)*")
MEMBERS = "kvferry.members"  # the list of members beside the key file
_MEMBER_KEY = re.compile(rb"kvferry member key 1\n[A-Za-z0-9-]{1,63} (reader|worker|admin) ([0-9a-f]{64})\n"
                         rb"((?:[0-9a-f]{64} [0-9a-f]{64} [0-9a-f]{64}\n){1,2})")


class KeyFileError(Exception):
    """The key file can't be used; the message is one sentence."""


@dataclass(frozen=True)
class Key:
    """What a process has of one accepted cluster key."""

    handoff: bytes  # signs hand-offs; b"": a reader has no such key
    push: bytes  # signs the targets of pushes
    whole: bytes = b""  # the cluster key itself; b"": a member does not have it
    token: str = ""  # a member's own token for the controller's HTTP API

    def of(self, names: tuple[str, ...]) -> bytes:
        return self.push if names == PUSH_TARGET else self.handoff

    def http_token(self, role: str) -> str:
        return self.token or _hmac(self.whole, f"kvferry HTTP {role} 1".encode()).hex()


def _hmac(key: bytes, purpose: bytes) -> bytes:
    return hmac.new(key, purpose, hashlib.sha256).digest()


def _key_with_members(node_secret: bytes, whole: bytes = b"", token: str = "") -> Key:
    return Key(node_secret, _hmac(node_secret, b"kvferry routers 1"), whole, token)


class Signer:
    """Signs fields of kv_transfer_params with the first of `keys`, and accepts what any of them has signed. `clock`
    returns seconds since 1970.

    With a `file` it has the keys of the file, and reads them again when they are used. A file that can't be used any
    more is logged once, and the former keys stay in use.
    """

    def __init__(self, *keys: bytes, clock: Callable[[], float] = time.time, file: str = "") -> None:
        self._file = file
        self._keys = tuple(Key(key, key, key) for key in keys) or _keys_of(file)[0]
        self._seen: tuple[Key, ...] | str = self._keys  # what the last look has found: the keys, or an error
        self._done: tuple[Key, ...] | str = self._keys  # what was last adopted (keys) or logged (an error)
        self._looked_at = time.monotonic()
        self._clock = clock

    def signed(self, names: tuple[str, ...], params: Mapping[str, Any]) -> dict[str, Any]:
        """Returns `params` with a ticket. `params` must have a string or an integer for each of `names`."""
        expiry = int(self._clock()) + LIFETIME_S
        return {**params, TICKET: _ticket(self._accepted()[0].of(names), names, params, expiry)}

    def refusal(self, names: tuple[str, ...], params: Mapping[str, Any]) -> str | None:
        """Returns why the ticket in `params` is refused, in a few words, or None if it is valid."""
        ticket = params.get(TICKET)
        if ticket is None:
            return "no ticket"
        found = _FORM.fullmatch(ticket) if isinstance(ticket, str) else None
        if found is None or not all(_can_be_signed(params.get(name)) for name in names):
            return "a malformed ticket"
        expiry = int(found[1])
        if not any(key.of(names) and hmac.compare_digest(_ticket(key.of(names), names, params, expiry), found[0])
                   for key in self._accepted()):
            return "a ticket with a wrong signature"
        return "an expired ticket" if self._clock() > expiry else None

    def http_token(self, role: str = "reader") -> str:
        """Returns the token for the controller's HTTP API that `kvferry token --role ROLE` prints. That of a member
        has the member's role.
        """
        return self.http_tokens(role)[0]

    def http_tokens(self, role: str = "reader") -> list[str]:
        """Returns the tokens of all accepted keys, of which http_token() is the first."""
        return [key.http_token(role) for key in self._accepted()]

    def tenant_secret(self) -> bytes:
        """Returns the key with which a proxy makes the cache_salt of each tenant."""
        return _hmac(self._accepted()[0].push, b"kvferry tenants 1")

    def _accepted(self) -> tuple[Key, ...]:
        """Returns the accepted keys, the key in use first. A change of the file within the last half second is adopted
        only when a second look finds the same, so that a half-copied file is not used.
        """
        if not self._file or time.monotonic() - self._looked_at < LOOK_EVERY_S:
            return self._keys
        self._looked_at = time.monotonic()
        found: tuple[Key, ...] | str
        try:
            had_members = self._keys[0].handoff not in (b"", self._keys[0].whole)  # a router needs no list of members
            found, changed_at = _keys_of(self._file, had_members)
            is_settled = found == self._seen or time.time() - changed_at > SETTLED_AFTER_S
        except KeyFileError as error:
            found = str(error)
            is_settled = found == self._seen
        self._seen = found
        if not is_settled or found == self._done:
            return self._keys
        self._done = found
        if isinstance(found, str):
            logger.error("kvferry: %s; the former keys stay in use", found)
        else:
            self._keys = found
        return self._keys


def _ticket(key: bytes, names: tuple[str, ...], params: Mapping[str, Any], expiry: int) -> str:
    signed = json.dumps(["kvferry ticket", VERSION, expiry, [[name, params[name]] for name in names]])
    return f"{VERSION}.{expiry}.{hmac.new(key, signed.encode(), hashlib.sha256).hexdigest()}"


def _can_be_signed(value: object) -> bool:
    return type(value) is str or (type(value) is int and abs(value) < 2**63)


def signer_of(key_file: str) -> Signer:
    """Returns a signer with the keys in a file, which it follows. Errors: KeyFileError."""
    return Signer(file=key_file)


def _keys_of(key_file: str, had_members: bool = False) -> tuple[tuple[Key, ...], float]:
    """Returns the keys in a file, the key in use first, and when the file or the list of members last changed. Errors:
    KeyFileError, also if the list is missing although there was one.
    """
    content, changed_at = _content_of(key_file)
    members = Path(key_file).parent / MEMBERS
    try:
        changed_at = max(changed_at, members.stat().st_ctime)
        has_members = True
    except FileNotFoundError:
        has_members = False
    except OSError as error:
        raise KeyFileError(f"the list of members {members} can't be read: {error.strerror}") from error
    if had_members and not has_members:
        raise KeyFileError(f"the list of members {members} is missing")
    if content.startswith(b"kvferry member key"):
        return _keys_of_member(key_file, content), changed_at
    keys = _cluster_keys(key_file, content)
    if not has_members:
        return tuple(Key(key, key, key) for key in keys), changed_at
    return tuple(_key_with_members(_hmac(key, b"kvferry nodes 1"), whole=key) for key in keys), changed_at


def _keys_of_member(key_file: str, content: bytes) -> tuple[Key, ...]:
    found = _MEMBER_KEY.fullmatch(content)
    if found is None:
        raise KeyFileError(f"cluster_key_file {key_file} is a damaged key of a member; 'kvferry keygen --add-node' "
                           "makes a new one")
    token = _hmac(bytes.fromhex(found[2].decode()), b"kvferry HTTP member 1").hex()
    shared = [bytes.fromhex(line.split()[2].decode()) for line in found[3].splitlines()]
    if found[1] == b"reader":
        return tuple(Key(b"", secret, token=token) for secret in shared)
    return tuple(_key_with_members(secret, token=token) for secret in shared)


def _content_of(key_file: str) -> tuple[bytes, float]:
    try:
        with open(key_file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            about = os.fstat(file.fileno())
            mode = stat.S_IMODE(about.st_mode)
            if not stat.S_ISREG(about.st_mode):
                raise KeyFileError(f"cluster_key_file {key_file} is not a file")
            if mode not in (0o600, 0o400):
                raise KeyFileError(
                    f"cluster_key_file {key_file} has mode {mode:04o}; allowed: 0600 and 0400, so that only its owner "
                    "reads it"
                )
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
                f"cluster_key_file {key_file} has {'more than 65536' if len(key) > KEY_BYTES_MAX else len(key)} bytes; "
                f"allowed: {KEY_BYTES_MIN} to {KEY_BYTES_MAX} (kvferry keygen makes one)"
            )
    return keys
