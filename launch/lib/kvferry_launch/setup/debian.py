"""Installs the Debian packages of launch/debian-packages.txt."""

import os
import shutil
import subprocess
import sys

from kvferry_launch.paths import LAUNCH, LOGS
from kvferry_launch.progress import Step
from kvferry_launch.setup.commands import SetupError, run_logged


def debian_packages(tests: bool) -> list[str]:
    """Returns the names in launch/debian-packages.txt; the packages that only tests need are included if `tests`."""
    names = []
    for line in (LAUNCH / "debian-packages.txt").read_text().splitlines():
        name, _, comment = line.partition("#")
        if name.strip() and (tests or comment.strip() != "tests"):
            names.append(name.strip())
    return names


def ensure_debian_packages(tests: bool) -> None:
    """Installs the packages that dpkg doesn't list as installed, as root or through sudo. Errors: SetupError."""
    wanted = debian_packages(tests)
    if shutil.which("dpkg-query") is None or shutil.which("apt-get") is None:
        if shutil.which("cmake") and shutil.which("ninja"):
            return  # on another distribution, CMake reports what is missing
        raise SetupError("this host lacks apt-get or dpkg-query, so set-up can't install packages; install what "
                         "launch/debian-packages.txt lists, or its equivalents, by hand, at least cmake and ninja")
    listed = subprocess.run(["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *wanted],
                            capture_output=True, text=True, check=False).stdout
    present = {line.split()[0] for line in listed.splitlines() if line.endswith(" installed")}
    missing = [name for name in wanted if name not in present]
    if not missing:
        return
    root: list[str] = []
    if os.geteuid() != 0:
        if shutil.which("sudo") is None:
            raise SetupError("this user is not root and has no sudo to install Debian packages; ask an administrator "
                             f"to run: apt-get install {' '.join(missing)}")
        root = ["sudo"] if sys.stdin.isatty() else ["sudo", "-n"]
    log = LOGS / "apt.log"
    apt = [*root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q"]
    with Step(f"Debian packages ({len(missing)} missing)") as step:
        step.update(0.0, "reading package lists")
        run_logged("apt-get update", [*apt, "update"], log, tick=step.update)

        def on_line(line: str) -> None:
            # APT::Status-Fd writes lines like "dlstatus:3:41.5:Retrieving ..." and "pmstatus:cmake:62.5:Unpacking ...".
            kind, _, rest = line.partition(":")
            if kind in ("dlstatus", "pmstatus"):
                _, percent, note = [*rest.split(":", 2), "", ""][:3]
                share = float(percent or 0) / 100
                step.update(share * 0.4 if kind == "dlstatus" else 0.4 + share * 0.6, note[:60])

        run_logged(f"apt-get install {' '.join(missing)}",
                   [*apt, "-o", "APT::Status-Fd=1", "install", "-y", "--no-install-recommends", *missing], log, on_line,
                   tick=step.update)
