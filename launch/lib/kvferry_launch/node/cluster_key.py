"""The key with which the nodes and proxies of one deployment sign the addresses that they give to each other."""

import contextlib
import os
import secrets
from pathlib import Path

KEY_ENV = "KVFERRY_CLUSTER_KEY_FILE"
KEY_NAME = "cluster.key"
MEMBERS_NAME = "kvferry.members"  # the list of members beside the key


def ensure_key(file: Path) -> Path:
    """Writes a new key to the file, unless the file exists. Only this user can read the file. Returns the file's
    absolute path.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        key = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(key, "w") as text:
            text.write(secrets.token_hex(32) + "\n")
    return file.resolve()
