"""Checks the direction of includes, the places of library headers and the files at the top level. MAY_INCLUDE and the
other tables of this file define what is allowed. Every rule takes the root of a tree, so that the tests at the end of
this file can show how each rule fails on a wrong tree.
"""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
ROOMS = ("transport", "kernels", "controller", "connector", "launch")
SOURCES = (".h", ".hpp", ".cuh", ".cpp", ".cc", ".cu")

# The files that the backends of the transport share.
TRANSPORT = ("transport/base/", *(f"transport/{name}.h" for name in (
    "address_secret", "backend", "backend_transport", "completion_queue", "copy_plan", "inbox_backend",
    "make_transport", "memory_access", "piece_cursor", "progress_loop", "range_verifier", "region_descriptor",
    "shared_memory", "task_inbox", "transfer_table", "transport")))
TRANSPORT_PARTS = tuple(sorted(path.name for path in (REPO / "transport").iterdir()
                               if path.is_dir() and path.name != "base"))

# A file belongs to the first entry that its path starts with, and may include project headers from the folders of this
# entry.
MAY_INCLUDE = {
    "transport/base/memory/": ("transport/base/",),
    "transport/base/net/tls/": ("transport/base/",),
    "transport/base/secrets/": ("transport/base/",),
    "transport/base/net/": ("transport/base/",),
    "transport/base/": ("transport/base/",),
    **{f"transport/{part}/": (*TRANSPORT, f"transport/{part}/") for part in TRANSPORT_PARTS},
    "transport/": TRANSPORT,
    "kernels/device/": ("kernels/device/",),
    "kernels/cuda/": ("transport/base/", "kernels/"),
    "kernels/": ("transport/base/", "kernels/"),
    "controller/api/": ("transport/base/", "controller/api/"),
    "controller/protocol/": ("transport/base/", "controller/api/", "controller/protocol/"),
    "controller/client/": ("transport/base/", "controller/api/", "controller/protocol/", "controller/client/"),
    "controller/index/": ("transport/base/", "controller/api/", "controller/protocol/", "controller/index/"),
    "controller/directory/": ("transport/base/", "controller/api/", "controller/protocol/", "controller/index/",
                              "controller/directory/"),
    "controller/engines/": ("transport/base/", "controller/api/", "controller/protocol/", "controller/index/",
                            "controller/engines/"),
    "controller/state/": ("transport/base/", "controller/api/", "controller/protocol/", "controller/index/",
                          "controller/directory/", "controller/state/"),
    "controller/scale/": ("transport/base/", "controller/api/", "controller/protocol/", "controller/index/",
                          "controller/directory/", "controller/scale/"),
    "controller/server/": ("transport/base/", "controller/api/", "controller/protocol/", "controller/client/",
                           "controller/index/", "controller/directory/", "controller/engines/", "controller/state/",
                           "controller/scale/", "controller/server/"),
    "controller/http/": ("transport/base/", "controller/api/", "controller/protocol/", "controller/index/",
                         "controller/directory/", "controller/engines/", "controller/http/"),
    "controller/": (),  # the sources are in the sub-folders
    "connector/core/pool/": ("transport/base/", "connector/core/"),
    "connector/core/push/": ("transport/base/", "connector/core/"),
    "connector/core/scheduler/": ("transport/base/", "connector/core/"),
    "connector/core/": ("transport/base/", "connector/core/"),
    "connector/runtime/links/": ("transport/", "controller/", "connector/core/", "connector/runtime/links/",
                                 "connector/runtime/poll_loop.h"),
    "connector/runtime/scheduler/": ("transport/", "controller/", "connector/core/", "connector/runtime/links/",
                                     "connector/runtime/scheduler/", "connector/runtime/config.h",
                                     "connector/runtime/net_address.h"),
    "connector/runtime/store/": ("transport/", "kernels/", "connector/core/", "connector/runtime/store/"),
    "connector/runtime/worker/": ("transport/", "kernels/", "connector/core/", "connector/runtime/store/",
                                  "connector/runtime/worker/", "connector/runtime/links/node_wire.h",
                                  "connector/runtime/links/zmq_link.h", "connector/runtime/config.h",
                                  "connector/runtime/poll_loop.h"),
    "connector/runtime/": ("transport/", "controller/api/", "connector/core/", "connector/runtime/"),
    "connector/python/src/": ("transport/", "kernels/", "controller/", "connector/"),
    "connector/": ("transport/", "kernels/", "controller/", "connector/"),
    "launch/bench/harness/": ("transport/", "launch/bench/harness/"),
    "launch/bench/transfer/engines/": ("transport/", "launch/bench/harness/", "launch/bench/transfer/"),
    "launch/bench/transfer/": ("transport/", "launch/bench/harness/", "launch/bench/transfer/"),
    "launch/bench/controller/": ("transport/base/", "controller/", "launch/bench/harness/", "launch/bench/controller/"),
    "launch/bench/fleet/": ("transport/base/", "controller/", "launch/bench/harness/", "launch/bench/fleet/"),
    "launch/bench/connector/": ("transport/base/", "controller/", "connector/core/", "launch/bench/harness/",
                                "launch/bench/connector/"),
    "launch/cli/doctor/": ("transport/base/", "controller/api/", "connector/core/",
                           "connector/runtime/worker/pool_sizes.h", "launch/cli/"),
    "launch/cli/explain/": ("transport/base/", "controller/api/", "connector/core/", "connector/runtime/links/",
                            "launch/cli/"),
    "launch/cli/top/": ("transport/base/", "controller/", "launch/cli/"),
    "launch/cli/": ("transport/", "controller/", "launch/"),
    "launch/": ("transport/", "kernels/", "controller/", "connector/", "launch/"),
}

# A module in launch's Python code belongs to the first entry that its path starts with, and may import the modules of
# kvferry_launch that this entry lists.
PYTHON_ROOT = "launch/lib/kvferry_launch/"
MAY_IMPORT = {
    "node/guard.py": (),
    "setup/": ("paths", "progress", "setup"),
    "node/": ("paths", "node"),
    "proxy/": ("proxy",),
    "cluster/": ("paths", "process", "progress", "node", "cluster"),
    "testbed/": ("paths", "process", "progress", "setup", "node", "proxy", "testbed"),
    "__main__.py": ("paths", "node", "cluster", "proxy"),
    "": ("paths", "process", "progress"),
}

# Matches what the pure state machines must not use: threads, clocks, files, sockets, the console.
NOT_IN_CORE = re.compile(
    r"(thread|mutex|shared_mutex|condition_variable|future|atomic|semaphore|latch|barrier|stop_token|chrono|ctime"
    r"|iostream|fstream|ostream|cstdio|stdio\.h|print|filesystem|random|unistd\.h|fcntl\.h|pthread\.h|time\.h"
    r"|(sys|netinet|arpa)/.*)$")

# Library headers, with the files that may include them.
WRAPPED = {
    "UCX": (re.compile(r"uc[pst]/"), re.compile(r"transport/ucx/|launch/bench/transfer/engines/ucx_engine\.cpp$")),
    "NCCL": (re.compile(r"nccl"), re.compile(r"transport/nccl/")),
    "CUDA": (re.compile(r"cuda|cub/|thrust/"),
             re.compile(r"kernels/.*\.(cu|cuh)$|kernels/cuda/|transport/(ucx|nccl|cuda)/")),
    "ZeroMQ": (re.compile(r"zmq"), re.compile(r"transport/base/net/zmq_(context|key_change|socket)\.cpp$")),
    "the resolver": (re.compile(r"netdb\.h|ifaddrs\.h|arpa/inet\.h"), re.compile(r"transport/base/net/")),
    "eventfd": (re.compile(r"sys/eventfd\.h"), re.compile(r"transport/base/net/")),
    "cpp-httplib": (re.compile(r"httplib"),
                    re.compile(r"controller/(http/.*\.cpp|scale/etcd(\.cpp|_gateway\.h))$")),
    "TLS": (re.compile(r"openssl/ssl\.h"), re.compile(r"transport/base/net/tls/|controller/http/http_socket\.cpp$"
                                                      r"|launch/cli/doctor/key_probes\.cpp$")),
    "hiredis": (re.compile(r"hiredis"), re.compile(r"controller/scale/redis_stream\.cpp$")),
}

# Headers that a room offers to the other rooms. They must not include a library's header.
BORDERS = ("transport/transport.h", "kernels/packer.h", "controller/api/client.h")

TOP_LEVEL = {
    "CMakeLists.txt", "transport", "controller", "connector", "kernels", "launch", "tests", "README.md",
    "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CMakePresets.json", "pyproject.toml", ".clang-format",
    ".clang-tidy", ".ci", ".gitignore", ".pre-commit-config.yaml", "LICENSE",
}

LINES_MAX = {".h": 200, ".cuh": 200, ".cpp": 300, ".cu": 300, ".py": 300}
TEST_LINES_MAX = 600  # test files may be longer, because they are lists of cases
FOLDER_SOURCES_MAX = 25
REASON = re.compile(r"Over (\d+) lines, because ")


def files_of(root: Path) -> list[Path]:
    """Returns the files that git tracks or would track, relative to the root. Returns all files if there is no git."""
    if not (root / ".git").exists():
        return sorted(path.relative_to(root) for path in root.rglob("*") if path.is_file())
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=root,
                            capture_output=True, text=True, check=True).stdout
    return sorted(Path(name) for name in listed.split("\0") if name and (root / name).exists())


def room_sources(root: Path) -> Iterator[Path]:
    return (path for path in files_of(root) if path.parts[0] in ROOMS and path.suffix in SOURCES)


def includes(root: Path, path: Path) -> list[str]:
    text = (root / path).read_text(errors="replace")
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.MULTILINE)


def is_project_header(header: str) -> bool:
    return header.split("/")[0] in ROOMS


def wrong_directions(root: Path) -> list[str]:
    found = []
    for path in room_sources(root):
        part = next(part for part in MAY_INCLUDE if path.as_posix().startswith(part))
        found += [f"{path} includes {header}; {part} may include {', '.join(MAY_INCLUDE[part])}"
                  for header in includes(root, path)
                  if is_project_header(header) and not header.startswith(MAY_INCLUDE[part])]
    return found


def wrong_imports(root: Path) -> list[str]:
    """Returns the imports within kvferry_launch that MAY_IMPORT does not allow."""
    found = []
    for path in files_of(root):
        inside = path.as_posix().removeprefix(PYTHON_ROOT)
        if inside == path.as_posix() or path.suffix != ".py":
            continue
        part = next(part for part in MAY_IMPORT if inside.startswith(part))
        text = (root / path).read_text()
        imported = {module for line in re.findall(r"^\s*(?:from|import) kvferry_launch\b(.*)$", text, re.MULTILINE)
                    for module in re.findall(r"^\.(\w+)|^ import ([\w, ]+)", line)[0] if module}
        found += [f"{path} imports kvferry_launch.{name}; it may import {', '.join(MAY_IMPORT[part]) or 'none of it'}"
                  for names in sorted(imported) for name in re.findall(r"\w+", names) if name not in MAY_IMPORT[part]]
    return found


def impure_core(root: Path) -> list[str]:
    return [f"{path} includes <{header}>; connector/core has no I/O, clock or thread"
            for path in room_sources(root) if path.as_posix().startswith("connector/core/")
            for header in includes(root, path) if NOT_IN_CORE.match(header)]


def stray_library_headers(root: Path) -> list[str]:
    return [f"{path} includes <{header}>; {library} stays in the files that wrap it"
            for path in room_sources(root) for header in includes(root, path)
            for library, (pattern, allowed) in WRAPPED.items()
            if not is_project_header(header) and pattern.match(header) and not allowed.match(path.as_posix())]


def leaking_borders(root: Path) -> list[str]:
    """Returns the headers in BORDERS that include a library's header, directly or through others."""
    found = []
    for border in BORDERS:
        seen: set[str] = set()
        todo = [border] if (root / border).exists() else []
        while todo:
            header = todo.pop()
            seen.add(header)
            for included in includes(root, Path(header)):
                if is_project_header(included):
                    todo += [included] if included not in seen and (root / included).exists() else []
                elif any(pattern.match(included) for pattern, _ in WRAPPED.values()):
                    found.append(f"{border} reaches <{included}> through {header}")
    return found


def stray_top_level(root: Path) -> list[str]:
    return sorted({path.parts[0] for path in files_of(root)} - TOP_LEVEL)


def overgrown(root: Path) -> list[str]:
    """Returns the files that are longer than the limit and do not say why."""
    found = []
    for path in files_of(root):
        if path.suffix not in LINES_MAX or path.parts[0] not in (*ROOMS, "tests"):
            continue
        most = LINES_MAX[path.suffix] if path.parts[0] in ROOMS else TEST_LINES_MAX
        text = (root / path).read_text(errors="replace")
        lines = len(text.splitlines())
        if lines > most and str(most) not in REASON.findall(text):
            found.append(f"{path} has {lines} lines; split it by purpose, or say 'Over {most} lines, because ...'")
    return found


def crowded(root: Path) -> list[str]:
    """Returns the folders of the product that have more than FOLDER_SOURCES_MAX sources, subfolders not counted."""
    counts = Counter(path.parent for path in files_of(root)
                     if path.parts[0] in ROOMS and path.suffix in (*SOURCES, ".py"))
    return [f"{folder} has {count} sources; move those of one purpose into a folder, so that {FOLDER_SOURCES_MAX} or "
            "fewer are left" for folder, count in sorted(counts.items()) if count > FOLDER_SOURCES_MAX]


def unexplained(root: Path) -> list[str]:
    """Returns the folders of C++ without a README. A folder of one source needs none if the source begins with a
    comment, which says what the README would.
    """
    sources: dict[Path, list[Path]] = {}
    for path in room_sources(root):
        sources.setdefault(path.parent, []).append(root / path)
    return [str(folder) for folder, files in sorted(sources.items())
            if not (root / folder / "README.md").exists() and folder != Path("launch/examples/move_blocks")
            and not (len(files) == 1 and files[0].read_text().startswith("// "))]


def test_includes_go_in_the_direction_of_the_blueprint() -> None:
    assert wrong_directions(REPO) == []


def test_launch_imports_go_in_one_direction() -> None:
    assert wrong_imports(REPO) == []


def test_folders_include_each_other_without_circles_and_as_the_picture_shows() -> None:
    done = subprocess.run([sys.executable, "tests/draw_includes.py", "--check"], cwd=REPO, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_folder_of_sources_has_a_row_of_its_own() -> None:
    folders = {path.parent.as_posix() + "/" for path in room_sources(REPO)} - {"launch/examples/move_blocks/"}
    assert sorted(folders - set(MAY_INCLUDE)) == []


def test_every_folder_says_what_belongs_there() -> None:
    assert unexplained(REPO) == []
    modules = {path.parent for path in files_of(REPO) if str(path).startswith(PYTHON_ROOT)}
    assert sorted(str(package) for package in modules
                  if not (REPO / package / "__init__.py").read_text().startswith('"""')) == []


def test_connector_core_is_pure() -> None:
    assert impure_core(REPO) == []


def test_library_headers_stay_in_the_files_that_wrap_them() -> None:
    assert stray_library_headers(REPO) == []


def test_no_border_header_reaches_a_library_header() -> None:
    assert leaking_borders(REPO) == []


def test_the_top_level_holds_what_the_blueprint_lists() -> None:
    assert stray_top_level(REPO) == []


def test_files_stay_small_or_say_why_not() -> None:
    assert overgrown(REPO) == []


def test_folders_stay_small() -> None:
    assert crowded(REPO) == []


# --- The rules themselves, each on a tree that breaks it once ----------------------------------------------------


@pytest.mark.parametrize(("path", "header", "rule"), [
    ("transport/base/a.h", "transport/transport.h", wrong_directions),
    ("transport/a.cpp", "controller/api/client.h", wrong_directions),
    ("kernels/a.cpp", "transport/transport.h", wrong_directions),
    ("controller/a.cpp", "controller/api/client.h", wrong_directions),
    ("controller/directory/a.cpp", "connector/core/plan.h", wrong_directions),
    ("controller/protocol/a.h", "controller/directory/directory.h", wrong_directions),
    ("controller/scale/a.cpp", "controller/server/server.h", wrong_directions),
    ("connector/core/a.h", "transport/transport.h", wrong_directions),
    ("connector/runtime/a.cpp", "launch/cli/commands.h", wrong_directions),
    ("launch/bench/harness/a.h", "launch/bench/transfer/engine.h", wrong_directions),
    ("launch/bench/fleet/a.cpp", "launch/bench/transfer/options.h", wrong_directions),
    ("connector/core/a.h", "mutex", impure_core),
    ("connector/core/a.cpp", "chrono", impure_core),
    ("connector/core/a.cpp", "sys/mman.h", impure_core),
    ("connector/core/a.cpp", "zmq.hpp", stray_library_headers),
    ("transport/a.cpp", "ucp/api/ucp.h", stray_library_headers),
    ("controller/server/a.cpp", "zmq.hpp", stray_library_headers),
    ("connector/runtime/a.cpp", "zmq.h", stray_library_headers),
    ("transport/base/net/a.h", "zmq.h", stray_library_headers),
    ("transport/tcp/a.cpp", "netdb.h", stray_library_headers),
    ("controller/state/a.cpp", "sys/eventfd.h", stray_library_headers),
    ("controller/api/status.cpp", "httplib.h", stray_library_headers),
    ("launch/cli/main.cpp", "cuda_runtime.h", stray_library_headers),
    ("controller/server/server.cpp", "httplib.h", stray_library_headers),
    ("controller/scale/etcd.cpp", "hiredis/hiredis.h", stray_library_headers),
    ("controller/api/client.h", "zmq.hpp", leaking_borders),
])
def test_each_rule_finds_the_include_that_breaks_it(tmp_path: Path, path: str, header: str, rule) -> None:  # noqa: ANN001
    brackets = '"{}"' if is_project_header(header) else "<{}>"
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(f"#pragma once\n#include <string>\n#  include {brackets.format(header)}\n")
    found = rule(tmp_path)
    assert len(found) == 1
    assert path in found[0]
    assert header in found[0]


@pytest.mark.parametrize(("path", "line"), [
    ("node/guard.py", "from kvferry_launch.paths import REPO"),
    ("setup/build.py", "from kvferry_launch.testbed import toy_model"),
    ("node/start.py", "from kvferry_launch.testbed.servers import Controller"),
    ("proxy/app.py", "    from kvferry_launch.cluster import spec"),
    ("cluster/up.py", "from kvferry_launch import setup"),
    ("testbed/pair.py", "import kvferry_launch.cluster.spec"),
    ("process.py", "from kvferry_launch.node import serving"),
])
def test_each_wrong_import_is_found(tmp_path: Path, path: str, line: str) -> None:
    module = tmp_path / PYTHON_ROOT / path
    module.parent.mkdir(parents=True)
    module.write_text(f"import os\n{line}\n")
    found = wrong_imports(tmp_path)
    assert len(found) == 1
    assert path in found[0]


def test_a_border_is_searched_through_its_own_room(tmp_path: Path) -> None:
    (tmp_path / "controller/api").mkdir(parents=True)
    (tmp_path / "controller/protocol").mkdir()
    (tmp_path / "controller/api/client.h").write_text('#include "controller/protocol/zmq_io.h"\n')
    (tmp_path / "controller/protocol/zmq_io.h").write_text("#include <zmq.hpp>\n")
    assert leaking_borders(tmp_path) == [
        "controller/api/client.h reaches <zmq.hpp> through controller/protocol/zmq_io.h"]


def test_a_stray_top_level_folder_and_an_overgrown_header_are_found(tmp_path: Path) -> None:
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils/a.h").write_text("")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/a.h").write_text("\n" * 201)
    (tmp_path / "kernels/b.h").write_text("// Over 200 lines, because it is a table.\n" * 201)
    (tmp_path / "kernels/c.cpp").write_text("\n" * 300)
    assert stray_top_level(tmp_path) == ["utils"]
    assert len(found := overgrown(tmp_path)) == 1
    assert "kernels/a.h has 201 lines" in found[0]


def test_a_crowded_folder_is_found(tmp_path: Path) -> None:
    for folder in ("connector/core/plan", "tests/sim"):
        (tmp_path / folder).mkdir(parents=True)
        for number in range(FOLDER_SOURCES_MAX + 1):
            (tmp_path / folder / f"part_{number}{(*SOURCES, '.py')[number % 7]}").write_text("")
    for name in ("README.md", "CMakeLists.txt"):
        (tmp_path / "connector/core" / name).write_text("")
    assert [line.partition(";")[0] for line in crowded(tmp_path)] == ["connector/core/plan has 26 sources"]
    (tmp_path / "connector/core/plan/part_0.h").unlink()
    assert crowded(tmp_path) == []


def test_a_folder_without_a_readme_is_found_unless_its_only_source_explains_it(tmp_path: Path) -> None:
    folder = tmp_path / "transport/one"
    folder.mkdir(parents=True)
    (folder / "one_backend.cpp").write_text("// The backend of one.\n")
    assert unexplained(tmp_path) == []
    (folder / "one_backend.cpp").write_text("#include <one.h>\n")
    assert unexplained(tmp_path) == ["transport/one"]
    (folder / "one_backend.cpp").write_text("// The backend of one.\n")
    (folder / "other.h").write_text("// The other part.\n")
    assert unexplained(tmp_path) == ["transport/one"]
    (folder / "README.md").write_text("# transport/one\n")
    assert unexplained(tmp_path) == []


def test_what_the_blueprint_allows_passes(tmp_path: Path) -> None:
    (tmp_path / "connector/runtime").mkdir(parents=True)
    (tmp_path / "connector/runtime/a.cpp").write_text(
        '#include <thread>\n#include "transport/base/net/zmq_socket.h"\n'
        '#include "controller/api/client.h"\n#include "connector/core/plan.h"\n')
    for rule in (wrong_directions, impure_core, stray_library_headers, leaking_borders, stray_top_level):
        assert rule(tmp_path) == []
