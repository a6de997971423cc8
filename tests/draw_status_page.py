#!/usr/bin/env python3
"""Takes the pictures of launch/docs/operations.md: the status page of a controller with the nodes of
tests/launch/cli/status_scene.cpp, in light and dark and on a phone. Needs Debian's chromium and Playwright
(launch/requirements-tests.txt).
"""

import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / "launch" / "lib"), str(REPO / "tests" / "launch" / "lib")]

from status_scene import browser, controller, nodes  # noqa: E402

PICTURES = REPO / "launch" / "docs" / "pictures"
VIEWS = {"status-light": ("light", 1280, 940), "status-dark": ("dark", 1280, 940), "status-phone": ("light", 390, 844)}


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, controller(Path(folder)) as one, nodes(one.address), \
            browser() as chromium:
        time.sleep(15)  # the silent node is lost, and all rates have settled
        for name, (colours, width, height) in VIEWS.items():
            page = chromium.new_page(color_scheme=colours, viewport={"width": width, "height": height})
            page.goto(one.page)
            page.wait_for_selector("#nodes td.bar")
            time.sleep(3)  # a second look, for the rates
            page.screenshot(path=PICTURES / f"{name}.png", full_page=width < 500)
            print(PICTURES / f"{name}.png", (PICTURES / f"{name}.png").stat().st_size, "bytes")


if __name__ == "__main__":
    main()
