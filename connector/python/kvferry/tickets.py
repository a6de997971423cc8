"""Tickets: signatures of the addresses in kv_transfer_params, made with a key that only nodes and proxies have.

A router, or any HTTP client, can put addresses into a request. A node with the key uses only addresses that come with a
valid ticket, and HTTP clients can't make a ticket.
"""

import hashlib
import hmac
import json
import os
import re
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

VERSION = 1
LIFETIME_S = 600  # longest time from the signing, by the signer's clock, to the use, by the reader's clock
KEY_BYTES_MIN = 32
KEY_BYTES_MAX = 65536
TICKET = "kvferry_ticket"
# The names of the fields that a ticket signs: HANDOFF for a hand-off, PUSH_TARGET for the target of a push. The names
# are signed too, so that a ticket of one kind is not valid as the other kind.
HANDOFF = ("remote_engine_id", "remote_host", "remote_port", "remote_request_id", "remote_num_tokens",
           "kvferry_fingerprint")  # fmt: skip
PUSH_TARGET = ("engine_id", "endpoint")
_FORM = re.compile(rf"{VERSION}\.([0-9]{{1,12}})\.[0-9a-f]{{64}}")


class KeyFileError(Exception):
    """The key file can't be used; the message is one sentence."""


@dataclass(frozen=True)
class Signer:
    """Signs and checks fields of kv_transfer_params. `clock` returns seconds since 1970."""

    key: bytes
    clock: Callable[[], float] = time.time

    def signed(self, names: tuple[str, ...], params: Mapping[str, Any]) -> dict[str, Any]:
        """Returns `params` with a ticket. `params` must have a string or an integer for each of `names`."""
        return {**params, TICKET: self._ticket(names, params, int(self.clock()) + LIFETIME_S)}

    def refusal(self, names: tuple[str, ...], params: Mapping[str, Any]) -> str | None:
        """Returns why the ticket in `params` is refused, in a few words, or None if it is valid."""
        ticket = params.get(TICKET)
        if ticket is None:
            return "no ticket"
        found = _FORM.fullmatch(ticket) if isinstance(ticket, str) else None
        if found is None or not all(_can_be_signed(params.get(name)) for name in names):
            return "a malformed ticket"
        expiry = int(found[1])
        if not hmac.compare_digest(self._ticket(names, params, expiry), found[0]):
            return "a ticket with a wrong signature"
        return "an expired ticket" if self.clock() > expiry else None

    def http_token(self, role: str = "reader") -> str:
        """Returns the token for the controller's HTTP API that `kvferry token --role ROLE` prints."""
        return hmac.new(self.key, f"kvferry HTTP {role} 1".encode(), hashlib.sha256).hexdigest()

    def tenant_secret(self) -> bytes:
        """Returns the key with which a proxy makes the cache_salt of each tenant."""
        return hmac.new(self.key, b"kvferry tenants 1", hashlib.sha256).digest()

    def _ticket(self, names: tuple[str, ...], params: Mapping[str, Any], expiry: int) -> str:
        signed = json.dumps(["kvferry ticket", VERSION, expiry, [[name, params[name]] for name in names]])
        return f"{VERSION}.{expiry}.{hmac.new(self.key, signed.encode(), hashlib.sha256).hexdigest()}"


def _can_be_signed(value: object) -> bool:
    return type(value) is str or (type(value) is int and abs(value) < 2**63)


def signer_of(key_file: str) -> Signer:
    """Returns a signer with the key in a file. Errors: KeyFileError."""
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
            key = file.read(KEY_BYTES_MAX + 1)
    except OSError as error:
        raise KeyFileError(f"cluster_key_file {key_file} can't be read: {error.strerror}") from error
    if not KEY_BYTES_MIN <= len(key) <= KEY_BYTES_MAX:
        raise KeyFileError(
            f"cluster_key_file {key_file} has {'more than 65536' if len(key) > KEY_BYTES_MAX else len(key)} bytes; "
            f"allowed: {KEY_BYTES_MIN} to {KEY_BYTES_MAX} (kvferry keygen makes one)"
        )
    return Signer(key)
