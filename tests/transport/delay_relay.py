"""Forwards every frame between two interfaces after a delay, like a long cable, for kernels without netem.

delay_relay.py MILLISECONDS INTERFACE INTERFACE prints "ready". Frames keep their virtio header, so that large segments,
and checksums that the sender leaves to its interface, stay unchanged.
"""

import contextlib
import select
import socket
import sys
import time
from collections import deque

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
ETH_P_ALL = 3
FRAME_BYTES_MAX = 1 << 17
QUEUE_BYTES = 64 << 20


def packet_socket(interface: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    opened.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    opened.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    opened.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, QUEUE_BYTES)
    opened.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, QUEUE_BYTES)
    opened.bind((interface, ETH_P_ALL))
    opened.setblocking(False)
    return opened


def relay(delay_s: float, ends: list[socket.socket]) -> None:
    """Forwards frames forever."""
    # all frames have the same delay, so the frames are in the order of their times
    under_way: deque[tuple[float, socket.socket, bytes]] = deque()
    other = dict(zip(ends, reversed(ends), strict=True))
    while True:
        timeout = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for source in select.select(ends, [], [], timeout)[0]:
            try:
                for _ in range(64):
                    under_way.append((time.monotonic() + delay_s, other[source], source.recv(FRAME_BYTES_MAX)))
            except OSError:  # no frame waits, or the interface is down
                pass
        while under_way and under_way[0][0] <= time.monotonic():
            _, target, frame = under_way.popleft()
            with contextlib.suppress(OSError):  # the frame is lost, as may happen on any cable; TCP sends it again
                target.send(frame)


if __name__ == "__main__":
    sockets = [packet_socket(interface) for interface in sys.argv[2:4]]
    print("ready", flush=True)
    relay(float(sys.argv[1]) / 1000, sockets)
