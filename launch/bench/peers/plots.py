"""Draws the JSON figures of a `kvferry bench` command: plots.py KIND FIGURES.json OUT.png."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

Figures = dict[str, Any]

OURS, FLOOR = "#c1121f", "#888888"
COLOURS = {"kvferry": OURS, "nixl": "#2a6f97", "mooncake": "#588157", "ucx": "#7b2cbf", "memcpy": "#444444",
           "cma": FLOOR, "socket": "#b08900"}
LIMITS = ("memcpy", "cma", "socket")
MARKERS = {"push": "o", "pull": "s"}
PEER_COLOURS = {"kvferry": OURS, "dynamo": "#588157", "lmcache": "#2a6f97", "mooncake": "#7b2cbf", "redis": "#b08900"}

# Each panel has a title, a unit and a divisor, then the label, figure and colour of each bar.
CONTROLLER_PANELS: list[tuple[str, str, float, list[tuple[str, str, str]]]] = [
    ("a lookup of 128 keys, p50, next to an empty message", "us", 1, [
        ("ZeroMQ", "remote_zmq_us_p50", OURS), ("empty\nZeroMQ", "empty_zmq_us_p50", FLOOR),
        ("stream", "remote_stream_us_p50", OURS), ("empty\nUnix socket", "empty_stream_us_p50", FLOOR)]),
    ("lookups of 128 keys, per second and core", "thousand", 1e3, [
        ("ZeroMQ,\n16 in flight", "remote_zmq_per_s_per_core", OURS),
        ("stream,\n16 in flight", "remote_per_s_per_core", OURS),
        ("in process,\n128 bits", "lookup_128_128bit_per_s", OURS), ("in process,\n64 bits", "lookup_128_per_s", OURS),
        ("128 random\nlines", "random_lines_128_per_s", FLOOR)]),
    ("hashes indexed, per second and core", "million", 1e6, [
        ("64 bits", "packed_event_hashes_per_s", OURS), ("128 bits", "packed_event_hashes_per_s_128bit", OURS),
        ("vLLM's events", "vllm_event_hashes_per_s", OURS)]),
]

# Each panel has a title, a unit, names of kvferry's figure and names of the peers' figure. Of several names, the first
# one with a figure is drawn.
PEER_PANELS = [
    ("lookups of 128 keys, in process", "a second", ["lookup_128_per_s"], ["lookup_128_per_s"]),
    ("lookups of 128 keys, remote, 16 in flight", "per second of the server's processor time",
     ["remote_per_s_per_core"], ["remote_per_s_per_core"]),
    ("events (in process if the peer supports it)", "hashes a second", ["packed_event_hashes_per_s"],
     ["event_hashes_per_s", "remote_event_hashes_per_s"]),
    ("memory of the process that holds the directory", "bytes a hash", ["bytes_per_hash_64"],
     ["bytes_per_hash", "remote_bytes_per_hash"]),
]

# Each panel has a title and a unit, then the label, figure, colour and divisor of each line.
FLEET_PANELS: list[tuple[str, str, list[tuple[str, str, str, float]]]] = [
    ("lookups of 128 keys", "ms", [("p50", "lookup_us_p50", OURS, 1e3), ("p99", "lookup_us_p99", "#780000", 1e3)]),
    ("messages a second", "thousand", [("in", "messages_in_per_s", OURS, 1e3),
                                       ("out", "messages_out_per_s", "#669bbc", 1e3)]),
    ("processor", "cores", [("controllers", "controller_cores", OURS, 1),
                            ("the simulated nodes", "bench_cores", FLOOR, 1)]),
    ("memory of a controller", "MiB", [("resident", "controller_rss_mib", OURS, 1)]),
    ("times", "s", [("all nodes joined", "told_s", OURS, 1),
                    ("a dead node is seen", "dead_noticed_s_max", "#780000", 1),
                    ("controller restarted", "restart_register_s", "#669bbc", 1),
                    ("a replica died", "failover_s", "#003049", 1)]),
]


def panels(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    return pyplot.subplots(rows, columns, squeeze=False, layout="constrained", figsize=(width, height))


def label(axes: Any, title: str, unit: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_ylabel(unit)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)


def bars(axes: Any, there: list[tuple[str, float, str | None]], number: Callable[[float], str]) -> None:
    drawn = axes.bar([name for name, _, _ in there], [value for _, value, _ in there],
                     color=[colour for _, _, colour in there])
    axes.bar_label(drawn, labels=[number(value) for _, value, _ in there], fontsize=9)
    axes.tick_params(axis="x", labelsize=9)


def draw_controller(figures: Figures) -> Any:
    figure, grid = panels(1, len(CONTROLLER_PANELS), 5.2 * len(CONTROLLER_PANELS), 4.4)
    for axes, (title, unit, divisor, wanted) in zip(grid.flat, CONTROLLER_PANELS, strict=True):
        bars(axes, [(name, figures[key] / divisor, colour) for name, key, colour in wanted if key in figures],
             lambda value: f"{value:.1f}" if value < 100 else f"{value:,.0f}")
        label(axes, title, unit)
    figure.suptitle(f"kvferry bench controller: {figures['hashes']} hashes; {figures['machine']['cpu']}", fontsize=12)
    return figure


def draw_controller_peers(figures: Figures) -> Any:
    def first_of(source: Figures, names: list[str]) -> float | None:
        return next((source[name] for name in names if source.get(name)), None)

    def short(value: float) -> str:
        for unit, factor in (("M", 1e6), ("k", 1e3)):
            if value >= factor:
                return f"{value / factor:.3g} {unit}"
        return f"{value:.3g}"

    figure, grid = panels(2, 2, 12, 8)
    for axes, (title, unit, own_names, names) in zip(grid.flat, PEER_PANELS, strict=True):
        found = [("kvferry", first_of(figures, own_names))]
        found += [(peer["engine"], first_of(peer["figures"], names)) for peer in figures["peers"]]
        bars(axes, [(engine.replace(" ", "\n"), value, PEER_COLOURS.get(engine.split()[0]))
                    for engine, value in found if value], short)
        axes.set_yscale("log")
        axes.margins(y=0.12)
        label(axes, title, unit)
    figure.suptitle(f"{figures['hashes']} hashes, {machine_text(figures)}", fontsize=10)
    return figure


def draw_fleet(figures: Figures) -> Any:
    rows = figures["rows"]
    figure, grid = panels(1, len(FLEET_PANELS), 4.2 * len(FLEET_PANELS), 4.0)
    for axes, (title, unit, lines) in zip(grid.flat, FLEET_PANELS, strict=True):
        for name, key, colour, divisor in lines:
            there = [row for row in rows if key in row]
            if there:
                axes.plot([row["nodes"] for row in there], [row[key] / divisor for row in there], "o-", color=colour,
                          label=name)
        label(axes, title, unit)
        axes.set_xlabel("nodes")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=9)
    figure.suptitle(f"kvferry bench fleet: controllers {rows[0]['replicas']}, over {rows[0]['over']}; "
                    f"{figures['machine']['cpu']}", fontsize=12)
    return figure


def draw_transfer(figures: Figures) -> Any:
    """Draws rates against the block size. The machine's limits are dashed lines. Other lines are solid, except that
    kvferry's settings other than "default" are dotted, as is a peer's "default" if the peer also has "best"."""
    rows = figures["rows"]
    across = list(dict.fromkeys((row["path"], row["memory"]) for row in rows))
    down = list(dict.fromkeys(row["op"] for row in rows))
    figure, grid = panels(len(down), len(across), 2.2 + 5.2 * len(across), 1.2 + 3.6 * len(down))
    named: dict[str, Any] = {}
    for y, op in enumerate(down):
        for x, (path, memory) in enumerate(across):
            some = [row for row in rows if (row["op"], row["path"], row["memory"]) == (op, path, memory)]
            transfer_lines(grid[y][x], some)
            label(grid[y][x], f"{op}, path {path}, {memory} memory", "GB/s")
            handles, labels = grid[y][x].get_legend_handles_labels()
            named.update(zip(labels, handles, strict=True))
    figure.legend(named.values(), named.keys(), loc="outside right center", frameon=False)
    figure.suptitle(machine_text(figures), fontsize=9)
    return figure


def transfer_lines(axes: Any, rows: list[dict[str, Any]]) -> None:
    sizes = sorted({row["block_bytes"] for row in rows})
    lines = list(dict.fromkeys((row["engine"], row["setting"]) for row in rows))
    for engine, setting in lines:
        points = [row for row in rows if (row["engine"], row["setting"]) == (engine, setting)]
        is_limit, is_ours = engine in LIMITS, engine == "kvferry"
        is_lesser = (engine, "best") in lines if setting == "default" else is_ours
        axes.plot([sizes.index(row["block_bytes"]) for row in points], [row["gb_per_s"] for row in points],
                  linestyle="--" if is_limit else ":" if is_lesser else "-", color=COLOURS.get(engine),
                  marker=None if is_limit else MARKERS[rows[0]["op"]], linewidth=2.6 if is_ours else 1.6,
                  zorder=3 if is_ours else 2, label=f"{engine}, {setting}")
    axes.set_xticks(range(len(sizes)), [size_text(size) for size in sizes])
    axes.set_ylim(bottom=0)
    axes.margins(x=0.06)
    axes.set_xlabel("block")


def size_text(size: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def machine_text(figures: Figures) -> str:
    machine = figures["machine"]
    return (f"kvferry {machine['version']}: {machine['cores']} cores, {machine['cpu']}, {machine['kernel']}, "
            f"{machine['date']}")


KINDS = {"transfer": draw_transfer, "controller": draw_controller, "controller_peers": draw_controller_peers,
         "fleet": draw_fleet}


def main() -> None:
    kind, source, target = sys.argv[1:]
    KINDS[kind](json.loads(Path(source).read_text())).savefig(target, dpi=120)


if __name__ == "__main__":
    main()
