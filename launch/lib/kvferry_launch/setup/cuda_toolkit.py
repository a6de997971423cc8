"""Installs NVIDIA's packages of CUDA from PyPI into build/cuda-toolkit, for the CMake preset cuda and for the wheel."""

import os
import sys
from pathlib import Path

from kvferry_launch.paths import BUILD, LAUNCH, LOGS, VENV_PYTHON
from kvferry_launch.progress import Step
from kvferry_launch.setup.build import build_preset
from kvferry_launch.setup.commands import SetupError, run_logged, stamped

TOOLKIT = BUILD / "cuda-toolkit"
REQUIREMENTS = LAUNCH / "requirements-cuda.txt"
UCX = TOOLKIT / "libucx"
ARCHITECTURES = "80-real;90-real;100"  # the default of kernels/cuda/find_nvcc.cmake


def ensure_toolkit() -> None:
    """Installs nvcc, NCCL and a UCX with CUDA, unless what launch/requirements-cuda.txt lists is installed. CMake
    prefers an nvcc that CUDACXX names, or that is on PATH or in /usr/local/cuda. Errors: SetupError.
    """
    TOOLKIT.mkdir(parents=True, exist_ok=True)
    with stamped(TOOLKIT / ".kvferry", REQUIREMENTS) as stale:
        if not stale:
            return
        with Step("CUDA toolkit (nvcc, NCCL, UCX)") as step:
            command = [str(VENV_PYTHON), "-m", "pip", "install", "--progress-bar", "off", "--no-deps", "--upgrade",
                       "--target", str(TOOLKIT), "-r", str(REQUIREMENTS)]
            run_logged("pip install of the CUDA toolkit", command, LOGS / "pip.log",
                       lambda line: step.update(note=line.strip()[:60]), tick=step.update)
            # nvcc and CMake look for a folder lib64 and for libraries without a version, which the packages lack.
            for home in TOOLKIT.glob("nvidia/cu*"):
                _link(home / "lib64", "lib")
                for library in (home / "lib").glob("lib*.so.*"):
                    _link(home / "lib" / f"{library.name.partition('.so.')[0]}.so", library.name)


def _link(link: Path, target: str) -> None:
    if not link.is_symlink():
        link.symlink_to(target)


def runtime_licence() -> Path:
    """Returns the file with the licence under which CUDA's runtime may be redistributed."""
    (licence,) = TOOLKIT.glob("nvidia_cuda_runtime-*.dist-info/licenses/License.txt")
    return licence


def ucx_root() -> Path:
    """Returns the folder of the UCX that the GPU programs use: that in KVFERRY_UCX_ROOT or, by default, the one that
    ensure_toolkit() installs, because Debian's UCX has no CUDA.
    """
    return Path(os.environ.get("KVFERRY_UCX_ROOT", str(UCX)))


def ensure_build(architectures: str = ARCHITECTURES) -> None:
    """Builds the kernels, the GPU tests and the GPU benchmarks in build/cuda. Errors: SetupError."""
    ensure_toolkit()
    build_preset("cuda", ["gpu_tests"], [f"-DPython_EXECUTABLE={sys.executable}", f"-DUCX_ROOT={ucx_root()}",
                                         f"-DCMAKE_CUDA_ARCHITECTURES={architectures}"])


if __name__ == "__main__":
    try:
        # Without a GPU, the build only checks that the kernels compile. For one architecture that takes a fifth of the
        # time.
        ensure_build(ARCHITECTURES if Path("/dev/nvidiactl").exists() else "90")
    except SetupError as error:
        sys.exit(f"{error.tail}\nkvferry set-up: {error}")
