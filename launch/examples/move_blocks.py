"""Two processes with a cache of 64 blocks each: the parent pulls two of the child's blocks and pushes one back."""

from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection

from kvferry.transport import Completion, Direction, Notification, Transport

BLOCK = 16 << 10


def child(pipe: Connection) -> None:
    cache = bytearray(b"".join(bytes([number]) * BLOCK for number in range(64)))
    with Transport() as transport:
        pipe.send((transport.address(), transport.register(cache).exported))
        while not any(isinstance(event, Notification) for event in transport.wait(10)):
            pass
        assert cache[5 * BLOCK : 6 * BLOCK] == b"p" * BLOCK
        pipe.recv()  # the parent is done


if __name__ == "__main__":
    here, there = Pipe()
    Process(target=child, args=(there,)).start()
    address, exported = here.recv()
    with Transport() as transport:
        cache = bytearray(b"p" * 64 * BLOCK)
        region, peer = transport.register(cache), transport.connect(address)
        moves = (Direction.PULL, [(7, 1), (3, 60)], b""), (Direction.PUSH, [(40, 5)], b"pushed")
        for direction, blocks, note in moves:
            ranges = [(mine * BLOCK, its * BLOCK, BLOCK) for mine, its in blocks]
            transport.submit(peer, direction, region, exported, ranges, notification=note)
            assert all(isinstance(event, Completion) and event.ok for event in transport.wait(10))
        here.send("done")
    print("every byte is right" if cache[7 * BLOCK] == 1 and cache[4 * BLOCK - 1] == 60 else "a byte is wrong")
