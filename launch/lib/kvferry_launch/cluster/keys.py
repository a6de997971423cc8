"""The keys of a deployment's nodes: the controller has the cluster key, and each other node a member key of its own,
unless nodes have no member keys (see Planner.has_member_keys). `kvferry keygen` makes the member keys in the run
folder, where users change keys by `kvferry keygen --revoke` and by the steps of a rotation.
"""

import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from kvferry_launch.cluster.plan import ENGINE_ROLES, Node, key_name
from kvferry_launch.cluster.schema import SpecError
from kvferry_launch.node.cluster_key import KEY_NAME, MEMBERS_NAME, ensure_key

MEMBERS_HEAD = "kvferry members 1\n"
ROLES = {**dict.fromkeys(ENGINE_ROLES, "worker"), "router": "reader"}
OURS = re.compile(rf"(?:{'|'.join(ENGINE_ROLES)})-\d+|router")  # names of members that the launcher makes
SETTLED_AFTER_S = 2.0  # time from a rotation's first changed file until all its files are certainly written


class Keys:
    """The keys in `folder`. `keygen`: the words of the command `kvferry keygen`; empty if nodes have no member keys."""

    def __init__(self, folder: Path, keygen: Sequence[str]) -> None:
        self._folder = folder
        self._keygen = keygen
        self._seen: tuple[str, ...] = ()
        self._look_until = 0.0
        self._looked = ""  # the latest text of the list of members that look() or _use() got
        self._names: set[str] = set()  # the names in the list of members that is in use
        self._line = "members "  # the list of members that is in use, as a line for guard.py

    def begin(self, nodes: Sequence[Node]) -> None:
        """Makes the cluster key if there is none. If nodes have member keys, also revokes the keys that an earlier run
        made for its nodes, and makes keys for `nodes`. Members that users have added keep their keys. Errors:
        SpecError, OSError.
        """
        ensure_key(self._folder / KEY_NAME)
        if self._keygen:
            self._change("--revoke", [name for name in names_in(self._read()) if OURS.fullmatch(name)])
        self.add(nodes)

    def add(self, nodes: Sequence[Node]) -> None:
        """Makes a member key for each of the nodes but the controller, if nodes have member keys. Errors: SpecError."""
        for role in sorted(set(ROLES.values())):
            names = [node.name for node in nodes if ROLES.get(node.role) == role]
            # An interrupted run may have left a key file of a name that is not in the list of members. keygen would not
            # overwrite this file.
            for name in names if self._keygen else ():
                (self._folder / f"{name}.key").unlink(missing_ok=True)
            self._change("--add-node", names, "--role", role)
        self._use(self._read())

    def remove(self, node: Node) -> None:
        """Revokes the key of a node that has ended for good. Errors: SpecError."""
        if node.name in names_in(self._read()):
            self._change("--revoke", [node.name])

    def look(self) -> bool:
        """Reads the list of members if look() has found within the last SETTLED_AFTER_S that this list or the file of
        the cluster key has changed. Returns True if the list was read; then nodes' keys may have changed too.
        """
        seen = tuple(stamp_of(self._folder / name) for name in (KEY_NAME, MEMBERS_NAME))
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._look_until = seen, now + SETTLED_AFTER_S
        if now > self._look_until:
            return False
        try:
            found = self._read()
        except SpecError:
            return False
        # This function uses a list only if it is complete and the previous call read the same list. So a list that is
        # only half written, or a file that is no list of members, revokes no key.
        if found == self._looked and found.startswith(MEMBERS_HEAD) and found.endswith("\n"):
            self._use(found)
        self._looked = found
        return True

    def is_revoked(self, node: Node) -> bool:
        return bool(self._keygen) and node.role in ROLES and node.name not in self._names

    def lines(self, node: Node) -> list[str]:
        """Returns the lines with the list of members and the node's key that guard.py needs on a host without this
        folder. Returns no lines if the key can't be read.
        """
        try:
            key = (self._folder / key_name(node, bool(self._keygen))).read_bytes()
        except OSError:
            return []
        return [self._line, f"key {key.hex()}"]

    def _use(self, members: str) -> None:
        self._looked, self._names, self._line = members, set(names_in(members)), f"members {members.encode().hex()}"

    def _read(self) -> str:
        try:
            return (self._folder / MEMBERS_NAME).read_text()
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError(f"can't read the list of members {self._folder / MEMBERS_NAME}: "
                            f"{getattr(error, 'strerror', None) or error}") from error

    def _change(self, flag: str, names: list[str], *more: str) -> None:
        if not names or not self._keygen:
            return
        run_keygen([*self._keygen, *repeated(flag, names), *more, str(self._folder / KEY_NAME)], "nodes")


def run_keygen(command: Sequence[str], whose: str, cwd: Path | None = None) -> None:
    """Runs `kvferry keygen`. `whose`: "nodes" or "pods", for the message of an error. Errors: SpecError."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    except OSError as error:
        raise SpecError(f"can't change the {whose}' keys, because {command[0]} can't be run: "
                        f"{error.strerror}") from error
    if done.returncode != 0:
        raise SpecError(f"can't change the {whose}' keys: {' '.join(done.stderr.split())}")


def repeated(flag: str, names: Sequence[str]) -> list[str]:
    return [word for name in names for word in (flag, name)]


def names_in(members: str) -> list[str]:
    return [line.split(" ")[0] for line in members.splitlines()[1:]]


def stamp_of(file: Path) -> str:
    try:
        about = file.stat()
    except OSError:
        return ""
    return f"{about.st_ino} {about.st_mtime_ns} {about.st_size}"
