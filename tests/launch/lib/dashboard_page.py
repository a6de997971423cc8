"""Draws the panels of a Grafana dashboard as one HTML page with SVG, for tests/draw_dashboard.py."""

from __future__ import annotations

import html
import math
import time
from typing import Any

KEY_PX = 16  # height of a line of names
COLUMNS, ROW_PX, GAP_PX = 24, 30, 8  # Grafana's grid: a panel of h rows is 30 h + 8 (h - 1) px high
COLOURS = ("#3b7dd8", "#d9822b", "#2f9e5f", "#c2453d", "#8058b8", "#1b9aaa", "#b5892e", "#d1669b", "#5b6f8a", "#7a9a2e")
STYLE = """
*{box-sizing:border-box}
body{margin:0;padding:16px;background:#f4f5f7;color:#24292e;font:13px/1.3 system-ui,sans-serif}
h1{font-size:18px;font-weight:600;margin:2px 0 12px}
h1 span{color:#6b7683;font-weight:400;font-size:13px;margin-left:12px}
main{position:relative}
section{position:absolute;background:#fff;border:1px solid #dfe3e8;border-radius:3px;overflow:hidden}
section.row{background:none;border:0;font-weight:600;font-size:15px;padding:4px 2px}
h2{font-size:13px;font-weight:600;margin:0;padding:8px 12px 2px}
.key{position:absolute;left:12px;right:12px;bottom:7px;overflow:hidden;display:flex;flex-wrap:wrap;gap:0 14px;
 align-content:flex-start;font-size:11.5px;line-height:16px;color:#4b5563}
.key span{white-space:nowrap}.key i{display:inline-block;width:14px;height:3px;border-radius:2px;margin:0 5px 3px 0}
.big,.none{position:absolute;inset:30px 0 0;display:flex;align-items:center;justify-content:center}
.big{font-size:76px;font-weight:600;color:#2f9e5f}.none{color:#8a94a0}
text{font-size:11px;fill:#6b7683}.grid{stroke:#e9ecf0}
"""


def page_of(panels: list[dict[str, Any]], shown: dict[str, Any], width: int) -> str:
    """`shown`: begin and end of the time that is drawn, and the series of each panel by its id."""
    column = (width - 32 + GAP_PX) / COLUMNS
    bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    drawn = "".join(_panel(panel, shown["panels"].get(str(panel["id"]), []), shown, column) for panel in panels)
    began, ended = (time.strftime("%H:%M:%S", time.gmtime(shown[key])) for key in ("begin", "end"))
    return (f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>"
            f"<h1>kvferry<span>{began} to {ended} UTC</span></h1>"
            f"<main style='height:{bottom * (ROW_PX + GAP_PX)}px'>{drawn}</main>")


def _panel(panel: dict[str, Any], series: list[Any], shown: dict[str, Any], column: float) -> str:
    place = panel["gridPos"]
    width, height = place["w"] * column - GAP_PX, place["h"] * (ROW_PX + GAP_PX) - GAP_PX
    style = (f"left:{place['x'] * column:.1f}px;top:{place['y'] * (ROW_PX + GAP_PX)}px;"
             f"width:{width:.1f}px;height:{height}px")
    title = html.escape(panel["title"])
    if panel["type"] == "row":
        return f"<section class=row style='{style}'>{title}</section>"
    unit = panel["fieldConfig"]["defaults"].get("unit", "short")
    if not series:
        inside = "<div class=none>No data</div>"
    elif panel["type"] == "stat":
        inside = f"<div class=big>{_text(series[0][1][-1][1], unit)}</div>"
    else:
        letters = sum(len(name) for name, _ in series)
        key = KEY_PX * min(3, math.ceil((6.5 * letters + 33 * len(series)) / (width - 40)))  # more lines are cut off
        names = "".join(f"<span><i style='background:{COLOURS[i % len(COLOURS)]}'></i>{html.escape(name)}</span>"
                        for i, (name, _) in enumerate(series))
        inside = (_chart(series, shown, unit, width, height - 40 - key)
                  + f"<div class=key style='height:{key}px'>{names}</div>")
    return f"<section style='{style}'><h2>{title}</h2>{inside}</section>"


def _chart(series: list[Any], shown: dict[str, Any], unit: str, width: float, height: float) -> str:
    left, right, top, low = 62.0, width - 14, 10.0, height - 20
    begin, end = float(shown["begin"]), float(shown["end"])
    step, highest = _scale(max(value for _, points in series for _, value in points))

    def x_of(when: float) -> float:
        return left + (right - left) * (when - begin) / (end - begin)

    def y_of(value: float) -> float:
        return low - (low - top) * value / highest

    parts = []
    for tick in range(round(highest / step) + 1):
        y = y_of(tick * step)
        parts.append(f"<line class=grid x1={left} x2={right:.1f} y1={y:.1f} y2={y:.1f} />"
                     f"<text x={left - 6} y={y + 4:.1f} text-anchor=end>{_text(tick * step, unit)}</text>")
    for minute in range(math.ceil(begin / 60), math.floor(end / 60) + 1):
        x = x_of(minute * 60)
        parts.append(f"<line class=grid x1={x:.1f} x2={x:.1f} y1={top} y2={low:.1f} />"
                     f"<text x={x:.1f} y={low + 15:.1f} text-anchor=middle>"
                     f"{time.strftime('%H:%M', time.gmtime(minute * 60))}</text>")
    for number, (_, points) in enumerate(series):
        line = " ".join(f"{x_of(when):.1f},{y_of(value):.1f}" for when, value in points)
        parts.append(f"<polyline points='{line}' fill=none stroke='{COLOURS[number % len(COLOURS)]}' stroke-width=1.6 "
                     "stroke-linejoin=round />")
    return f"<svg width={width:.1f} height={height:.1f}>{''.join(parts)}</svg>"


def _scale(highest: float) -> tuple[float, float]:
    """Returns the distance of the lines of the grid, and the value at the top."""
    highest = max(highest, 1e-9) if highest > 0 else 1.0
    size = 10 ** math.floor(math.log10(highest / 4))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor * 5 >= highest)
    return step, step * math.ceil(highest / step - 1e-9)


def _text(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{value * 100:.3g}%"
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 or value == 0 else f"{value * 1e3:.3g} ms"
    for size, letter in ((1e9, " Bil"), (1e6, " Mil"), (1e3, " K")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}" + (" req/s" if unit == "reqps" else "")
