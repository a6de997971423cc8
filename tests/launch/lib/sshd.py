"""A real sshd on 127.0.0.1 with its own keys and configuration. It does not change any file of the machine."""

import getpass
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kvferry_launch.paths import REPO
from kvferry_launch.process import ManagedProcess, free_port

PRIVILEGE_FOLDER = Path("/run/sshd")


def why_not() -> str | None:
    """Returns the reason why sshd can't run on this machine, or None."""
    if sshd_binary() is None or shutil.which("ssh") is None:
        return "openssh-server is not installed"
    if os.geteuid() == 0 and not PRIVILEGE_FOLDER.is_dir():
        PRIVILEGE_FOLDER.mkdir(mode=0o755)  # the service of the Debian package makes this folder at boot
    return None


def sshd_binary() -> str | None:
    return shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin")


class Sshd:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = free_port()
        for name in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        (folder / "known_hosts").write_text("".join(
            f"[{host}]:{self.port} {(folder / 'host_key.pub').read_text()}" for host in ("127.0.0.1", "localhost")))
        (folder / "config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\n"
            f"AuthorizedKeysFile {folder}/authorized_keys\nPidFile {folder}/pid\nUsePAM no\nStrictModes no\n"
            "PasswordAuthentication no\nPermitRootLogin prohibit-password\nMaxStartups 100\nMaxSessions 100\n")
        binary = sshd_binary()
        assert binary is not None
        self._process = ManagedProcess("sshd", [binary, "-D", "-e", "-f", str(folder / "config")], {},
                                       folder / "log")

    def __enter__(self) -> "Sshd":
        self._process.start()
        deadline = time.monotonic() + 10.0
        while "Server listening" not in self._process.log_text():
            self._process.fail_if_dead()
            assert time.monotonic() < deadline, self._process.log_text()
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stop()

    def settings(self) -> dict[str, Any]:
        """Returns the section of a deployment's YAML for this sshd: two "hosts", which are the same machine."""
        key, known = self._folder / "user_key", self._folder / "known_hosts"
        return {"on": "ssh", "hosts": {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1"}, "ssh": {
            "user": getpass.getuser(), "path": str(REPO), "python": sys.executable,
            "options": ["-F", "none", "-p", self.port, "-i", str(key), "-o", f"UserKnownHostsFile={known}"]}}
