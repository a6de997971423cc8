"""The HTTP server of a node, seen from its host: its reserved port, its address, its health.

Standard library only.
"""

import os
import select
import socket
import time
import urllib.error
import urllib.request

ANY = ("0.0.0.0", "::", "*", "")
LOOPBACK = "127.0.0.1"
TEST_NET = "192.0.2.1"  # routed like any other address; nothing is sent to it
POLL_EVERY_S = 0.5
ANSWER_WITHIN_S = 5.0
MISSES_UNTIL_REPORTED = 3

_reserved: list[socket.socket] = []  # sockets of reserved ports, kept open, also across exec


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
    """Returns a free port and keeps a socket bound to it, without listening, also across exec.

    vLLM binds with SO_REUSEPORT and can share the port; other programs can't. Errors: OSError or UnicodeError if the
    host has no such address.
    """
    holder = bound_socket(None if is_any(host) and host != "::" else host, 0, socket.SO_REUSEPORT)
    holder.set_inheritable(True)
    _reserved.append(holder)
    return int(holder.getsockname()[1])


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "localhost")


def own_address(host: str, port: int) -> str | None:
    """Returns this host's address on the route to another host; None if there is no route. Sends nothing."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):  # UnicodeError: the name has an empty or a too long part
        return None


def default_address() -> str | None:
    """Returns this host's address on its default route; None if there is no such route."""
    return own_address(TEST_NET, 9)


def resolved(host: str) -> str:
    """Returns the address for a name of this host, because kvferry advertises only addresses.

    Debian gives a host's own name a loopback address; the address of the default route takes its place. A name that
    can't be resolved stays as it is.
    """
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        return host
    if is_loopback(address) and host not in (address, "localhost"):
        return default_address() or address
    return address


def answers(url: str, any_status: bool = False) -> bool:
    """Returns True if a GET is answered with status 200, or with any status if `any_status`."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_WITHIN_S) as answer:
            return any_status or bool(answer.status == 200)
    except urllib.error.HTTPError:
        return any_status
    except (OSError, ValueError):
        return False


def report_health(role: str, url: str, local_url: str) -> None:
    """Starts a process that reports the health of this node's server as lines on stdout.

    It prints "kvferry ROLE node serves at URL" when /health begins to answer and "... node does not answer at URL" when
    /health no longer answers. It ends when the calling process ends; exec() in the calling process does not end it.
    """
    us = os.pidfd_open(os.getpid())
    if (child := os.fork()) != 0:
        os.close(us)
        os.waitpid(child, 0)
        return
    # The process that runs watch() is a grandchild, so that the server, which waits for its own children, has no
    # unknown child.
    if os.fork() != 0:
        os._exit(0)
    for holder in _reserved:
        holder.close()
    try:
        watch(us, role, url, local_url)
    finally:
        os._exit(0)


def watch(pidfd: int, role: str, url: str, local_url: str) -> None:
    """Reports changes of health until the process of `pidfd` ends."""
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
    """Waits until a vLLM server has reported no requests twice in a row; returns False if the limit passes first.

    Also returns True if the server reports no number or does not answer.
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
