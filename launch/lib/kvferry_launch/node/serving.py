"""Functions for a node's HTTP server on this host: reserve its port, find its address, watch its health.

This module uses only the standard library.
"""

import os
import select
import socket
import ssl
import time
import urllib.error
import urllib.request

ANY = ("0.0.0.0", "::", "*", "")
LOOPBACK = "127.0.0.1"
TEST_NET = "192.0.2.1"  # an address that no host has; used to find the default route; nothing is sent to it
POLL_EVERY_S = 0.5
ANSWER_WITHIN_S = 5.0
MISSES_UNTIL_REPORTED = 3

_reserved: list[socket.socket] = []  # the sockets that reserve ports; they stay open after exec() too


def is_any(host: str) -> bool:
    return host in ANY


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def bound_socket(host: str | None, port: int, *options: int) -> socket.socket:
    """Returns a TCP socket bound to `host` (None: all addresses) and `port`. Errors: OSError, UnicodeError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM,
                                                            flags=socket.AI_PASSIVE)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        for option in (socket.SO_REUSEADDR, *options):
            bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def reserve_port(host: str) -> int:
    """Returns a free port, and reserves it with a bound socket that does not listen. exec() does not close the socket.

    vLLM can bind to the reserved port too, because it sets SO_REUSEPORT; programs that don't set this option can't.
    Errors: OSError or UnicodeError if `host` is not an address of this host.
    """
    holder = bound_socket(None if is_any(host) and host != "::" else host, 0, socket.SO_REUSEPORT)
    holder.set_inheritable(True)
    _reserved.append(holder)
    return int(holder.getsockname()[1])


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "localhost")


def own_address(host: str, port: int) -> str | None:
    """Returns this host's address on the route to `host`; None if there is no route or `host` can't be resolved. Sends
    nothing to `host`.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):  # UnicodeError: a part of the name is empty or too long
        return None


def default_address() -> str | None:
    """Returns this host's address on its default route; None if there is no such route."""
    return own_address(TEST_NET, 9)


def resolved(host: str) -> str:
    """Returns the address that belongs to one of this host's names, because kvferry advertises only addresses.

    On Debian, a host's own name resolves to a loopback address. If another name than localhost does so, returns the
    address on the default route instead, if there is such a route. A name that can't be resolved is returned unchanged.
    """
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        return host
    if is_loopback(address) and host not in (address, "localhost"):
        return default_address() or address
    return address


def answers(url: str, any_status: bool = False) -> bool:
    """Returns True if the server answers a GET of `url` with status 200, or with any status if `any_status`. If the URL
    is of https, the certificate is not checked, because it need not be valid for the address that this host asks.
    """
    lenient = None
    if url.startswith("https:"):
        lenient = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        lenient.check_hostname, lenient.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_WITHIN_S, context=lenient) as answer:
            return any_status or bool(answer.status == 200)
    except urllib.error.HTTPError:
        return any_status
    except (OSError, ValueError):
        return False


def report_health(role: str, url: str, local_url: str) -> None:
    """Starts a process that reports the health of this node's server as lines on stdout.

    The new process prints "kvferry ROLE node serves at URL" when /health begins to answer, and "... node does not
    answer at URL" when /health no longer answers. The new process ends when the calling process ends, but continues
    after an exec() in the calling process.
    """
    us = os.pidfd_open(os.getpid())
    if (child := os.fork()) != 0:
        os.close(us)
        os.waitpid(child, 0)
        return
    # watch() runs in a grandchild process, whose parent ends here. The calling process becomes the server by exec(),
    # and the server waits for all its children, so it must not have a child that it did not start itself.
    if os.fork() != 0:
        os._exit(0)
    for holder in _reserved:
        holder.close()
    try:
        watch(us, role, url, local_url)
    finally:
        os._exit(0)


def watch(pidfd: int, role: str, url: str, local_url: str) -> None:
    """Prints a line at each change of the server's health, until the process of `pidfd` ends."""
    up, misses = False, 0
    while not select.select([pidfd], [], [], POLL_EVERY_S if not up else 2.0)[0]:
        if answers(f"{local_url}/health"):
            misses = 0
            if not up:
                up = True
                print(f"kvferry {role} node serves at {url}", flush=True)
        elif up and (misses := misses + 1) >= MISSES_UNTIL_REPORTED:
            up = False
            print(f"kvferry {role} node does not answer at {url}", flush=True)


def wait_idle(url: str, timeout_s: float) -> bool:
    """Waits until a vLLM server has reported twice in a row that it has no requests. Returns False if that takes longer
    than `timeout_s`.

    Returns True also if the server does not answer, or does not report how many requests it has.
    """
    deadline, idle = time.monotonic() + timeout_s, 0
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/metrics", timeout=ANSWER_WITHIN_S) as answer:
                lines = answer.read().decode(errors="replace").splitlines()
        except (OSError, ValueError):
            return True
        busy = sum(float(line.rsplit(" ", 1)[1]) for line in lines
                   if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting{",
                                       "vllm:num_requests_waiting ")))
        idle = 0 if busy else idle + 1
        if idle >= 2:
            return True
        time.sleep(POLL_EVERY_S)
    return False
