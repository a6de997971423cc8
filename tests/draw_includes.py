#!/usr/bin/env python3
"""Draws which folders of the product include headers of which other folders, into tests/data/includes.svg.

A folder stands above all folders whose headers it includes. Arrows that follow from other arrows are left out. The
transport's backends, which do not include each other, are drawn as one folder. The picture lists every edge in its
<desc>. With --check nothing is drawn: the program fails if folders include each other in a circle, or if the edges in
the file differ from those in the sources.
"""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
PICTURE = REPO / "tests" / "data" / "includes.svg"
COLOURS = {"transport": "#dbe9f6", "kernels": "#e3f2d9", "controller": "#fdebd0", "connector": "#f6dbe4",
           "launch": "#e8e4f4"}
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)

Edges = dict[str, set[str]]


def edges_of(root: Path) -> Edges:
    """Returns for each folder with C++ sources the other folders whose headers it includes."""
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", *COLOURS], cwd=root,
                            capture_output=True, text=True, check=True).stdout
    backends = {str(path.parent) for path in map(Path, listed.split("\0"))
                if path.name == f"{path.parent.name}_backend.cpp"}

    def box_of(folder: str) -> str:
        return "transport/BACKEND" if folder in backends else folder

    edges: Edges = {}
    for name in set(listed.split("\0")):
        path = Path(name)
        if path.suffix not in (".h", ".cpp", ".cu", ".cuh") or path.parts[:2] == ("launch", "examples"):
            continue
        if not (root / path).is_file():
            continue
        box = box_of(str(path.parent))
        targets = edges.setdefault(box, set())
        for header in INCLUDE.findall((root / path).read_text()):
            target = box_of(str(Path(header).parent))
            if target != box and header.split("/")[0] in COLOURS:
                targets.add(target)
    for target in {target for targets in edges.values() for target in targets}:
        edges.setdefault(target, set())
    return edges


def circles(edges: Edges) -> list[list[str]]:
    """Returns the groups of folders that include each other, directly or through others."""
    reach = {folder: reachable(edges, folder) for folder in edges}
    groups = {tuple(sorted(other for other in reach[folder] if folder in reach[other]))
              for folder in edges if folder in reach[folder]}
    return [list(group) for group in sorted(groups)]


def reachable(edges: Edges, folder: str) -> set[str]:
    found: set[str] = set()
    todo = [folder]
    while todo:
        for target in edges[todo.pop()] - found:
            found.add(target)
            todo.append(target)
    return found


def reduced(edges: Edges) -> Edges:
    """Returns the edges without those that follow from other edges. The edges must have no circles."""
    return {folder: {target for target in targets
                     if not any(target in reachable(edges, other) for other in targets if other != target)}
            for folder, targets in edges.items()}


def described(edges: Edges) -> str:
    return "\n".join(f"{folder} -> {' '.join(sorted(edges[folder]))}".rstrip() for folder in sorted(edges))


def rows_of(edges: Edges) -> list[list[str]]:
    """Returns the folders in rows by the length of their longest path down. In each row, folders are placed near those
    that they are connected to.
    """
    rank: dict[str, int] = {}

    def rank_of(folder: str) -> int:
        if folder not in rank:
            rank[folder] = 1 + max((rank_of(target) for target in edges[folder]), default=-1)
        return rank[folder]

    rows: dict[int, list[str]] = defaultdict(list)
    for folder in sorted(edges):
        rows[rank_of(folder)].append(folder)
    ordered = [rows[number] for number in sorted(rows)]
    place = {folder: (number + 0.5) / len(row) for row in ordered for number, folder in enumerate(row)}
    for _ in range(8):
        for row in ordered:
            near = {folder: [place[other] for other in edges if other in edges[folder] or folder in edges[other]]
                    for folder in row}
            row.sort(key=lambda folder: sum(near[folder]) / max(1, len(near[folder])))
            place.update({folder: (number + 0.5) / len(row) for number, folder in enumerate(row)})
    return ordered[::-1]


def draw(edges: Edges) -> str:
    rows = rows_of(edges)
    arrows = reduced(edges)
    box_height, row_height, gap = 24, 74, 14

    def box_width(folder: str) -> int:
        return 7 * len(folder) + 16

    width = max(sum(box_width(folder) + gap for folder in row) for row in rows) + gap
    height = row_height * len(rows)
    boxes, lines, left_of, top_of = [], [], {}, {}
    for number, row in enumerate(rows):
        free = width - sum(box_width(folder) for folder in row)
        left = free / (len(row) + 1)
        for folder in row:
            left_of[folder], top_of[folder] = left, number * row_height + 20
            boxes.append(f'<rect x="{left:.0f}" y="{top_of[folder]}" width="{box_width(folder)}" height="{box_height}" '
                         f'rx="4" fill="{COLOURS[folder.split("/")[0]]}" stroke="#666"/>'
                         f'<text x="{left + box_width(folder) / 2:.0f}" y="{top_of[folder] + 16}" '
                         f'text-anchor="middle">{folder}</text>')
            left += box_width(folder) + free / (len(row) + 1)
    for folder in sorted(arrows):
        for target in sorted(arrows[folder]):
            x1, y1 = left_of[folder] + box_width(folder) / 2, top_of[folder] + box_height
            x2, y2 = left_of[target] + box_width(target) / 2, top_of[target]
            lines.append(f'<path d="M{x1:.0f} {y1} C{x1:.0f} {y1 + 30} {x2:.0f} {y2 - 34} {x2:.0f} {y2 - 3}"/>')
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" font-family="monospace" '
        'font-size="11.5">',
        "<title>Which folder includes headers of which</title>",
        f"<desc>\n{described(edges)}\n</desc>".replace("->", "-&gt;"),
        '<defs><marker id="end" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0 6 3 0 6z" fill="#777"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height}" fill="white"/>',
        '<g fill="none" stroke="#999" marker-end="url(#end)">', *lines, "</g>", *boxes, "</svg>", ""])


def drawn() -> str:
    """Returns the edges that the committed picture lists."""
    return PICTURE.read_text().partition("<desc>\n")[2].partition("\n</desc>")[0].replace("-&gt;", "->")


def main() -> int:
    edges = edges_of(REPO)
    for circle in circles(edges):
        print("circle:", " ".join(circle))
    if circles(edges):
        return 1
    if sys.argv[1:] == ["--check"]:
        stale = drawn() != described(edges)
        print("the picture lists other edges; run tests/draw_includes.py" if stale else "the picture is up to date")
        return 1 if stale else 0
    PICTURE.write_text(draw(edges))
    print(f"{PICTURE.relative_to(REPO)}: {len(edges)} folders, {sum(map(len, edges.values()))} edges")
    return 0


if __name__ == "__main__":
    sys.exit(main())
