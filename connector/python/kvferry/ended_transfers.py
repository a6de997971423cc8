"""The loads, pulls and pushes of a node that have ended, from its flight recorder: for metrics and spans."""

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from kvferry._core import SchedulerNode


class EndedTransfer(NamedTuple):
    """One transfer of a request, of all ranks together. Times are in nanoseconds. A `load` goes from this node's pool
    into engine blocks, a `pull` from another node into the pool, a `push` to another node.
    """

    request_id: str  # empty if the flight recorder has overwritten the request
    kind: str  # load, pull or push
    ended_ago: int
    duration: int
    tokens: int
    chunks: int  # number of chunks that arrived
    bytes: int
    path: str  # name of the transport that was used; empty for loads, and if none was used
    outcome: str  # ok or the name of a cause, as in the label `reason` of kvferry_recomputed_tokens_total
    # The times of a pull's three stages, in the rank that ended last: until the last transfer was submitted; then until
    # the last transfer ended; then until all chunks were in their slots, or verified in frames. The rest of the pull's
    # duration passed between scheduler and workers. A push has only the second stage. It begins when the push's last
    # chunk is saved in this node's pool, or ordered to be pushed if the pool had it, and lasts until the push ends.
    parts: tuple[int, int, int]


class EndedTransfers:
    """Reads each transfer once. Transfers that the flight recorder overwrote before they were read are missing."""

    def __init__(self, node: "SchedulerNode") -> None:
        self._node = node
        self._last = 0

    def take(self) -> list[EndedTransfer]:
        self._last, rows = self._node.transfers_after(self._last)
        return [EndedTransfer(*row) for row in rows]


def sample(transfer: EndedTransfer) -> list[Any] | None:
    """Returns what metrics need of a pull or push by which chunks arrived: direction, path, seconds, bytes, chunks, and
    for a pull the seconds of each stage. Returns None for loads, and if no chunk arrived.
    """
    if transfer.kind == "load" or transfer.chunks == 0:
        return None
    post, wire, unpack = transfer.parts
    if transfer.kind == "push":
        return ["push", transfer.path, wire / 1e9, transfer.bytes, transfer.chunks, {}]
    queue = max(0, transfer.duration - post - wire - unpack)
    stages = {"queue": queue / 1e9, "post": post / 1e9, "wire": wire / 1e9, "unpack": unpack / 1e9}
    return ["pull", transfer.path, transfer.duration / 1e9, transfer.bytes, transfer.chunks, stages]
