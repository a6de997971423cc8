"""Two processes with a cache of 64 blocks each: the parent pulls two of the child's blocks and pushes a block."""

from multiprocessing import Pipe, Process, connection

from kvferry.transport import Completion, Direction, Transport

BLOCK = 16 << 10


def child(pipe: connection.Connection) -> None:
    cache = bytearray(b"".join(bytes([number]) * BLOCK for number in range(64)))
    with Transport() as transport:
        pipe.send((transport.address(), transport.register(cache).exported))
        pipe.recv()  # waits until the parent is done
    assert cache[5 * BLOCK : 6 * BLOCK] == b"p" * BLOCK


if __name__ == "__main__":
    here, there = Pipe()
    Process(target=child, args=(there,)).start()
    address, exported = here.recv()
    cache = bytearray(b"p" * 64 * BLOCK)
    with Transport() as transport:
        region, peer = transport.register(cache), transport.connect(address)
        for direction, blocks in (Direction.PULL, [(7, 1), (3, 60)]), (Direction.PUSH, [(40, 5)]):
            ranges = [(mine * BLOCK, its * BLOCK, BLOCK) for mine, its in blocks]
            transport.submit(peer, direction, region, exported, ranges)
            assert all(isinstance(event, Completion) and event.ok for event in transport.wait(10))
        here.send("done")
    print("every byte is right" if cache[7 * BLOCK] == 1 and cache[4 * BLOCK - 1] == 60 else "a byte is wrong")
