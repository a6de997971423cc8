"""kvferry's transport: moves byte ranges between registered memory of two processes, on one host or two.

    with Transport() as transport:
        region = transport.register(bytearray(1 << 20))
        peer = transport.connect(address)  # the other process sends its address() and its Region.exported
        transport.submit(peer, Direction.PULL, region, exported, [(0, 0, 4096)])
        for event in transport.wait(5.0):
            ...

launch/examples/move_blocks.py is a complete program. Failures raise KvFerryError.
"""

from kvferry._core import Completion, Direction, KvFerryError, Notification, Region, Transport

__all__ = ["Completion", "Direction", "KvFerryError", "Notification", "Region", "Transport"]
