"""Shows the nodes of a deployment in a table with a line for each node. On a terminal, `up` and `scale` refresh the
table in place; elsewhere, they print a line for each change. With --json, `up` prints a JSON object for each change.
"""

import json
import shutil
import sys
import time
from typing import Any, TextIO

COLUMNS = ("name", "host", "role", "state", "url", "pid", "since", "detail")
REDRAW_EVERY_S = 0.2


def cell(row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    if column == "since" and value:
        return str(value).partition("T")[2]
    return "-" if value in (None, "") else str(value)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the lines of a table: a heading, then a line for each row."""
    cells = [[cell(row, column) for column in COLUMNS] for row in rows]
    widths = [max([len(column), *(len(line[index]) for line in cells)]) for index, column in enumerate(COLUMNS)]
    return [" ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
            for line in [list(COLUMNS), *cells]]


class StatusView:
    """The output of `up` and `scale`. show() may be called as often as the caller likes: either it redraws the table,
    at most once in REDRAW_EVERY_S unless `at_once` is True, or it prints only changes. say() prints a line above the
    table.
    """

    def __init__(self, as_json: bool, stream: TextIO | None = None, live: bool = True) -> None:
        self._stream = stream or sys.stdout
        self._as_json = as_json
        self._live = live and not as_json and self._stream.isatty()
        self._drawn = 0
        self._drawn_at = 0.0
        self._seen: dict[str, tuple[str, str, str]] = {}

    def say(self, line: str) -> None:
        self._erase()
        self._write(json.dumps({"text": line}) if self._as_json else line)

    def show(self, rows: list[dict[str, Any]], at_once: bool = False) -> None:
        if self._live:
            if at_once or time.monotonic() - self._drawn_at > REDRAW_EVERY_S:
                self._erase()
                self._draw(rows)
            return
        for row in rows:
            now = (row["state"], row["url"], row["detail"])
            if self._seen.get(row["name"]) != now:
                self._seen[row["name"]] = now
                self._change(row)
        for name in set(self._seen) - {row["name"] for row in rows}:
            del self._seen[name]
            self._change({"name": name, "state": "gone"})

    def _change(self, row: dict[str, Any]) -> None:
        if self._as_json:
            self._write(json.dumps(row))
            return
        words = [cell(row, column) for column in COLUMNS if column not in ("since", "detail")]
        detail = f"  {row['detail']}" if row.get("detail") else ""
        self._write(f"{time.strftime('%H:%M:%S')} {' '.join(words)}{detail}")

    def _draw(self, rows: list[dict[str, Any]]) -> None:
        width = shutil.get_terminal_size().columns
        lines = [line[:width - 1] for line in table(rows)]
        self._write("\n".join(lines))
        self._drawn, self._drawn_at = len(lines), time.monotonic()

    def _erase(self) -> None:
        if self._drawn:
            self._stream.write(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()
