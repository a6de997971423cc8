"""Draws the figures of `kvferry bench controller --json`: controller_plot.py FIGURES.json OUT.png."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

OURS, FLOOR = "#c1121f", "#888888"

# Title, unit and divisor, then the bars: what it is, the figure, its colour.
PANELS: list[tuple[str, str, float, list[tuple[str, str, str]]]] = [
    ("a look-up of 128 keys, p50, next to an empty message", "us", 1, [
        ("ZeroMQ", "remote_zmq_us_p50", OURS), ("empty\nZeroMQ", "empty_zmq_us_p50", FLOOR),
        ("stream", "remote_stream_us_p50", OURS), ("empty\nUnix socket", "empty_stream_us_p50", FLOOR)]),
    ("look-ups of 128 keys a second and core", "thousand", 1e3, [
        ("ZeroMQ,\n16 in flight", "remote_zmq_per_s_per_core", OURS),
        ("stream,\n16 in flight", "remote_per_s_per_core", OURS),
        ("in process,\n128 bits", "lookup_128_128bit_per_s", OURS), ("in process,\n64 bits", "lookup_128_per_s", OURS),
        ("128 random\nlines", "random_lines_128_per_s", FLOOR)]),
    ("hashes indexed a second and core", "million", 1e6, [
        ("64 bits", "packed_event_hashes_per_s", OURS), ("128 bits", "packed_event_hashes_per_s_128bit", OURS),
        ("vLLM's events", "vllm_event_hashes_per_s", OURS)]),
]


def draw(axes: Any, figures: dict[str, Any], panel: tuple[str, str, float, list[tuple[str, str, str]]]) -> None:
    title, unit, divisor, bars = panel
    there = [(label, figures[name] / divisor, colour) for label, name, colour in bars if name in figures]
    drawn = axes.bar([label for label, _, _ in there], [value for _, value, _ in there],
                     color=[colour for _, _, colour in there])
    labels = [f"{value:.1f}" if value < 100 else f"{value:,.0f}" for _, value, _ in there]
    axes.bar_label(drawn, labels=labels, fontsize=9)
    axes.set_title(title, fontsize=11)
    axes.set_ylabel(unit)
    axes.tick_params(axis="x", labelsize=9)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def main() -> None:
    source, target = sys.argv[1:]
    figures = json.loads(Path(source).read_text())
    figure, grid = pyplot.subplots(1, len(PANELS), layout="constrained", figsize=(5.2 * len(PANELS), 4.4))
    for axes, panel in zip(grid, PANELS, strict=True):
        draw(axes, figures, panel)
    machine = figures.get("machine", {})
    figure.suptitle(f"kvferry bench controller: {figures['hashes']} hashes; {machine.get('cpu', '')}", fontsize=12)
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    main()
