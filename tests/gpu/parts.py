"""The programs of tests/gpu/run, in the four parts that are each run alone on a machine with a GPU."""

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
IS_PACKED = (HERE / "bin").is_dir()
REPO = HERE if IS_PACKED else HERE.parents[1]
BIN = HERE / "bin" if IS_PACKED else REPO / "build" / "cuda" / "bin"

TESTS = ("hostgpu_runtime_test", "gpu_runtime_test", "hostgpu_kernels_test", "gpu_kernels_test", "gpu_transfer_test",
         "gpu_nccl_test")
PAIRS = ("gpu_nccl_pair",)
BENCHMARKS = ("gpu_kernels_bench", "gpu_transfer_bench", "gpu_paths_bench")
SYSTEM_BENCHMARKS = ("gpu_store_bench", "gpu_node_pair")
HELPERS = ("gpu_far_side",)
SCRIPTS = ("core_on_torch.py", "peers_bench.py")
VLLM_SCRIPT = "vllm_pair.py"
SANITIZED = "gpu_kernels_test"
# The checkers make a kernel a hundred times slower, so only some seeds are tested. They count the errors that CUDA
# returns, so tests that ask for such errors are left out.
SANITIZED_FILTER = ("*:-*/1:*/2:*/3:*/4:*/5:*NamesTheGpuThatHasTooLittleMemory*:*ExportsMemoryAndKnowsItsOwn*:"
                    "*RefusesGpusThatThereAreNot*")
CHECKERS = ("memcheck", "racecheck", "initcheck")
TITLES = {
    1: "facts of the machine; tests; kernel, transfer and path benchmarks",
    2: "store benchmark, pair of nodes, NCCL pair, memory by process",
    3: "memcheck, racecheck, initcheck; registers and profile of the copy kernel",
    4: "the Python module with torch, other systems' copies, and vLLM if KVFERRY_GPU_MODEL names a model",
}
FACTS = """
nvidia-smi --query-gpu=name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current --format=csv
nvidia-smi -q -d CLOCK,COMPUTE | grep -E "Compute Mode|Graphics|SM  |Memory  " | head -8
nproc; free -g | head -2; lscpu | grep -E "Model name|NUMA node"; uname -r; ldd --version | head -1
cat /sys/kernel/mm/transparent_hugepage/enabled /sys/kernel/mm/transparent_hugepage/shmem_enabled
ulimit -l; df -h /dev/shm | tail -1; nvcc --version 2>/dev/null | tail -2
"""


@dataclass(frozen=True)
class Step:
    """A program of a part. `kind` says how its output is read: test, checker, or text, which is printed as it is."""

    name: str
    kind: str
    command: list[str]
    limit_s: float
    environment: dict[str, str] = field(default_factory=dict)
    missing: str = ""  # why the program can't run on this machine; empty: it can


def tool(name: str) -> str:
    """Returns the path of one of CUDA's tools, or "" if there is none."""
    found = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    packages = (*REPO.glob(f"build/cuda-toolkit/nvidia/cu*/bin/{name}"),
                *Path("/opt/nvidia/nsight-compute").glob(f"*/{name}"))
    return found or next((str(path) for path in packages), "")


def python_with_torch() -> str:
    """Returns a Python that has torch: KVFERRY_TORCH_PYTHON, or one that is looked for; "" if there is none."""
    candidates = [os.environ.get("KVFERRY_TORCH_PYTHON", ""), "/opt/torch/.venv/bin/python", sys.executable]
    for python in filter(None, candidates):
        site = Path(python).parent.parent / "lib"
        if any(site.glob("python3*/site-packages/torch")):
            return python
    return ""


def nccl_library() -> str:
    """Returns the libnccl.so.2 of KVFERRY_NCCL_LIBRARY, or of the packages of the Python with torch; "" if none."""
    known = os.environ.get("KVFERRY_NCCL_LIBRARY", "")
    python = python_with_torch()
    if known or not python:
        return known
    libraries = (Path(python).parent.parent / "lib").glob("python3*/site-packages/nvidia/*nccl*/lib/libnccl.so.2")
    return next((str(path) for path in libraries), "")


def program(name: str, kind: str, limit_s: float, *arguments: str) -> Step:
    nccl = nccl_library()
    environment = {"KVFERRY_NCCL_LIBRARY": nccl} if nccl else {}
    if name in PAIRS:  # both ranks are on this host, which may have no other interface
        environment |= {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "lo"}
    return Step(name, kind, [str(BIN / name), *arguments], limit_s, environment=environment,
                missing="" if (BIN / name).exists() else "it is not built")


def tool_step(name: str, command: list[str], kind: str, limit_s: float) -> Step:
    path = tool(command[0])
    return Step(name, kind, [path or command[0], *command[1:]], limit_s,
                missing="" if path else f"{command[0]} is not installed")


def script(name: str, limit_s: float, *arguments: str) -> Step:
    python = python_with_torch()
    packed = (("LD_LIBRARY_PATH", HERE / "lib" / "python"), ("PYTHONPATH", HERE / "python")) if IS_PACKED else ()
    libraries = {name: os.pathsep.join([str(first), os.environ.get(name, "")]).rstrip(os.pathsep)
                 for name, first in packed}
    return Step(name, "text", [python or "python3", str(HERE / name), *arguments], limit_s, environment=libraries,
                missing="" if python else "no Python with torch was found")


def steps(part: int) -> Iterator[Step]:
    """Returns the programs of a part, in the order in which they run."""
    if part == 1:
        yield Step("facts", "text", ["sh", "-c", FACTS], 20)
        for name in TESTS:
            yield program(name, "test", 60)
        for name in BENCHMARKS:
            yield program(name, "text", 60)
    elif part == 2:
        for name in SYSTEM_BENCHMARKS:
            yield program(name, "text", 60)
        for name in PAIRS:
            yield program(name, "test", 60)
        yield Step("memory by process", "text", ["nvidia-smi", "--query-compute-apps=pid,name,used_memory",
                                                 "--format=csv"], 10,
                   missing="" if shutil.which("nvidia-smi") else "nvidia-smi is not installed")
    elif part == 3:
        for checker in CHECKERS:
            yield tool_step(f"compute-sanitizer {checker}",
                            ["compute-sanitizer", "--tool", checker, "--error-exitcode", "9", str(BIN / SANITIZED),
                             f"--gtest_filter={SANITIZED_FILTER}", "--gtest_brief=1"], "checker", 60)
        kernels = str(BIN / "gpu_kernels_bench")
        yield tool_step("registers", ["cuobjdump", "--dump-resource-usage", kernels], "registers", 20)
        yield tool_step("profile of the copy kernel",
                        ["ncu", "--kernel-name", "regex:copy_kernel", "--launch-skip", "8", "--launch-count", "4",
                         "--section", "SpeedOfLight", "--section", "Occupancy", "--section", "MemoryWorkloadAnalysis",
                         kernels], "text", 60)
    elif part == 4:
        for name in SCRIPTS:
            yield script(name, 60)
        if model := os.environ.get("KVFERRY_GPU_MODEL", ""):
            yield script(VLLM_SCRIPT, 180, model)
            yield script(VLLM_SCRIPT, 180, model, "--blocks", "170", "--tokens", "120", "--dtype", "float32")
            yield script(VLLM_SCRIPT, 180, model, "--wide", "--graphs")
