"""Tests launch/wheel: the wheel has all libraries that it needs, with their licences, and works in a root folder
without Debian packages and without a compiler: its commands, a transfer between two processes, and, with what vLLM
itself needs of the system, a deployment of real servers.

The clean room has Python's own libraries, among them OpenSSL's; that kvferry uses none of them is seen from the names
that its binaries ask the loader for. The Python packages that kvferry depends on are those of .venv.
"""

import json
import re
import shutil
import subprocess
import sysconfig
import zipfile
from pathlib import Path

import pytest
from clean_room import CleanRoom, loaded_libraries
from kvferry_launch.paths import REPO
from kvferry_launch.setup.steps import ensure_toy_model
from kvferry_launch.testbed.pair import own_cores
from kvferry_launch.testbed.reference import Reference
from real_deployment import MAX_TOKENS, PROMPT_SET, expected, real
from texts import completion_body, text_of

pytestmark = pytest.mark.long
INSTALL_MAX_S = 60.0
# Libraries of the manylinux policy that kvferry may load from the system.
ON_EVERY_SYSTEM = re.compile(r"(ld-linux-.*|lib(c|m|dl|rt|pthread|resolv|util|z|stdc\+\+|gcc_s))\.so\.\d+$")
# Names of Debian's packages begin with the names of their libraries, except for these.
OTHER_PACKAGES = {"libcrypto": "libssl", **{f"libbrotli{part}": "libbrotli" for part in ("common", "dec", "enc")}}
PACKAGES = Path(sysconfig.get_path("purelib"))
PROGRAM = Path(__file__).parent / "lib" / "try_wheel.py"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run([REPO / "launch" / "wheel", "--output", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def binaries(unpacked: Path) -> list[Path]:
    return [path for path in unpacked.rglob("*") if path.is_file() and path.open("rb").read(4) == b"\x7fELF"]


def test_every_library_is_in_the_wheel_or_on_every_system(wheel: Path, unpacked: Path) -> None:
    assert re.search(r"-manylinux_2_\d+_\w+\.whl$", wheel.name)
    found = binaries(unpacked)
    inside = {path.name for path in found}
    assert {"kvferry", *(path.name for path in unpacked.glob("kvferry/_core*.so"))} <= inside
    assert any(name.startswith("libzmq-") for name in inside)
    assert not any(name.startswith("libuc") for name in inside), "UCX is loaded at run time"
    for path in found:
        listed = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
        needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", listed))
        assert not {name for name in needed - inside if not ON_EVERY_SYSTEM.match(name)}, path.name


def test_the_module_has_the_kernels_and_no_debugging_information(unpacked: Path) -> None:
    (module,) = unpacked.glob("kvferry/_core*.so")
    sections = subprocess.run(["readelf", "-SW", module], capture_output=True, text=True, check=True).stdout
    assert ".nv_fatbin" in sections
    assert ".debug" not in sections


def test_every_library_comes_with_its_licence(unpacked: Path) -> None:
    (folder,) = unpacked.glob("kvferry-*.dist-info/licenses")
    texts = {path.name: path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert {"LICENSE", "libssl3", "libmsgpack-cxx-dev", "nanobind", "nvidia-cuda-runtime", "GPL-3"} <= texts.keys()
    for library in (path.name for path in binaries(unpacked) if path.parent.name == "kvferry.libs"):
        name = re.sub(r"-[0-9a-f]{8}\..*", "", library).replace("_", "-")
        stem = OTHER_PACKAGES.get(name, name)
        assert any(text.startswith(stem) for text in texts), f"{library} is of none of {sorted(texts)}"


def tried(room: CleanRoom, *arguments: str) -> dict[str, str]:
    """Returns what try_wheel.py prints in the room, by the words before the colon."""
    said = room.run(PROGRAM, *arguments, timeout_s=600)
    print(said)
    return dict(line.split(": ", 1) for line in said.splitlines() if ": " in line)


def test_it_works_without_debian_packages_and_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    room = CleanRoom(root, [PACKAGES])
    strange = re.compile("lib(zmq|sodium|uc[mpst]|fmt|spdlog|hiredis|yaml-cpp|xxhash|cpp-httplib|pgm|norm)")
    assert not [path for path in room.libraries if strange.match(path.name)]
    for file in (wheel, REPO / "launch" / "examples" / "move_blocks.py"):
        shutil.copy(file, root / file.name)
    values = tried(room, f"/{wheel.name}", str(PACKAGES))
    assert float(values["install"].split()[0]) <= INSTALL_MAX_S
    assert values["version"].endswith("0.1.0")
    assert not [path for path in values["libraries"].split() if not ON_EVERY_SYSTEM.match(Path(path).name)]
    assert values["controller"] == "True"
    assert values["transfer"] == "every byte is right"
    assert "UCX can't be used" in values["ucx"]
    kernels, runtime = values["cuda"].removeprefix("CUDA kernels for ").split("; runtime of CUDA ")
    assert kernels in ("sm_80, sm_90, sm_100, PTX of compute_100", "sm_80, sm_90, PTX of compute_90")
    assert "this host has no NVIDIA driver" in values["gpu"]
    assert f"a driver for CUDA {runtime.split('.')[0]}.0 or later" in values["gpu"]


def test_a_deployment_answers_as_plain_vllm_does_where_only_vllm_has_more(wheel: Path, tmp_path: Path) -> None:
    model = ensure_toy_model()
    reference = Reference(model, own_cores()[0])
    try:
        wanted = expected(reference)
    finally:
        reference.stop()
    root = tmp_path / "root"
    root.mkdir()
    libraries = loaded_libraries(PACKAGES.glob("vllm/_C*.so"))
    needs_of_vllm = [Path("/bin/sh"), Path("/usr/bin/lscpu"), *(path for path in libraries if "libnuma" in path.name)]
    room = CleanRoom(root, [PACKAGES, model], needs_of_vllm)
    shutil.copy(wheel, root / wheel.name)
    file = real(root, model, router={"kind": "proxy"}).file
    bodies = [completion_body(text_of(prompt), MAX_TOKENS) for prompt in PROMPT_SET.prompts()]
    (root / "requests.json").write_text(json.dumps(bodies))
    values = tried(room, f"/{wheel.name}", str(PACKAGES), f"/{file.name}", "/requests.json")
    assert float(values["install"].split()[0]) <= INSTALL_MAX_S
    assert [text.split() for text in json.loads(values["texts"])] == [text_of(one.tokens).split() for one in wanted]
    assert float(values["loaded"]) > 0
    assert values["ended"] == "0"
