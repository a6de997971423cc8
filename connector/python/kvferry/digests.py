"""Digests of whole files, kept on disk so that a restart reads gigabytes of weights only if they changed."""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vllm.logger import init_logger

logger = init_logger(__name__)

_PIECE_BYTES = 16 * 2**20  # size of the pieces in which files are hashed
_READ_BYTES = 2**20
_THREADS_MAX = 16
_SLOW_BYTES = 2**30  # from this total size on, a log line says that files are being hashed


def digest_of_files(files: Sequence[Path], what: str) -> str:
    """Returns a digest of the names and of the whole contents of the files, equal on every host and in any folder.

    `what` names the files in the log. Errors: OSError.
    """
    digests = {file: _recall(file) for file in files}
    digests |= _hash([file for file in files if digests[file] is None], what)
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        digest.update(f"{file.name}:{digests[file]};".encode())
    return digest.hexdigest()[:32]


def signature_of(file: Path) -> str:
    """Returns, without reading the file, a text that changes when the file's content changes."""
    found = file.stat()  # stat() follows symbolic links
    return f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}"


def _hash(files: list[Path], what: str) -> dict[Path, str]:
    total_bytes = sum(file.stat().st_size for file in files)
    threads = min(_THREADS_MAX, len(os.sched_getaffinity(0)))
    if total_bytes >= _SLOW_BYTES:
        logger.warning("kvferry: reading %.1f GB of %s with %d threads, to hash them", total_bytes / 1e9, what, threads)
    found = {}
    with ThreadPoolExecutor(threads, thread_name_prefix="kvferry-digest") as pool:
        for file in files:
            signature = signature_of(file)
            offsets = range(0, max(1, file.stat().st_size), _PIECE_BYTES)
            digest = hashlib.sha256()
            for piece in pool.map(_digest_of_piece, [file] * len(offsets), offsets):
                digest.update(piece)
            found[file] = digest.hexdigest()
            if signature == signature_of(file):
                _remember(file, signature, found[file])
    return found


def _digest_of_piece(file: Path, offset: int) -> bytes:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_READ_BYTES))
    with file.open("rb", buffering=0) as stream:
        stream.seek(offset)
        left = _PIECE_BYTES
        while left > 0 and (size := stream.readinto(buffer[:left])):
            digest.update(buffer[:size])
            left -= size
    return digest.digest()


# ---- the digests on disk: one entry for each hashed file, named by a hash of the file's path ----


def _entry(file: Path) -> Path | None:
    """Returns the path of the file's stored digest, or None if there is no folder that this user alone can write to."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(root) if root else Path.home() / ".cache") / "kvferry" / "digests"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _only_ours(folder.stat()):
            _warn_once(f"{folder} belongs to another user or can be written by others")
            return None
        return folder / hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:32]
    except (OSError, RuntimeError) as error:  # a RuntimeError means that the home directory is unknown
        _warn_once(str(error))
        return None


def _only_ours(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _recall(file: Path) -> str | None:
    entry = _entry(file)
    if entry is None:
        return None
    try:
        with entry.open() as stream:
            signature, _, digest = stream.read().partition("\n") if _only_ours(os.fstat(stream.fileno())) else ("",) * 3
    except (OSError, ValueError):  # there is no entry, or it can't be read as text
        return None
    return digest if len(digest) == 64 and signature == signature_of(file) else None


def _remember(file: Path, signature: str, digest: str) -> None:
    entry = _entry(file)
    if entry is None:
        return
    try:
        handle, name = tempfile.mkstemp(dir=entry.parent)  # mkstemp() creates the file with mode 0600
        try:
            with os.fdopen(handle, "w") as stream:
                stream.write(f"{signature}\n{digest}")
            Path(name).replace(entry)
        except OSError:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise
    except OSError as error:
        _warn_once(str(error))


def _warn_once(reason: str) -> None:
    logger.warning_once("kvferry: digests of weights and adapters can't be stored (%s), so each start reads the files",
                        reason)  # fmt: skip
