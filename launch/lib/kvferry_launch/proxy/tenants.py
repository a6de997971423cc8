"""Gives each tenant a cache_salt of its own, so that no tenant can observe which prompts others have sent. No I/O.

Clients with the same credential, the value of one HTTP header, are one tenant. Chunk keys and the block hashes of
vLLM's prefix cache cover the salt, so KV is found only for requests with the same salt. Salts are HMACs, because a
client that could choose or guess the salt of another tenant would share its KV.
"""

import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvferry_launch.proxy.json_bodies import Body, BodyError

_CLIENT_SALT_MAX = 128  # vLLM's limit, in characters
_NAME_DIGITS, _SHARE_DIGITS = 8, 32


class NoTenantError(Exception):
    """The request has no header with its tenant's credential, or several. The message contains no credential."""


@dataclass(frozen=True)
class Tenant:
    """One tenant. `name`: digits for the log, from which neither the credential nor the salt can be computed."""

    name: str
    _secret: bytes = field(repr=False)
    _credential: str = field(repr=False)

    def salted(self, body: Body) -> Body:
        """Returns a client's request with the tenant's salt. If the client has set `cache_salt`, to keep its own users
        apart, the salt depends on that value too. All salts of a tenant begin with the same digits, by which nodes
        recognise the tenant (tenant_of() in connector/core/tenant_id.h), so that a tenant with many salts gets only one
        share of a pool. Errors: BodyError.
        """
        of_client = body.get("cache_salt")
        if of_client is not None and not (isinstance(of_client, str) and 0 < len(of_client) <= _CLIENT_SALT_MAX):
            raise BodyError(f"cache_salt is not a string of 1 to {_CLIENT_SALT_MAX} characters")
        share = _digest(self._secret, "share", self._credential)[:_SHARE_DIGITS]
        salt = _digest(self._secret, "salt", self._credential, of_client or "")
        return {**body, "cache_salt": f"kvferry.{share}.{salt}"}


@dataclass(frozen=True)
class Tenants:
    """Tells the tenants apart. `header`: the name of the HTTP header with the credential. `secret`: returns the key of
    all digests, which no client has.
    """

    header: str
    secret: Callable[[], bytes] = field(repr=False)

    def tenant_of(self, headers: Mapping[str, str]) -> Tenant:
        """Returns the tenant of a request. `headers`: the request's headers, with names in any case, and with one entry
        for each time that a header was sent. Errors: NoTenantError.
        """
        found = [value.strip() for name, value in headers.items() if name.lower() == self.header.lower()]
        # If the header was sent several times, a server might use another value than the proxy.
        if len(found) != 1 or not found[0]:
            raise NoTenantError(f"the request has {'more than one' if len(found) > 1 else 'no'} header {self.header}, "
                                "which tells the proxy whose request it is")
        secret = self.secret()
        return Tenant(_digest(secret, "name", found[0])[:_NAME_DIGITS], secret, found[0])


def _digest(secret: bytes, *parts: str) -> str:
    return hmac.new(secret, json.dumps(parts).encode(), hashlib.sha256).hexdigest()
