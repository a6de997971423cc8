"""A root folder with almost nothing in it, in which a test runs programs: Python with its standard library, the
runtimes of C and C++, which every system for manylinux wheels has, and what the test names. It has no compiler, no
shell, and no other libraries than those that Python's own modules load.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

RUNTIMES = re.compile(r"lib(stdc\+\+|gcc_s|pthread|dl|rt|util|resolv|z)\.so\.\d+")
PYTHON = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}").resolve()
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix}))
DEBIANS_PIP = Path("/usr/share/python-wheels")
ENTER = """
root=$1; shift
for place in {places}; do
  mkdir -p "$root$place"
  mount --bind "$place" "$root$place"
done
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount -t proc proc "$root/proc"
exec env -i HOME=/home USER=root PATH=/env/bin:/usr/bin:/bin "$(command -v chroot)" "$root" "$@"
"""


def loaded_libraries(binaries: Iterable[Path]) -> set[Path]:
    """Returns the paths of the shared libraries that the loader finds for these files, and of the loader."""
    listed = subprocess.run(["ldd", *binaries], capture_output=True, text=True, check=False).stdout
    return set(map(Path, re.findall(r"(/\S+) \(0x", listed)))


class CleanRoom:
    """The root folder. `folders` are visible in it at the paths that they have outside. `files` are programs and
    libraries that are copied into it, with the libraries that they load.
    """

    def __init__(self, root: Path, folders: Iterable[Path], files: Sequence[Path] = ()) -> None:
        self._root = root
        self._places = [*folders, STANDARD_LIBRARY, *([DEBIANS_PIP] if DEBIANS_PIP.exists() else [])]
        found = loaded_libraries([PYTHON, *STANDARD_LIBRARY.glob("lib-dynload/*.so"), *files])
        system = next(path.parent for path in found if path.name == "libc.so.6")
        found |= {path for path in system.iterdir() if RUNTIMES.fullmatch(path.name)}
        self.libraries = {path for path in found if not any(path.is_relative_to(place) for place in self._places)}
        for path in [*self.libraries, PYTHON, *files]:
            (root / path.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, root / path.relative_to("/"))
        for name in ("dev", "proc", "sys", "tmp", "etc", "home"):
            (root / name).mkdir()
        (root / "etc" / "passwd").write_text("root:x:0:0::/home:/none\n")
        (root / "etc" / "hosts").write_text("127.0.0.1 localhost\n")

    def run(self, program: Path, *arguments: str, timeout_s: float) -> str:
        """Runs a Python program in the root and returns its output. All its processes end with it."""
        shutil.copy(program, self._root / "program.py")
        spaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", *([] if os.geteuid() == 0 else ["-r"])]
        script = ENTER.format(places=" ".join(shlex.quote(str(place)) for place in self._places))
        done = subprocess.run([*spaces, "sh", "-e", "-c", script, "sh", str(self._root), str(PYTHON), "/program.py",
                               *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=timeout_s, check=False)
        assert done.returncode == 0, done.stdout[-6000:]
        return done.stdout
