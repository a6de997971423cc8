"""A controller with nodes, and a browser, for tests and pictures of the status page."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvferry_launch.paths import KVFERRY

SCENE = KVFERRY.with_name("status_scene")
CHROMIUM = Path("/usr/bin/chromium")  # the Debian package


class Controller:
    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        assert process.stdout is not None
        first = re.fullmatch(r"kvferry controller listening on (tcp\S+)\n", process.stdout.readline())
        http = re.search(r"HTTP on (\S+)", (folder / "log").read_text())
        assert first is not None
        assert http is not None
        self.address, self.page = first[1], f"http://{http[1]}/"
        self.stream = f"unix://{folder}/stream"


@contextlib.contextmanager
def controller(folder: Path) -> Iterator[Controller]:
    with (folder / "log").open("w") as log, subprocess.Popen(
            [KVFERRY, "controller", "--bind", "tcp://127.0.0.1:0", "--http", "127.0.0.1:0", "--stream",
             f"unix://{folder}/stream"], stdout=subprocess.PIPE, stderr=log, text=True) as process:
        try:
            yield Controller(process, folder)
        finally:
            process.terminate()


@contextlib.contextmanager
def nodes(*arguments: str) -> Iterator[None]:
    """Runs status_scene.cpp with these arguments."""
    with subprocess.Popen([SCENE, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.stdin.close()


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """Yields a headless Chromium of Playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()
