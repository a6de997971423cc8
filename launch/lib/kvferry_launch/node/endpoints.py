"""Parses the endpoints of controllers, by the rules of controller/api/endpoint.cpp, so that an address which the
processes of C++ would refuse is refused before any of them starts.
"""

import os
import re
from dataclasses import dataclass

PATH_BYTES_MAX = 107  # length of the longest path of a Unix socket, without the final zero byte
NETWORK_SCHEMES = ("tcp://", "stream://")
PATH_SCHEMES = ("ipc://", "unix://")
_IPV6 = r"(?=[^%\]]*:)[0-9A-Fa-f:.]+(?:%[^\]]*)?"  # has the form of an address, with or without a scope such as %eth0
_NAME = r"(?:(?![/;:\[\]@])[!-~])+"
_HOST_PORT = re.compile(rf"(?:\[(?P<ipv6>{_IPV6})\]|(?P<name>{_NAME})):(?P<port>[0-9]{{1,5}})")


@dataclass(frozen=True)
class Endpoint:
    """A host and a port, or the path of a Unix socket on this host. `host` is empty if there is a path. An IPv6 address
    in `host` has no brackets.
    """

    host: str = ""
    port: int = 0
    path: str = ""


def parse_endpoint(text: str, schemes: tuple[str, ...] = NETWORK_SCHEMES + PATH_SCHEMES) -> Endpoint | None:
    """Parses one endpoint. Returns None if the text is not an endpoint of one of the schemes."""
    scheme = next((scheme for scheme in schemes if text.startswith(scheme)), None)
    if scheme is None:
        return None
    address = text[len(scheme):]
    if scheme in PATH_SCHEMES:
        is_path = 0 < len(os.fsencode(address)) <= PATH_BYTES_MAX
        if scheme == "unix://":
            is_path &= address.startswith("/") and not address.endswith("/") and "\0" not in address
        return Endpoint(path=address) if is_path else None
    found = _HOST_PORT.fullmatch(address)
    if found is None or int(found["port"]) > 65535:
        return None
    return Endpoint(found["ipv6"] or found["name"], int(found["port"]))


def parse_endpoints(text: str) -> list[Endpoint] | None:
    """Parses the endpoints of a controller's replicas, separated by commas. Returns None if one of them is not valid,
    has port 0 or occurs twice.
    """
    parts = text.split(",")
    found = [parse_endpoint(part) for part in parts]
    endpoints = [endpoint for endpoint in found if endpoint is not None and (endpoint.path or endpoint.port > 0)]
    return endpoints if len(endpoints) == len(set(parts)) == len(parts) else None
