"""The plots of docs/explanation/hit-rates.md: hit rates by workload and size, out of what policy_hits.py prints.

    python tests/performance/hit_plots.py RESULTS.jsonl docs/explanation/hit-rates.svg

It needs matplotlib (extra `report`). Colours are of a middle brightness: they show on a light page and on a dark one.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from tests.performance.bench import command_line

COLUMNS = 3
GREY = "#808080"
LINES: dict[str, dict[str, Any]] = {  # Any: as matplotlib has it
    "bound": {"color": GREY, "linestyle": ":"},
    "s3fifo": {"color": "#2f9e6e", "linestyle": "-.", "marker": "^"},
    "arc": {"color": "#c77a1e", "linestyle": (0, (5, 1)), "marker": "s"},
    "lru": {"color": "#4a86d8", "linestyle": "--", "marker": "o"},
    "density": {"color": "#d6456a", "linestyle": "-", "marker": "D", "linewidth": 2.0},
}
STYLE: dict[str, Any] = {
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
    "lines.markersize": 3,
    "svg.fonttype": "none",
    "svg.hashsalt": "hit rates",
    "text.color": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
}


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Write an SVG with axes for each workload, in the order of the results: a line for each policy over the sizes."""
    workloads = list(dict.fromkeys(each["workload"] for each in results))
    rows = -(-len(workloads) // COLUMNS)
    with style.context(STYLE):
        figure = Figure(figsize=(8.4, 2.1 * rows + 0.5), layout="constrained")
        for index, workload in enumerate(workloads):
            axes = figure.add_subplot(rows, COLUMNS, index + 1)
            sized = sorted((each for each in results if each["workload"] == workload), key=lambda each: each["blocks"])
            sizes = [each["blocks"] for each in sized]
            for policy, line in LINES.items():
                axes.plot(sizes, [each[policy] for each in sized], label=policy, **line)
            axes.set_title(workload, fontsize=9)
            axes.set_xscale("log")
            axes.set_xticks(sizes[:: -(-len(sizes) // 5)], [_short(size) for size in sizes[:: -(-len(sizes) // 5)]])
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_ylim(bottom=0)
            axes.grid(visible=True)
            if index == 0:
                handles = axes.get_legend_handles_labels()
        figure.supxlabel("blocks of the primary tier", fontsize=9)
        figure.supylabel("prefix hit rate", fontsize=9)
        figure.legend(*handles, loc="outside upper center", ncols=len(LINES), frameon=False)
        figure.savefig(path, metadata={"Date": None})
    path.write_text(re.sub(r"(\d\.\d\d)\d+", r"\1", path.read_text()))  # a hundredth of a point is enough


def _short(size: int) -> str:
    return f"{size / 1000:g}k" if size >= 1000 else str(size)


def main() -> None:
    arguments = command_line(__doc__, "results", "svg").parse_args()
    plot([json.loads(line) for line in arguments.results.read_text().splitlines()], arguments.svg)


if __name__ == "__main__":
    main()
