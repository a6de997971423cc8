"""kvferry's scheduler and worker nodes, controller client and transport"""

from collections.abc import Callable, Sequence
import enum
from typing import Any


class KvFerryError(RuntimeError):
    pass

class ControllerClient:
    def __init__(self, *, controller: str, engine_id: str, namespace: str, fingerprint: str, endpoint: str, incarnation: int, cluster_key_file: str) -> None: ...

    def publish(self, keys: Sequence[bytes]) -> None:
        """
        Reports that this node has these chunks. The report is sent later if no controller is reachable now.
        """

    def evict(self, keys: Sequence[bytes]) -> None:
        """Reports that this node no longer has these chunks."""

    def lookup_holders(self, keys: Sequence[bytes], timeout: float) -> list[tuple[str, int, str, int, str, bool]]:
        """Same as kvferry.controller.Client.lookup(), but returns plain tuples."""

    def wait_registered(self, timeout: float = 5.0) -> bool:
        """
        Returns False if no controller has accepted this node within `timeout` seconds.
        """

    def status(self) -> str:
        """Returns connecting, registered, closed, or "refused: " and the reason."""

    def close(self) -> None:
        """Unregisters this node. A second call does nothing."""

class Direction(enum.Enum):
    PULL = 0
    """Copies from the peer's memory to this process's."""

    PUSH = 1
    """Copies from this process's memory to the peer's."""

class Region:
    """Registered memory."""

    @property
    def size(self) -> int:
        """Size in bytes."""

    @property
    def exported(self) -> bytes:
        """Opaque bytes with which peers name this region in submit()."""

class Completion:
    """The outcome of one transfer, whose memory is no longer touched."""

    @property
    def transfer(self) -> int:
        """The number that submit() returned."""

    @property
    def ok(self) -> bool:
        """True if all bytes were moved."""

    @property
    def code(self) -> str:
        """The kind of failure, or ok."""

    @property
    def what(self) -> str:
        """A sentence that explains a failure; empty if ok."""

class Notification:
    """Reports that a peer's transfer has ended and its bytes are visible."""

    @property
    def sender(self) -> bytes:
        """The peer's address()."""

    @property
    def body(self) -> bytes:
        """The notification given to submit()."""

class Transport:
    """
    Moves byte ranges between registered memory of two processes. Every method may be called from any thread. Errors raise KvFerryError with one sentence.
    """

    def __init__(self, *, path: str = 'auto', listen_host: str = '', gpu: int | None = None) -> None:
        """
        path: a value of the connector's setting `path`. listen_host: host name or address at which peers connect; empty: every interface. gpu: number of the GPU whose memory can be registered as well.
        """

    def address(self) -> bytes:
        """Returns opaque bytes with which a peer connects to this transport."""

    def describe(self) -> str:
        """Returns a sentence that names the path and library in use."""

    def register(self, buffer: object) -> Region:
        """
        Registers a writable buffer (bytearray, mmap, numpy array, ...), which stays alive until unregister() or close().
        """

    def register_memory(self, address: int, size: int, *, gpu: bool = False) -> Region:
        """
        Registers memory by its address, for example tensor.data_ptr(). The caller must not free it before unregister() or close().
        """

    def unregister(self, region: Region) -> None:
        """
        Raises KvFerryError if a transfer still uses the region; the caller can try again later.
        """

    def connect(self, address: bytes) -> int:
        """
        Returns the peer's number. The connection is made by the first transfer.
        """

    def disconnect(self, peer: int) -> None: ...

    def submit(self, peer: int, direction: Direction, region: Region, remote: bytes, ranges: Sequence[tuple[int, int, int]], *, notification: bytes = ...) -> int:
        """
        Starts a transfer between `region` and the peer's region whose `exported` is `remote`. A range is (local offset, remote offset, bytes). Returns the transfer's number; exactly one Completion follows. The peer receives a non-empty notification after the last byte.
        """

    def cancel(self, transfer: int) -> None:
        """Asks for the end of a transfer. Its Completion still follows."""

    def poll(self) -> list[Completion | Notification]:
        """Returns completions and notifications since the last call."""

    def wait(self, timeout: float) -> list[Completion | Notification]:
        """
        Same as poll(), but waits until there is something to return or `timeout` seconds have passed.
        """

    def close(self) -> None:
        """
        Ends all transfers and releases the registered buffers. A second call does nothing.
        """

    def __enter__(self) -> Transport: ...

    def __exit__(self, *args: object) -> None: ...

def gpu_support() -> str:
    """
    Returns the GPU architectures that this build has kernels for, and the version of its CUDA runtime.
    """

def fingerprint_difference(here: str, there: str) -> str:
    """
    Returns the differences of two fingerprints, field by field; empty if they are equal.
    """

def settings_markdown() -> str:
    """Returns the settings as a Markdown table."""

def version() -> str:
    """Returns the version of this kvferry."""

def check_config(extra_json: str) -> dict[str, Any]:
    """
    Returns the settings in effect. Raises a KvFerryError that names the wrong key or value.
    """

def signature_of(secret: bytes, text: bytes) -> bytes:
    """Signs a text with a certificate's secret key of 32 bytes."""

def is_signed_by(certificate: bytes, text: bytes, signature: bytes) -> bool:
    """
    Returns True if the signature of the text was made with the secret key of this certificate of 32 bytes.
    """

def certificate_public(secret: bytes) -> bytes:
    """
    Returns the public key of a certificate with this secret key, 32 bytes.
    """

class SchedulerNode:
    def __init__(self, *, extra_json: str, engine_id: str, role: str, fingerprint: str, groups: Sequence[tuple[int, int, bool]], whole_blocks: bool, keeps_state: bool, checkpoint_alignment: int, runs_ahead: bool, start_timeout_ms: int, on_device: bool = False, prepared_tokens_max: int = 0, conversion: str = '') -> None: ...

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...

    def attach_workers(self, hellos: Sequence[bytes]) -> None: ...

    def add_request(self, *, request_id: str, tokens: list[int], num_prompt_tokens: int, digests: Sequence[bytes], extras: str, items: Sequence[tuple[int, int, str]], cacheable: bool, handoff: bool, source: tuple[str, str, int, str] | None, push_to: str | None = None, arrived_ms: int = 0, trace: str = '', cache_salt: str = '', prepares: bool = False) -> None: ...

    def update_tokens(self, request_id: str, keep: int, new_tokens: list[int]) -> None: ...

    def num_tokens(self, request_id: str) -> int: ...

    def lookup(self, request_id: str, num_local: int) -> tuple[int | None, bool]:
        """
        Returns two values: the number of tokens after num_local that can be loaded (None if the lookup is pending), and True if the load would be asynchronous.
        """

    def allocated(self, request_id: str, num_external: int, block_ids: Sequence[Sequence[int]]) -> None: ...

    def build_step(self, admitted: Sequence[tuple[str, int, int, Sequence[Sequence[int]] | None]], running_ids: list[str], running_computed: list[int], running_blocks: list[Sequence[list[int]] | None], resumed: set[str], num_scheduled: dict[str, int], preempted: Sequence[str], tokens_of: Callable[[str, int], list[int]]) -> bytes:
        """
        Returns the step's plan. Running requests are passed as in vLLM's CachedRequestData; tokens_of(id, known) returns a scheduled request's tokens from `known` on.
        """

    def rest(self) -> None:
        """Pauses an engine that has only preparations, for at most 8 ms."""

    def finished(self, request_id: str, num_computed: int, block_ids: Sequence[Sequence[int]], aborted: bool) -> dict[str, Any]: ...

    def worker_report(self, report: bytes) -> None: ...

    def has_unreported_saves(self) -> bool: ...

    def has_unreported_loads(self) -> bool: ...

    def num_engine_purges(self) -> int:
        """
        Returns the number of purges, until the last lookup() or build_step(), of this node or of KV that the engine had loaded. The engine's own cached blocks may have purged KV.
        """

    def reset_cache(self) -> None: ...

    def set_weights_epoch(self, epoch: str) -> None:
        """
        Sets the weights epoch that the extras of requests name. The node reports it to the controller.
        """

    def track_pool(self) -> None: ...

    def take_pool_changes(self) -> tuple[bool, list[tuple[bytes, bool, bool]]]: ...

    def take_named_chunks(self) -> list[tuple[str, bytes, int, int]]: ...

    def metrics(self) -> dict[str, float]: ...

    def take_metrics(self) -> dict[str, float] | None: ...

    def transfers_after(self, arg: int, /) -> tuple[int, list[tuple[str, str, int, int, int, int, int, str, str, tuple[int, int, int]]]]: ...

    def shutdown(self) -> None: ...

class KvLayout:
    def __init__(self, *, layers: Sequence[tuple[str, int, tuple[int, int, int, int, int], tuple[int, int, int, int, int]]], num_kv_heads: int, head_dim: int, element_bytes: int, planes: int, block_tokens: int, num_blocks: int) -> None: ...

class WorkerNode:
    def __init__(self, *, extra_json: str, rank: int, label: str, layouts: Sequence[KvLayout], gpu: int = -1, shard: tuple[int, int, int, int] | None = None, types: Sequence[tuple[str, str]] = [], parts: tuple[int, Sequence[int], Sequence[Sequence[tuple[int, int, int]]]] | None = None) -> None:
        """
        types: for each layout, the types of its elements in blocks and in chunks; empty: they are equal.
        parts: the rank's first layer, the kind of each of its layers, and of each kind the parts: their bytes on all ranks together (0: padding), the place of the rank's first byte, and the number of the rank's bytes. None: `shard` says all.
        """

    def handshake(self) -> bytes: ...

    def begin_step(self, plan: bytes, stream: int = 0) -> None: ...

    def load(self, stream: int = 0) -> None: ...

    def wants_layers(self) -> bool: ...

    def save_layer(self, layer: int, stream: int = 0) -> None: ...

    def save(self, stream: int = 0) -> None: ...

    def take_report(self) -> bytes | None: ...

    def take_failed_blocks(self) -> list[int]: ...

    def take_finished_loads(self) -> list[tuple[str, bool]]: ...

    def shutdown(self) -> None: ...
