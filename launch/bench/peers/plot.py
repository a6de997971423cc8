"""Draws the rows of `kvferry bench transfer --json`: plot.py ROWS.json OUT.png."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

LIMITS = ("memcpy", "cma", "socket")
COLOURS = {"kvferry": "#c1121f", "nixl": "#2a6f97", "mooncake": "#588157", "ucx": "#7b2cbf", "memcpy": "#444444",
           "cma": "#888888", "socket": "#b08900"}
MARKERS = {"push": "o", "pull": "s"}


def size_text(size: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def draw(axes: Any, rows: list[dict[str, Any]], title: str) -> None:
    """Lines of GB/s against the block size: solid for engines, dashed for the machine's limits."""
    sizes = sorted({row["block_bytes"] for row in rows})
    lines = list(dict.fromkeys((row["engine"], row["setting"]) for row in rows))
    for engine, setting in lines:
        points = [row for row in rows if (row["engine"], row["setting"]) == (engine, setting)]
        is_limit = engine in LIMITS
        is_lesser = setting == "default" and (engine, "best") in lines
        axes.plot([sizes.index(row["block_bytes"]) for row in points], [row["gb_per_s"] for row in points],
                  linestyle="--" if is_limit else ":" if is_lesser else "-", color=COLOURS.get(engine),
                  marker=None if is_limit else MARKERS[rows[0]["op"]], linewidth=2.6 if engine == "kvferry" else 1.6,
                  zorder=3 if engine == "kvferry" else 2,
                  label=engine if engine == "kvferry" else f"{engine}, {setting}")
    axes.set_xticks(range(len(sizes)), [size_text(size) for size in sizes])
    axes.set_ylim(bottom=0)
    axes.margins(x=0.06)
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("block")
    axes.set_ylabel("GB/s")
    axes.grid(alpha=0.3)


def main() -> None:
    source, target = sys.argv[1:]
    result = json.loads(Path(source).read_text())
    rows = result["rows"]
    across = list(dict.fromkeys((row["path"], row["memory"]) for row in rows))
    down = list(dict.fromkeys(row["op"] for row in rows))
    figure, grid = pyplot.subplots(len(down), len(across), squeeze=False, layout="constrained",
                                   figsize=(2.2 + 5.2 * len(across), 1.2 + 3.6 * len(down)))
    named: dict[str, Any] = {}
    for y, op in enumerate(down):
        for x, (path, memory) in enumerate(across):
            some = [row for row in rows if (row["op"], row["path"], row["memory"]) == (op, path, memory)]
            draw(grid[y][x], some, f"{op}, path {path}, {memory} memory")
            handles, labels = grid[y][x].get_legend_handles_labels()
            named.update(zip(labels, handles, strict=True))
    figure.legend(named.values(), named.keys(), loc="outside right center", frameon=False)
    machine = result["machine"]
    figure.suptitle(f"kvferry {machine['version']}: {machine['cores']} cores, {machine['cpu']}, {machine['kernel']}, "
                    f"{machine['date']}", fontsize=9)
    figure.savefig(target, dpi=130)


if __name__ == "__main__":
    main()
