"""Runs in a clean room (clean_room.py): installs kvferry's wheel, tries its commands or a deployment, and prints what
came of each, and how long the installing took. Standard library only.
"""

import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

BIN = Path("/env/bin")
LIBRARIES = """
import re, sys, sysconfig
from pathlib import Path
import kvferry._core
maps = Path("/proc/self/maps").read_text()
own = (sys.prefix, sysconfig.get_path("stdlib"))
found = {path for path in re.findall(r"/\\S+[.]so[.\\d]*", maps) if not path.startswith(own)}
print(*sorted(path for path in found if "/libpython3" not in path))
"""


def call(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)}: status {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout.strip()


def controller_listens() -> bool:
    """Starts the controller by kvferry-launch, connects to it, and stops it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with subprocess.Popen(["kvferry-launch", "controller", "--bind", f"tcp://127.0.0.1:{port}", "--", "--state",
                           "none"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as controller:
        for _ in range(100):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                controller.terminate()
                return True
            time.sleep(0.1)
        controller.kill()
    return False


def try_commands() -> None:
    print("version:", call("kvferry", "--version"))
    print("libraries:", call("python", "-c", LIBRARIES))
    for command in ("prefill", "decode", "controller", "cluster", "proxy"):
        call("kvferry-launch", command, "--help")
    print("controller:", controller_listens())
    print("transfer:", call("python", "/move_blocks.py"))
    without_ucx = subprocess.run(["python", "-c", "from kvferry.transport import Transport; Transport(path='ucx')"],
                                 capture_output=True, text=True, check=False)
    print("ucx:", without_ucx.stderr.strip().splitlines()[-1])
    print("cuda:", call("python", "-c", "from kvferry import _core; print(_core.gpu_support())"))
    without_gpu = subprocess.run(["python", "-c", "from kvferry.transport import Transport; Transport(gpu=0)"],
                                 capture_output=True, text=True, check=False)
    print("gpu:", without_gpu.stderr.strip().splitlines()[-1])


def get(url: str, body: object = None) -> str:
    """Returns the answer to a GET, or to a POST if there is a body, which is sent as JSON."""
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"})) as answer:
        return str(answer.read().decode())


def try_deployment(file: str, requests: str, begin: float) -> None:
    """Starts a deployment, sends it requests one after the other, prints the texts, and stops it. `begin`: when the
    installing began.
    """
    with subprocess.Popen(["kvferry-launch", "cluster", "up", file], stdout=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        said = ""
        while not (ready := re.search(r"ready: (http://\S+)\n", said)):
            if not (line := up.stdout.readline()):
                sys.exit(said)
            said += line
        texts = []
        for body in json.loads(Path(requests).read_text()):
            texts.append(json.loads(get(f"{ready[1]}/v1/completions", body))["choices"][0]["text"])
            if len(texts) == 1:
                print(f"first answer: {time.monotonic() - begin:.1f} s")
        nodes = json.loads(call("kvferry-launch", "cluster", "status", file, "--json"))["nodes"]
        metrics = get(next(node["url"] for node in nodes if node["name"] == "decode-0") + "/metrics")
        up.terminate()
        up.communicate()
    print("texts:", json.dumps(texts))
    print("loaded:", *re.findall(r"vllm:external_prefix_cache_hits_total\{\S* (\S+)", metrics))
    print("ended:", up.returncode)


def main(wheel: str, packages: str, *deployment: str) -> None:
    """`deployment`: the file of a deployment, and that of the requests for it; without them, the commands are tried."""
    for tool in ("cc", "gcc", "g++", "clang", *(() if deployment else ("sh",))):
        assert shutil.which(tool) is None, tool
    call(sys.executable, "-m", "venv", "/env")
    site = next(Path("/env/lib").glob("python3*/site-packages"))
    (site / "others.pth").write_text(packages + "\n")  # among them those that kvferry depends on
    begin = time.monotonic()
    call(str(BIN / "pip"), "install", "--no-index", wheel)
    print(f"install: {time.monotonic() - begin:.1f} s")
    if deployment:
        try_deployment(*deployment, begin)
    else:
        try_commands()


main(*sys.argv[1:])
