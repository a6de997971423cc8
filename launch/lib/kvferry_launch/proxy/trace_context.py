"""Reads the W3C trace context of a client's request, or makes one, and writes it into the headers for servers. No I/O.

A header that does not have the form of https://www.w3.org/TR/trace-context is not passed on. A malformed `traceparent`
is replaced by a new one, without a `tracestate`; a malformed `tracestate` is left out.
"""

import re
import secrets
from dataclasses import dataclass, replace
from typing import Protocol

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
NAMES = (TRACEPARENT, TRACESTATE)

_TRACEPARENT = re.compile(r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-"
                          r"(?P<flags>[0-9a-f]{2})(?P<more>-[!-~]*)?")
_TRACEPARENT_MAX = 256  # longest traceparent that is read, in characters; later versions may be longer than version 00
_KNOWN_FLAGS = 0b11  # the flags for "sampled" and "random trace id"
_SAMPLED = 0b01
# Matches a member of tracestate: KEY=VALUE, without a comma or an equals sign in VALUE.
_MEMBER = re.compile(r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[ -+\--<>-~]{0,255}[!-+\--<>-~]")
_MEMBERS_MAX = 32
_STATE_MAX = 512  # longest tracestate that is passed on, in characters


class Headers(Protocol):
    """The headers of a request, as aiohttp has them."""

    def getall(self, name: str, default: list[str], /) -> list[str]:
        """Returns the values of all headers with this name."""


@dataclass(frozen=True)
class TraceContext:
    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16 hexadecimal digits: the span to which the next spans belong
    flags: int = _SAMPLED
    state: str = ""  # data of tracing systems, which the proxy passes on without using it

    def headers(self) -> dict[str, str]:
        made = {TRACEPARENT: f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"}
        return made | {TRACESTATE: self.state} if self.state else made

    def below(self, span_id: str, flags: int) -> "TraceContext":
        """Returns the context for requests that belong to the span `span_id` of the same trace."""
        return replace(self, span_id=span_id, flags=flags)


def new_context() -> TraceContext:
    return TraceContext(secrets.token_hex(16), secrets.token_hex(8))


def of_client(headers: Headers) -> TraceContext | None:
    """Returns the client's trace context, or None if the client sent none that is well-formed."""
    sent = headers.getall(TRACEPARENT, [])
    if len(sent) != 1 or len(sent[0]) > _TRACEPARENT_MAX or (found := _TRACEPARENT.fullmatch(sent[0])) is None:
        return None
    is_version_0 = found["version"] == "00"
    if found["version"] == "ff" or (is_version_0 and found["more"] is not None):
        return None
    if not int(found["trace"], 16) or not int(found["span"], 16):
        return None
    return TraceContext(found["trace"], found["span"], int(found["flags"], 16) & _KNOWN_FLAGS,
                        _state(headers.getall(TRACESTATE, [])))


def _state(sent: list[str]) -> str:
    """Returns the members of the headers `tracestate`, separated by commas. Returns "" if a member is malformed, if two
    have the same key, if there are too many members, or if they are too long together.
    """
    members = [member.strip(" \t") for header in sent for member in header.split(",")]
    members = [member for member in members if member]
    state = ",".join(members)
    keys = {member.partition("=")[0] for member in members}
    is_good = len(state) <= _STATE_MAX and len(members) <= _MEMBERS_MAX and len(keys) == len(members)
    return state if is_good and all(_MEMBER.fullmatch(member) for member in members) else ""
