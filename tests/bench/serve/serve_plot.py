"""Draws the rows of tests/bench/serve/run: serve_plot.py ROWS.json OUT.png."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

COLOURS = {"plain": "#888888", "pushed": "#c1121f", "pulled": "#f28482", "nixl": "#457b9d", "nixl-default": "#a8dadc",
           "nixl-third-core": "#1d3557"}
# Each panel has a title, a unit, a key and whether its axis is logarithmic. Most are, because a model without enough
# processor time waits 30 times longer than the rest.
PANELS = [("hand-over: prefill's end to decode's first token,\nless one decode step", "ms", "handover_ms", True),
          ("TTFT of one request", "ms", "ttft_ms", True),
          ("vllm bench serve: throughput", "output tokens/s", "serve_output_tokens_per_s", False),
          ("vllm bench serve: TTFT p50", "ms", "serve_ttft_ms_p50", True),
          ("vllm bench serve: ITL p50", "ms", "serve_itl_ms_p50", True),
          ("vllm bench serve: ITL p99", "ms", "serve_itl_ms_p99", True)]
COLUMNS = 3


def panel(axes: Any, rows: list[dict[str, Any]], title: str, unit: str, key: str, is_log: bool) -> None:
    rows = [row for row in rows if key in row]
    lengths = sorted({row["prompt_tokens"] for row in rows})
    kinds = list(dict.fromkeys((row["deployment"], row["first_token"]) for row in rows))
    width = 0.8 / max(len(kinds), 1)
    for place, kind in enumerate(kinds):
        name, first_token = kind
        values = {lengths.index(row["prompt_tokens"]): row[key] for row in rows
                  if (row["deployment"], row["first_token"]) == kind}
        is_hatched = name in ("pushed", "pulled") and first_token == "decode"
        drawn = axes.bar([at + (place - (len(kinds) - 1) / 2) * width for at in values], list(values.values()), width,
                         color=COLOURS[name], hatch="//" if is_hatched else None, edgecolor="white",
                         label=f"{name}, first token of decode" if is_hatched else name)
        axes.bar_label(drawn, fmt="%.0f", fontsize=6)
    axes.set_xticks(range(len(lengths)), [f"{length} tokens" for length in lengths])
    axes.set_title(title, fontsize=10)
    axes.set_ylabel(unit)
    axes.margins(y=0.15)
    if is_log and rows:
        axes.set_yscale("log")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def main() -> None:
    source, target = sys.argv[1:]
    rows = [row for row in json.loads(Path(source).read_text()) if row["load"] == "random"]
    figure, grid = pyplot.subplots(len(PANELS) // COLUMNS, COLUMNS, layout="constrained", figsize=(13, 7.5))
    for axes, parts in zip(grid.flat, PANELS, strict=True):
        panel(axes, rows, *parts)
    grid[0][1].legend(fontsize=8)
    figure.savefig(target, dpi=80)


if __name__ == "__main__":
    main()
