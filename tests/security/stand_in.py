"""A node without an engine: a real transport with a region, registered at a controller.

It prints its addresses as one line of JSON. For each line on its stdin, it prints whether the region is unchanged.
"""

import json
import sys

from kvferry.controller import Client
from kvferry.transport import Transport

KEY = bytes(range(16))


def main() -> None:
    controller, key_file, path = sys.argv[1:]
    memory = bytearray(b"k" * 65536)
    with Transport(path=path, listen_host="127.0.0.1") as transport, \
            Client(controller, engine_id="stand-in", fingerprint="model", cluster_key_file=key_file) as client:
        region = transport.register(memory)
        if not client.wait_registered(20):
            sys.exit(f"not registered: {client.status()}")
        client.publish([KEY])
        print(json.dumps({"address": transport.address().hex(), "region": region.exported.hex()}), flush=True)
        for _ in sys.stdin:
            transport.poll()
            print(json.dumps({"same": bytes(memory) == b"k" * 65536, "status": client.status()}), flush=True)


if __name__ == "__main__":
    main()
