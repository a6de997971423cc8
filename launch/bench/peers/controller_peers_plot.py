"""Draws what `kvferry bench controller --peers` measured: controller_peers_plot.py FIGURES.json OUT.png."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

COLOURS = {"kvferry": "#c1121f", "dynamo": "#588157", "lmcache": "#2a6f97", "mooncake": "#7b2cbf", "redis": "#b08900"}

# Title, unit, and under which names the figure stands: kvferry's, the peers'.
PANELS = [
    ("look-ups of 128 keys, in process", "a second", ["lookup_128_per_s"], ["lookup_128_per_s"]),
    ("look-ups of 128 keys, remote, 16 in flight", "a second of the server's core", ["remote_per_s_per_core"],
     ["remote_per_s_per_core"]),
    ("events, in process where that is offered", "hashes a second", ["packed_event_hashes_per_s"],
     ["event_hashes_per_s", "remote_event_hashes_per_s"]),
    ("memory of whoever holds the directory", "bytes a hash", ["bytes_per_hash_64"],
     ["bytes_per_hash", "remote_bytes_per_hash"]),
]


def first_of(figures: dict[str, Any], names: list[str]) -> float | None:
    return next((figures[name] for name in names if figures.get(name)), None)


def draw(axes: Any, result: dict[str, Any], panel: tuple[str, str, list[str], list[str]]) -> None:
    title, unit, own_names, names = panel
    bars = [("kvferry", first_of(result, own_names))]
    bars += [(peer["engine"], first_of(peer["figures"], names)) for peer in result["peers"]]
    there = [(engine, value) for engine, value in bars if value]
    drawn = axes.bar([engine.replace(" ", "\n") for engine, _ in there], [value for _, value in there],
                     color=[COLOURS.get(engine.split()[0]) for engine, _ in there])
    axes.bar_label(drawn, labels=[short(value) for _, value in there], fontsize=9)
    axes.set_yscale("log")
    axes.margins(y=0.12)
    axes.set_title(title, fontsize=11)
    axes.set_ylabel(unit)
    axes.tick_params(axis="x", labelsize=9)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def short(value: float) -> str:
    for unit, factor in (("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.3g}"


def main() -> None:
    source, target = sys.argv[1:]
    result = json.loads(Path(source).read_text())
    figure, grid = pyplot.subplots(2, 2, layout="constrained", figsize=(12, 8))
    for axes, panel in zip(grid.flat, PANELS, strict=True):
        draw(axes, result, panel)
    machine = result["machine"]
    figure.suptitle(f"kvferry {machine['version']}, {result['hashes']} hashes: {machine['cores']} cores, "
                    f"{machine['cpu']}, {machine['kernel']}, {machine['date']}", fontsize=10)
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    main()
