"""Packs the GPU programs for a machine that can't build them."""

import re
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path

from parts import BENCHMARKS, BIN, HELPERS, HERE, PAIRS, SCRIPTS, SYSTEM_BENCHMARKS, TESTS, VLLM_SCRIPT

SYSTEM_LIBRARIES = re.compile(r"(libc|libm|libdl|libpthread|libresolv|librt|ld-linux-x86-64|libcuda|libnvidia-ml)\.so")
# A Python of the other machine has its own, newer ones.
COMPILERS_LIBRARIES = re.compile(r"(libstdc\+\+|libgcc_s)\.so")


def pack(archive: Path, wheels: list[Path]) -> None:
    """Packs the programs, these scripts, and each library that a bare machine with a driver lacks. Of the wheels it
    takes the package kvferry, and LMCache's module of kernels.
    """
    from kvferry_launch.setup import cuda_toolkit

    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "kvferry-gpu"
        (root / "bin").mkdir(parents=True)
        (root / "lib" / "python").mkdir(parents=True)
        for name in ("run", "parts.py", VLLM_SCRIPT, *SCRIPTS):
            if (HERE / name).exists():
                shutil.copy(HERE / name, root / name)
        programs = [BIN / name for name in (*TESTS, *PAIRS, *BENCHMARKS, *SYSTEM_BENCHMARKS, *HELPERS)]
        for built in programs:
            program = root / "bin" / built.name
            shutil.copy(built, program)
            subprocess.run(["strip", str(program)], check=True)
        for wheel in wheels:
            _unpack(wheel, root)
        modules = list((root / "python").glob("kvferry/_core*.so"))
        # The programs load UCX at run time, and UCX loads its modules from the folder ucx beside libucs.so.
        ucx = cuda_toolkit.ucx_root() / "lib"
        shutil.copytree(ucx / "ucx", root / "lib" / "ucx", ignore=shutil.ignore_patterns("*.a", "*.la", "*perftest*"))
        loaded = [ucx / f"lib{part}.so.0" for part in ("ucm", "ucs", "uct", "ucp")]
        for library in {*loaded, *_libraries([*(root / "bin").iterdir(), *loaded, *modules])}:
            shutil.copy(library, root / "lib" / library.name)
            if not COMPILERS_LIBRARIES.match(library.name):
                (root / "lib" / "python" / library.name).symlink_to(f"../{library.name}")
        with tarfile.open(archive, "w:gz", compresslevel=6) as packed:
            packed.add(root, arcname=root.name)
    print(f"{archive}: {archive.stat().st_size / 1e6:.1f} MB; there: tar -xzf {archive.name} && kvferry-gpu/run")


def _libraries(programs: list[Path]) -> list[Path]:
    listed = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
    found = map(Path, re.findall(r"=> (/\S+)", listed))
    return [library for library in found if not SYSTEM_LIBRARIES.match(library.name)]


def _unpack(wheel: Path, root: Path) -> None:
    """Unpacks what the scripts need of a wheel."""
    is_own = wheel.name.startswith("kvferry")
    target = root / ("python" if is_own else f"peers/{'-'.join(wheel.name.split('-')[:2])}")
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            if is_own and name.startswith(("kvferry/", "kvferry.libs/")):
                packed.extract(name, target)
            elif not is_own and re.fullmatch(r"lmcache/c\w*_ops\..*\.so", name):
                target.mkdir(parents=True)
                (target / Path(name).name).write_bytes(packed.read(name))
    for module in target.rglob("*.so"):
        subprocess.run(["strip", str(module)], check=True)
    for built in target.glob("kvferry/bin/*"):
        built.chmod(0o755)
