"""Parses the endpoints of controllers. The processes that use the endpoints check them again, by the stricter rules of
controller/api/endpoint.cpp.
"""

import os
import re
from dataclasses import dataclass

PATH_BYTES_MAX = 107  # length of the longest path of a Unix socket, without the final zero byte
NETWORK_SCHEMES = ("tcp://", "stream://")
PATH_SCHEMES = ("ipc://", "unix://")


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
        is_path = 0 < len(os.fsencode(address)) <= PATH_BYTES_MAX and (scheme == "ipc://" or address.startswith("/"))
        return Endpoint(path=address) if is_path else None
    host, _, port = address.rpartition(":")
    has_brackets = host.startswith("[") and host.endswith("]")
    if has_brackets:
        host = host[1:-1]
    is_host = bool(host) and (has_brackets or ":" not in host) and "/" not in host and " " not in host
    is_port = re.fullmatch("[0-9]{1,5}", port) is not None and int(port) <= 65535
    return Endpoint(host, int(port)) if is_host and is_port else None


def parse_endpoints(text: str) -> list[Endpoint] | None:
    """Parses the endpoints of a controller's replicas, separated by commas. Returns None if one of them is not valid or
    has port 0.
    """
    found = [parse_endpoint(part) for part in text.split(",")]
    endpoints = [endpoint for endpoint in found if endpoint is not None and (endpoint.path or endpoint.port > 0)]
    return endpoints if len(endpoints) == len(found) else None
