"""The figures of reports: SVG by matplotlib, and the samples of a replay that its figures show.

`replay` and `simulate` call it on the main thread. What must stay true: titles and legends are HTML, since matplotlib
would interpret names as its markup. `page` replaces the colours by variables of its style: light, dark or printed.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tiered_kv.cli.report.page import GRID, INK, MISS, QUIET, Html, element, tier_color
from tiered_kv.errors import MissingExtraError
from tiered_kv.metrics.counters import count_of
from tiered_kv.workload.tally import GB, Tally

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

Values = npt.NDArray[Any]  # Any: counts or numbers
CountersByTier = Mapping[str, Mapping[str, Any]]  # Any: as `Counters.snapshot`

_LEFT_OUT: Final = re.compile(r'<!--.*?-->|<style.*?</style>|(?<=<g) id="[^"]*"', re.DOTALL)
"""Parts that are removed from the SVG. Styles would change the page around it; several figures would have equal ids."""
_LONG_AXIS: Final = 300.0
"""The ratio of its ends above which a logarithmic axis shows only powers of ten."""
_SIZE_IN: Final = (4.4, 2.4)
_RATE_MIN: Final = 4.0
"""The lowest upper end of an axis of rates, in bytes a second."""
_SECONDS_MIN: Final = 0.001
SAMPLES_MAX: Final = 100
INTERVAL_S: Final = 0.05
"""Seconds between the first samples. The interval doubles at `SAMPLES_MAX` samples: so a long run has no more samples
than a short run."""

_STYLE: Final[dict[str, Any]] = {  # Any: the value of a matplotlib setting
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "text.parse_math": False,
    "text.color": INK,
    "axes.labelcolor": QUIET,
    "axes.edgecolor": GRID,
    "axes.xmargin": 0,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.formatter.useoffset": False,
    "figure.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.3,
    "xtick.color": GRID,
    "xtick.labelcolor": QUIET,
    "ytick.color": GRID,
    "ytick.labelcolor": QUIET,
    "ytick.major.size": 0,
}


def require_matplotlib() -> None:
    """Raise `MissingExtraError` unless matplotlib is installed; do not import it."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise MissingExtraError("a report", "report")


def draw(name: str, description: str, plot: Callable[[Any], None], *, rows: int = 1) -> Html:
    """Return a figure as SVG, for a page.

    Args:
        name: Unique in the page.
        description: For readers who do not see the figure.
        plot: Draws into the axes, or into an array of axes if there are several rows.
        rows: Axes below each other, which share their horizontal axis.
    """
    from matplotlib import style
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    stream = io.StringIO()
    # The salt makes the ids of each figure unique, and the same in each run.
    with style.context(["default", {**_STYLE, "svg.hashsalt": name}]):  # the user's settings must not change a figure
        figure = Figure(figsize=_SIZE_IN, layout="constrained")
        FigureCanvasSVG(figure)
        plot(figure.subplots(rows, 1, sharex=True))
        figure.align_ylabels()
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return _inline(stream.getvalue(), description)


def plain_log(axis: Axis) -> None:
    """Write 1, 2, 5 and 10 at a logarithmic axis; at a long one, the powers of ten only."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0,) if high / low > _LONG_AXIS else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    axis.set_minor_locator(NullLocator())


def _inline(svg: str, description: str) -> Html:
    """Return matplotlib's SVG as an element, with the page's font."""
    view_box = re.search(r'viewBox="([-0-9. ]+)"', svg)
    assert view_box is not None, "matplotlib writes a viewBox"
    inner = svg[svg.index(">", view_box.end()) + 1 : svg.rindex("</svg>")]
    inner = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--letters)", _LEFT_OUT.sub("", inner))
    return element("svg", Html(inner), viewBox=view_box[1], role="img", aria_label=description)


def hits_over_requests(samples: Sequence[ReplaySample], tiers: Sequence[str]) -> Html:
    windows = _windows(samples, lambda sample: sample.blocks)
    edges = np.array([windows[0][0].requests, *(after.requests for _, after in windows)] if windows else [0])

    def plot(axes: Axes) -> None:
        below = np.zeros(len(windows))
        for index, tier in enumerate(tiers):
            top = below + np.array([_share(before, after, tier) for before, after in windows])
            _fill(axes, edges, below, top, tier_color(index))
            below = top
        _fill(axes, edges, below, np.full(len(below), 100.0), MISS)
        axes.set_ylim(0, 100)
        axes.set_ylabel("blocks asked for (%)")
        axes.set_xlabel("requests answered")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")

    return draw("hits", "Share of blocks by the tier they came from, over the requests", plot)


def throughput(samples: Sequence[ReplaySample], tiers: Sequence[str]) -> Html:
    names = ("stored_bytes_total", "loaded_bytes_total")
    windows = _windows(samples, lambda sample: sample.seconds)
    seconds = np.array([after.seconds - before.seconds for before, after in windows])
    middles = [(before.seconds + after.seconds) / 2 for before, after in windows]

    def plot(panels: Sequence[Axes]) -> None:
        for axes, name, what in zip(panels, names, ("stored", "loaded"), strict=True):
            for index, tier in enumerate(tiers):
                grown = np.array([after.count(tier, name) - before.count(tier, name) for before, after in windows])
                axes.plot(middles, grown / seconds / GB, color=tier_color(index))
            axes.set_ylim(0, max(axes.get_ylim()[1], _RATE_MIN / GB))
            axes.set_ylabel(f"{what} (GB/s)")
            axes.locator_params(axis="y", nbins=4)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.12g}")
        panels[-1].set_xlim(0, max(samples[-1].seconds, _SECONDS_MIN))
        panels[-1].set_xlabel("seconds since the start")

    return draw("throughput", "Throughput of each tier over time, stores above, loads below", plot, rows=2)


def _windows(
    samples: Sequence[ReplaySample], progress: Callable[[ReplaySample], float]
) -> list[tuple[ReplaySample, ReplaySample]]:
    """Return pairs of samples between which `progress` has grown."""
    return [(a, b) for a, b in pairwise(samples) if progress(b) > progress(a)]


def _share(before: ReplaySample, after: ReplaySample, tier: str) -> float:
    return 100 * (after.hits.get(tier, 0) - before.hits.get(tier, 0)) / (after.blocks - before.blocks)


def _fill(axes: Axes, edges: Values, below: Values, top: Values, color: str) -> None:
    """Fill the area between two stepped lines."""
    if len(top):
        axes.stairs(top, edges, baseline=below, fill=True, color=color, linewidth=0)


@dataclass(frozen=True, slots=True)
class ReplaySample:
    """A replay at one moment, in totals since its start.

    Attributes:
        seconds: The time since its start.
        requests: Requests whose lookups were answered.
        blocks: Blocks of these requests.
        hits: Loaded blocks, by tier.
        counters: The manager's counters, by tier and name.
    """

    seconds: float
    requests: int
    blocks: int
    hits: Mapping[str, int]
    counters: CountersByTier

    def count(self, tier: str, name: str) -> int:
        """Return a counter of a tier, summed over its labels."""
        return count_of(self.counters, tier, name)


@dataclass(slots=True)
class Sampler:
    """Takes samples of a replay between its steps. The thread of the replay uses it.

    `counters` returns the manager's counters.
    """

    counters: Callable[[], CountersByTier]
    clock: Callable[[], float] = time.monotonic
    samples: list[ReplaySample] = field(default_factory=list)
    _interval_s: float = INTERVAL_S
    _next_s: float = 0.0
    """Seconds from the start to the next sample."""
    _started_s: float = 0.0
    """The time of the start, in seconds of `clock`."""
    _tally: Tally = field(default_factory=lambda: Tally(hits={}))

    def start(self) -> None:
        """Take the first sample, at second 0."""
        self._started_s = self.clock()
        self._take()

    def note(self, tally: Tally) -> None:
        """Take a sample if it is time for one. Called after each step; costs one call of the clock."""
        self._tally = tally
        if self.clock() - self._started_s >= self._next_s:
            self._take()

    def finish(self) -> None:
        """Take the last sample, after the last stores have ended."""
        self._take()

    def _take(self) -> None:
        if len(self.samples) >= SAMPLES_MAX:
            del self.samples[1::2]
            self._interval_s *= 2
        seconds, tally = self.clock() - self._started_s, self._tally
        self.samples.append(ReplaySample(seconds, tally.requests, tally.blocks, dict(tally.hits), self.counters()))
        self._next_s = seconds + self._interval_s
