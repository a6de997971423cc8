"""The cluster key, from which the nodes and proxies of a deployment derive the keys of their connections and tickets.
"""

import contextlib
import os
import secrets
from pathlib import Path

KEY_ENV = "KVFERRY_CLUSTER_KEY_FILE"
KEY_NAME = "cluster.key"
MEMBERS_NAME = "kvferry.members"  # name of the list of members, which is in the same folder as the key


def ensure_key(file: Path) -> Path:
    """Writes a new key to a file that only this user can read, unless the file exists. Returns the file's absolute
    path.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        key = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(key, "w") as text:
            text.write(secrets.token_hex(32) + "\n")
    return file.resolve()
