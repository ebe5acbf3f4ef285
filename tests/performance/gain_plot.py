"""The plot of docs/explanation/performance.md: what a server gains, by the rate of its disk.

    python tests/performance/gain_plot.py docs/explanation/performance.md docs/explanation/gains.svg

The page's first table is the data: change it there, and run this again. It needs matplotlib (extra `report`).
"""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from tests.performance.bench import command_line
from tests.performance.hit_plots import GREY, STYLE

LINES: dict[str, dict[str, Any]] = {  # Any: as matplotlib has it
    "all chats, vLLM's own tiering": {"color": GREY, "linestyle": ":", "marker": "^"},
    "all chats": {"color": "#4a86d8", "linestyle": "--", "marker": "o"},
    "to the first token": {"color": "#d6456a", "linestyle": "-", "marker": "D"},
}
LINED = "paced"
"""The engine whose points are joined; a point of another engine stands alone, with its name."""


def table_of(page: str) -> list[dict[str, str]]:
    """Return the rows of the first table of a page, each by its head."""
    lines = re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)[0].splitlines()
    heads, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    return [dict(zip(heads, row, strict=True)) for row in rows]


def plot(rows: list[dict[str, str]], path: Path) -> None:
    """Write an SVG: a line for each measure over the rates of the disk; runs are averaged."""
    with style.context([STYLE, {"svg.hashsalt": "gains", "lines.markersize": 5}]):
        figure = Figure(figsize=(7.2, 3.3), layout="constrained")
        axes = figure.add_subplot()
        axes.axhline(1, color=GREY, linewidth=1)
        for name, line in LINES.items():
            points = [(row["engine"], float(row["disk"]), _mean(row[name])) for row in rows if row[name]]
            joined = [(disk, ratio) for engine, disk, ratio in points if engine == LINED]
            axes.plot(*zip(*joined, strict=True), label=name, **line)
            for engine, disk, ratio in points:
                if engine != LINED:
                    axes.plot(disk, ratio, color=line["color"], marker="*", markersize=11, linestyle="none")
                    axes.annotate(engine, (disk, ratio), (-8, 0), textcoords="offset points", ha="right", va="center")
        disks = sorted({float(row["disk"]) for row in rows if row["engine"] == LINED})
        axes.set_xscale("log")
        axes.set_xlim(left=disks[0] * 0.7)
        axes.set_xticks(disks, [f"{disk:g}" for disk in disks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylim(bottom=0)
        axes.text(disks[-1], 1.03, "without a stack", ha="right", va="bottom")
        axes.set_xlabel("the disk's rate, over the rate at which the model computes keys and values")
        axes.set_ylabel("time, over that without a stack")
        axes.grid(visible=True)
        figure.legend(loc="outside upper center", ncols=len(LINES), frameon=False)
        figure.savefig(path, metadata={"Date": None})
    path.write_text(re.sub(r"(\d\.\d\d)\d+", r"\1", path.read_text()))  # a hundredth of a point is enough


def _mean(cell: str) -> float:
    return fmean(map(float, cell.split(", ")))


def main() -> None:
    arguments = command_line(__doc__, "page", "svg").parse_args()
    plot(table_of(arguments.page.read_text()), arguments.svg)


if __name__ == "__main__":
    main()
