"""Nodes that speak the controller's protocol over its stream, without kvferry's client."""

from __future__ import annotations

import socket
import struct
from typing import Any

CHUNK = 32
FINGERPRINT = f"model=toy kv_dtype=float32 layers=4 kv_heads=2 head_dim=32 chunk_tokens={CHUNK} format=1"


def pack(value: Any) -> bytes:
    """Encodes a value as MessagePack. Supports only the types that the protocol needs."""
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        return bytes([value]) if value < 128 else b"\xcf" + struct.pack(">Q", value)
    if isinstance(value, str):
        return b"\xd9" + bytes([len(value)]) + value.encode()
    if isinstance(value, bytes):
        return b"\xc5" + struct.pack(">H", len(value)) + value
    size = bytes([0x90 | len(value)]) if len(value) < 16 else b"\xdc" + struct.pack(">H", len(value))
    return size + b"".join(pack(item) for item in value)


class Node:
    """One node that is connected to the controller's stream."""

    def __init__(self, path: str, name: str, role: str, serves: str | None, fingerprint: str = FINGERPRINT,
                 endpoint: str = "", version: str = "7.7.7", name_space: str = "default", host: str = "") -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(10)
        self._socket.connect(path)
        # None: send the shorter message of older nodes
        more = [] if serves is None else [serves, version, 1, 1, "", [host]]
        self.answer = self.ask(
            [[1, 1], name_space, name, 1, role, endpoint or f"tcp://{name}:1", fingerprint, 0, *more])

    def ask(self, message: list[Any]) -> bytes:
        self.say(message)
        size = struct.unpack("<I", self._read(4))[0]
        return self._read(size)

    def say(self, message: list[Any]) -> None:
        encoded = pack(message)
        self._socket.sendall(struct.pack("<I", len(encoded)) + encoded)

    def holds(self, keys: list[bytes]) -> None:
        self.say([[1, 6], 1, 0, True, b"".join(keys), [b"", b"", []], 1, False, False])

    def load(self, num_requests: int, *wall_ms: int) -> None:
        """Sends a heartbeat; without `wall_ms` that of an older release, which does not tell its clock."""
        self.ask([[1, 4], 1, 1, [], num_requests, *wall_ms])

    def report(self, paths: list[list[Any]], failures: list[list[Any]], weights_epoch: str | None = None) -> None:
        """Sends a heartbeat with a report of a pool of ten slots. The lists are those of controller/api/node_report.h.

        Nodes of older releases report no weights epoch.
        """
        newer = [] if weights_epoch is None else [0, 0, 0, weights_epoch]
        self.ask([[1, 4], 1, 0, [], 1, 0, pack([10, 4, 0, 1000, 0, 0, 5, 0, 3, 1, paths, failures, [], *newer])])

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._socket.recv(size - len(data))
            assert piece, "the controller closed the connection"
            data += piece
        return data
