"""The plots of docs/explanation: what a server gains, what grows with the blocks, and hit rates by workload and size.

    python tests/performance/plots.py gains docs/explanation/performance.md docs/explanation/gains.svg
    python tests/performance/plots.py growth docs/explanation/performance.md docs/explanation/growth.svg
    python tests/performance/plots.py hits RESULTS.jsonl docs/explanation/hit-rates.svg

The data of `gains` and `growth` are tables of the page: change them there, and run this again. That of `hits` is what
`policy_hits.py` prints. It needs matplotlib (extra `report`). Colours are of a middle brightness: they show on a light
page and on a dark one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from tests.performance.bench import command_line

COLUMNS = 3
GREY = "#808080"
STYLE: dict[str, Any] = {  # Any: as matplotlib has it
    "axes.edgecolor": GREY,
    "axes.facecolor": "none",
    "axes.labelcolor": GREY,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.size": 9,
    "grid.alpha": 0.3,
    "grid.color": GREY,
    "lines.linewidth": 1.3,
    "svg.fonttype": "none",
    "text.color": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
}
MEASURES: dict[str, dict[str, Any]] = {
    "all chats, vLLM's own tiering": {"color": GREY, "linestyle": ":", "marker": "^"},
    "all chats": {"color": "#4a86d8", "linestyle": "--", "marker": "o"},
    "to the first token": {"color": "#d6456a", "linestyle": "-", "marker": "D"},
}
LINED = "paced"
"""The engine whose points are joined; a point of another engine stands alone, with its name."""
BUILDS: dict[str, dict[str, Any]] = {
    "86162300": {"color": GREY, "linestyle": "--", "marker": "^"},
    "now": {"color": "#4a86d8", "linestyle": "-", "marker": "o"},
}
POLICIES: dict[str, dict[str, Any]] = {
    "bound": {"color": GREY, "linestyle": ":"},
    "s3fifo": {"color": "#2f9e6e", "linestyle": "-.", "marker": "^"},
    "arc": {"color": "#c77a1e", "linestyle": (0, (5, 1)), "marker": "s"},
    "lru": {"color": "#4a86d8", "linestyle": "--", "marker": "o"},
    "density": {"color": "#d6456a", "linestyle": "-", "marker": "D", "linewidth": 2.0},
}


def gains(page: str) -> Figure:
    """Return a line for each measure over the rates of the disk; runs are averaged."""
    rows = table_of(page, "disk")
    figure = Figure(figsize=(7.2, 3.3), layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(1, color=GREY, linewidth=1)
    for name, line in MEASURES.items():
        points = [
            (row["engine"], float(row["disk"]), fmean(map(float, row[name].split(", ")))) for row in rows if row[name]
        ]
        joined = [(disk, ratio) for engine, disk, ratio in points if engine == LINED]
        axes.plot(*zip(*joined, strict=True), label=name, markersize=5, **line)
        for engine, disk, ratio in points:
            if engine != LINED:
                axes.plot(disk, ratio, color=line["color"], marker="*", markersize=11, linestyle="none")
                axes.annotate(engine, (disk, ratio), (-8, 0), textcoords="offset points", ha="right", va="center")
    disks = sorted({float(row["disk"]) for row in rows if row["engine"] == LINED})
    axes.set_xlim(left=disks[0] * 0.7)
    over_sizes(axes, disks, [f"{disk:g}" for disk in disks])
    axes.text(disks[-1], 1.03, "without a stack", ha="right", va="bottom")
    axes.set_xlabel("the disk's rate, over the rate at which the model computes keys and values")
    axes.set_ylabel("time, over that without a stack")
    figure.legend(loc="outside upper center", ncols=len(MEASURES), frameon=False)
    return figure


def table_of(page: str, head: str) -> list[dict[str, str]]:
    """Return the rows of the first table of a page with a column `head`, each by its heads."""
    for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        heads, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
        if head in heads:
            return [dict(zip(heads, row, strict=True)) for row in rows]
    raise ValueError(f"the page has no table with a column {head!r}")


def growth(page: str) -> Figure:
    """Return axes for each measure: a line for each build over the numbers of blocks."""
    rows = table_of(page, "build")
    measures = list(dict.fromkeys(row["what"] for row in rows))
    figure = Figure(figsize=(8.4, 2.1 * -(-len(measures) // COLUMNS) + 0.5), layout="constrained")
    for index, measure in enumerate(measures):
        axes = figure.add_subplot(-(-len(measures) // COLUMNS), COLUMNS, index + 1)
        for row in (each for each in rows if each["what"] == measure):
            points = {
                int(name.replace(",", "")): float(cell.replace(",", ""))
                for name, cell in row.items()
                if name not in ("what", "build") and cell
            }
            axes.plot([*points], [*points.values()], label=row["build"], markersize=4, **BUILDS[row["build"]])
        axes.set_title(measure, fontsize=9)
        sizes = [name for name in rows[0] if name not in ("what", "build")]
        over_sizes(
            axes,
            [int(name.replace(",", "")) for name in sizes],
            [name.replace(",000,000", "M").replace(",000", "k") for name in sizes],
        )
        if "memory" not in measure:
            axes.set_yscale("log")
            axes.autoscale(axis="y")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter("{x:g}")
        if index == 0:
            handles = axes.get_legend_handles_labels()
    figure.supxlabel("blocks", fontsize=9)
    figure.legend(*handles, loc="outside upper center", ncols=len(BUILDS), frameon=False)
    return figure


def hits(lines: str) -> Figure:
    """Return axes for each workload, in the order of the results: a line for each policy over the sizes."""
    results = [json.loads(line) for line in lines.splitlines()]
    workloads = list(dict.fromkeys(each["workload"] for each in results))
    rows = -(-len(workloads) // COLUMNS)
    figure = Figure(figsize=(8.4, 2.1 * rows + 0.5), layout="constrained")
    for index, workload in enumerate(workloads):
        axes = figure.add_subplot(rows, COLUMNS, index + 1)
        sized = sorted((each for each in results if each["workload"] == workload), key=lambda each: each["blocks"])
        sizes = [each["blocks"] for each in sized]
        for policy, line in POLICIES.items():
            axes.plot(sizes, [each[policy] for each in sized], label=policy, markersize=3, **line)
        axes.set_title(workload, fontsize=9)
        shown = sizes[:: -(-len(sizes) // 5)]
        over_sizes(axes, shown, [f"{size / 1000:g}k" if size >= 1000 else str(size) for size in shown])
        if index == 0:
            handles = axes.get_legend_handles_labels()
    figure.supxlabel("blocks of the primary tier", fontsize=9)
    figure.supylabel("prefix hit rate", fontsize=9)
    figure.legend(*handles, loc="outside upper center", ncols=len(POLICIES), frameon=False)
    return figure


def over_sizes(axes: Any, ticks: list[Any], names: list[str]) -> None:
    """Draw over a logarithmic scale that has these ticks only, from 0 upwards."""
    axes.set_xscale("log")
    axes.set_xticks(ticks, names)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom=0)
    axes.grid(visible=True)


PLOTS: dict[str, Callable[[str], Figure]] = {"gains": gains, "growth": growth, "hits": hits}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("plot", choices=PLOTS)
    parser.add_argument("data", type=Path)
    parser.add_argument("svg", type=Path)
    arguments = parser.parse_args()
    with style.context([STYLE, {"svg.hashsalt": arguments.plot}]):
        figure = PLOTS[arguments.plot](arguments.data.read_text())
        figure.savefig(arguments.svg, metadata={"Date": None})
    text = arguments.svg.read_text()
    arguments.svg.write_text(re.sub(r"(\d\.\d\d)\d+", r"\1", text))  # a hundredth of a point is enough


if __name__ == "__main__":
    main()
