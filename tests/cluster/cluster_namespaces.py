"""Makes hosts that are network namespaces of this machine, joined by a bridge. Each host has its own sshd.

The names of all namespaces begin with "kvferry-". A new run first removes what a killed run left behind. The bridge,
the launcher and the clients are in a namespace too (see `enter()`), so that this machine's own network is never
changed.
"""

import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvferry_launch.paths import REPO
from kvferry_launch.process import ManagedProcess

PREFIX = "kvferry-"
SWITCH, DESK = f"{PREFIX}switch", f"{PREFIX}desk"
NETWORK = "198.18.77"  # a network of the range that RFC 2544 reserves for tests
CLONE_NEWNET = 0x40000000
MOUNTED = Path("/run/netns")
PRIVILEGE_FOLDER = Path("/run/sshd")
SSHD_DEADLINE_S = 20.0
_libc = ctypes.CDLL(None, use_errno=True)


class NamespaceError(Exception):
    """The namespaces can't be made; the message says why in one sentence."""


def ip(*words: str) -> str:
    """Runs the command `ip`. Errors: NamespaceError."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NamespaceError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def why_not() -> str | None:
    """Returns the reason why this machine can't have the namespaces, or None."""
    missing = [tool for tool in ("ip", "ssh", "ssh-keygen") if shutil.which(tool) is None]
    if sshd_binary() is None:
        missing.append("sshd")
    if missing:
        return f"{', '.join(missing)} not installed (Debian: iproute2, openssh-client, openssh-server)"
    if os.geteuid() != 0:
        return "namespaces that sshd can be in want root"
    trial = f"{PREFIX}trial-{os.getpid()}"
    try:
        ip("netns", "add", trial)
        ip("netns", "delete", trial)
    except NamespaceError as error:
        return str(error)
    return None


def sshd_binary() -> str | None:
    return shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin")


def ours() -> list[str]:
    """Returns the existing namespaces whose name begins with our prefix."""
    return [path.name for path in sorted(MOUNTED.glob(f"{PREFIX}*"))] if MOUNTED.is_dir() else []


def remove_all() -> None:
    """Removes all these namespaces and their processes, also those of a run that was killed."""
    for name in ours():
        for pid in ip("netns", "pids", name).split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        ip("netns", "delete", name)


def only_one() -> int:
    """Takes a lock and returns its descriptor; closing it releases the lock. Two runs at once would remove each other's
    namespaces. Errors: NamespaceError.
    """
    lock = os.open(Path(tempfile.gettempdir()) / "kvferry-namespaces.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise NamespaceError("another run has this machine's namespaces") from None
    return lock


class Namespaces:
    """One host for each of `names`, for a `with` statement. Errors: NamespaceError, ProcessError."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self._folder = folder
        self.hosts = {f"{PREFIX}{name}": f"{NETWORK}.{number}" for number, name in enumerate(names, 1)}
        self._sshds: list[ManagedProcess] = []
        self._home: int | None = None

    def __enter__(self) -> "Namespaces":
        self._lock = only_one()
        remove_all()
        try:
            self._lay_cables()
            self._start_sshds()
            self._enter(DESK)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._home is not None:
            _set_namespace(self._home)
            os.close(self._home)
            self._home = None
        for sshd in self._sshds:
            sshd.stop()
        remove_all()
        os.close(self._lock)

    def _lay_cables(self) -> None:
        ip("netns", "add", SWITCH)
        ip("-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        ip("-n", SWITCH, "link", "set", "bridge", "up")
        for number, (name, address) in enumerate([*self.hosts.items(), (DESK, f"{NETWORK}.254")]):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "add", "cable", "type", "veth", "peer", "name", f"port{number}", "netns", SWITCH)
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", SWITCH, "link", "set", f"port{number}", "master", "bridge", "up")

    def _start_sshds(self) -> None:
        folder = self._folder
        if not PRIVILEGE_FOLDER.is_dir():
            PRIVILEGE_FOLDER.mkdir(mode=0o755)  # the service of the Debian package makes this folder at boot
        for name in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        key = (folder / "host_key.pub").read_text()
        (folder / "known_hosts").write_text("".join(f"{address} {key}" for address in self.hosts.values()))
        (folder / "sshd_config").write_text(
            f"Port 22\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized_keys\nPidFile none\n"
            "UsePAM no\nStrictModes no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
            "MaxStartups 100\nMaxSessions 100\nUseDNS no\n")
        (folder / "ssh_config").write_text("".join(
            f"Host {name}\n  HostName {address}\n" for name, address in self.hosts.items())
            + f"Host *\n  IdentityFile {folder}/user_key\n  UserKnownHostsFile {folder}/known_hosts\n")
        binary = sshd_binary()
        assert binary is not None
        for name in self.hosts:
            sshd = ManagedProcess(f"sshd-{name}", ["ip", "netns", "exec", name, binary, "-D", "-e", "-f",
                                                   str(folder / "sshd_config")], {}, folder / f"sshd-{name}.log")
            sshd.start()
            self._sshds.append(sshd)
        deadline = time.monotonic() + SSHD_DEADLINE_S
        for sshd in self._sshds:
            while "Server listening" not in sshd.log_text():
                sshd.fail_if_dead()
                if time.monotonic() > deadline:
                    raise NamespaceError(f"{sshd.name} does not listen: {sshd.log_text()}")
                time.sleep(0.05)

    def _enter(self, name: str) -> None:
        """Moves this process into a namespace. Processes that it starts from now on are there too. This process must
        have only one thread.
        """
        self._home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        there = os.open(MOUNTED / name, os.O_RDONLY | os.O_CLOEXEC)
        _set_namespace(there)
        os.close(there)

    def settings(self) -> dict[str, Any]:
        """Returns the sections of a deployment's YAML for these hosts."""
        return {"on": "ssh", "hosts": self.hosts, "ssh": {
            "user": "root", "path": str(REPO), "python": sys.executable,
            "options": ["-F", str(self._folder / "ssh_config")]}}


def _set_namespace(descriptor: int) -> None:
    if _libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise NamespaceError(f"setns: {os.strerror(ctypes.get_errno())}")
