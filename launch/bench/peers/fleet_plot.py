"""Draws the figures of `kvferry bench fleet --json`: fleet_plot.py FIGURES.json OUT.png."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

# Title and unit, then the lines: what it is, the figure, its colour, what it is divided by.
PANELS: list[tuple[str, str, list[tuple[str, str, str, float]]]] = [
    ("look-ups of 128 keys", "ms", [("p50", "lookup_us_p50", "#c1121f", 1e3),
                                    ("p99", "lookup_us_p99", "#780000", 1e3)]),
    ("messages a second", "thousand", [("in", "messages_in_per_s", "#c1121f", 1e3),
                                       ("out", "messages_out_per_s", "#669bbc", 1e3)]),
    ("processor", "cores", [("controllers", "controller_cores", "#c1121f", 1),
                            ("the simulated nodes", "bench_cores", "#888888", 1)]),
    ("memory of a controller", "MiB", [("resident", "controller_rss_mib", "#c1121f", 1)]),
    ("times", "s", [("all nodes joined", "told_s", "#c1121f", 1),
                    ("a dead node is seen", "dead_noticed_s_max", "#780000", 1),
                    ("controller restarted", "restart_register_s", "#669bbc", 1),
                    ("a replica died", "failover_s", "#003049", 1)]),
]


def draw(axes: Any, rows: list[dict[str, Any]], panel: tuple[str, str, list[tuple[str, str, str, float]]]) -> None:
    title, unit, lines = panel
    for label, name, colour, divisor in lines:
        there = [row for row in rows if name in row]
        if there:
            axes.plot([row["nodes"] for row in there], [row[name] / divisor for row in there], "o-", color=colour,
                      label=label)
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("nodes")
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)


def main() -> None:
    source, target = sys.argv[1:]
    figures = json.loads(Path(source).read_text())
    rows = figures["rows"]
    figure, grid = pyplot.subplots(1, len(PANELS), layout="constrained", figsize=(4.2 * len(PANELS), 4.0))
    for axes, panel in zip(grid, PANELS, strict=True):
        draw(axes, rows, panel)
    figure.suptitle(f"kvferry bench fleet: controllers {rows[0]['replicas']}, over {rows[0]['over']}; "
                    f"{figures.get('machine', {}).get('cpu', '')}", fontsize=12)
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    main()
