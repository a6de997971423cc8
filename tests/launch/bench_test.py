"""Tests `kvferry bench transfer` with tiny sizes and without peers: rows, verification, flags, clean ends."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from kvferry_launch.paths import KVFERRY

BINARY = os.environ.get("KVFERRY_BINARY", str(KVFERRY))
TINY = ("--block-bytes", "4KiB,64KiB", "--blocks", "8", "--repeat", "1")
KEYS = {"engine", "setting", "path", "memory", "op", "block_bytes", "num_blocks", "gb_per_s", "of_first",
        "latency_us_p50", "latency_us_p99", "cpu_s_per_gib", "verified"}
DEADLINE_S = 120


def bench(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BINARY, "bench", "transfer", *args], capture_output=True, text=True, timeout=DEADLINE_S,
                          env={**os.environ, **environment}, check=False)


def processes_of(marker: str) -> list[int]:
    """Returns the processes that have the word `marker` in their environment, which child processes inherit."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def wait_for(is_true, what: str) -> None:  # noqa: ANN001
    end = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def test_rows_of_both_memories_hold_what_the_contract_says(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = bench(*TINY, "--json", str(file))
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    rows = result["rows"]
    assert all(set(row) == KEYS for row in rows)
    assert all(row["verified"] is True for row in rows)
    assert all(row["gb_per_s"] > 0 and row["latency_us_p50"] > 0 for row in rows)
    seen = {(f"{row['engine']} {row['setting']}", row["memory"], row["op"], row["block_bytes"]) for row in rows}
    names = ("kvferry default", "kvferry 1 thread", "memcpy 1 thread", "socket best")
    for memory in ("kvferry", "foreign"):
        for op in ("push", "pull"):
            for size in (4096, 65536):
                assert {(name, memory, op, size) for name in names} <= seen
    assert "all copies by one thread" in result["engines"]["kvferry 1 thread, path auto"]
    assert {"cores", "cpu", "kernel", "huge_pages", "date"} <= set(result["machine"])
    assert "push, path auto, foreign memory" in done.stdout
    assert "[1/" in done.stderr


def test_path_shm_leaves_out_memory_that_it_cannot_map(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = bench(*TINY, "--path", "shm", "--json", str(file))
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert {row["memory"] for row in rows} == {"kvferry"}
    assert {row["setting"] for row in rows if row["engine"] == "kvferry"} == {"default", "1 thread", "granted"}


def test_path_tcp_is_measured_with_keys_too(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = bench(*TINY, "--path", "tcp", "--json", str(file))
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert {row["setting"] for row in rows if row["engine"] == "kvferry"} == {"default", "with key", "member, granted",
                                                                             "encrypted"}
    # kvferry's settings take turns; each row has its median ratio to the first one's.
    assert all((row["of_first"] > 0) == (row["engine"] == "kvferry") for row in rows)
    assert all(row["of_first"] == 1 for row in rows if row["setting"] == "default")


def test_a_damaged_byte_shows_as_not_verified(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = bench("--block-bytes", "4KiB", "--blocks", "4", "--repeat", "1", "--json", str(file),
                 KVFERRY_BENCH_DAMAGE="1")
    assert done.returncode == 0, done.stderr
    assert not any(row["verified"] for row in json.loads(file.read_text())["rows"])
    assert "NO" in done.stdout


def test_a_models_shape_is_derived_in_one_line() -> None:
    done = bench("--model", "deepseek-v3", "--tokens", "16", "--repeat", "1", "--op", "push")
    assert done.returncode == 0, done.stderr
    assert "16 tokens x latent of 576 x 2 B = 18KiB a block; 16 tokens = 1 blocks x 61 layers" in done.stdout


@pytest.mark.parametrize(("args", "words"), [
    (("--path", "warp"), "auto, shm, cma, ucx, tcp"),
    (("--memory", "swap"), "kvferry, foreign"),
    (("--op", "shove"), "push, pull"),
    (("--block-bytes", "4 KB"), "4KiB"),
    (("--blocks", "-3"), "--blocks"),
    (("--repeat", "0"), "--repeat"),
    (("--peers", "gloo"), "nixl, mooncake, ucx"),
    (("--model", "gpt-2"), "llama-3.1-8b"),
    (("--model", "qwen3-32b", "--dtype", "int8"), "bf16, fp8"),
    (("--connect", "nowhere"), "HOST:PORT"),
    (("--plot", "a.txt"), ".png"),
    (("--speed", "high"), "--speed"),
])
def test_bad_input_is_one_clear_line(args: tuple[str, ...], words: str) -> None:
    done = bench(*args)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvferry: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


def test_no_listener_is_one_clear_line() -> None:
    done = bench(*TINY, "--connect", "127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("kvferry: cannot connect to 127.0.0.1:1")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_driver(number: signal.Signals) -> None:
    marker = f"KVFERRY_BENCH_TEST={os.getpid()}-{number}"
    name, _, value = marker.partition("=")
    with subprocess.Popen([BINARY, "bench", "transfer", "--repeat", "1000", "--block-bytes", "4KiB"],
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                          env={**os.environ, name: value}) as driver:
        wait_for(lambda: len(processes_of(marker)) >= 4, "driver, listener and two workers run")
        driver.send_signal(number)
        driver.wait(timeout=DEADLINE_S)
        assert driver.returncode != 0
    wait_for(lambda: not processes_of(marker), "every child ends")


def test_an_interrupted_benchmark_of_the_controller_says_so_and_leaves_no_files(tmp_path: Path) -> None:
    with subprocess.Popen([BINARY, "bench", "controller"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                          env={**os.environ, "TMPDIR": str(tmp_path)}) as running:
        assert running.stderr is not None
        assert "[1/" in running.stderr.readline()
        wait_for(lambda: bool(list(tmp_path.iterdir())), "the benchmark's folder is there")
        running.send_signal(signal.SIGINT)
        said = running.stderr.read()
        assert running.wait(timeout=DEADLINE_S) == 1
        assert said.endswith("the benchmark was interrupted by Ctrl-C or SIGTERM\n")
        assert not list(tmp_path.iterdir())


def test_a_listener_serves_one_driver_after_the_other_and_ends_on_ctrl_c() -> None:
    with subprocess.Popen([BINARY, "bench", "transfer", "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True,
                          ) as listener:
        assert listener.stdout is not None
        address = listener.stdout.readline().split(";")[0].split()[-1]
        for _ in range(2):
            done = bench(*TINY, "--connect", address)
            assert done.returncode == 0, done.stderr
        listener.send_signal(signal.SIGINT)
        assert listener.wait(timeout=DEADLINE_S) == 0
