"""Drawing figures: matplotlib makes the SVG, the page's style gives it its colours, light, dark or printed.

Every colour of a figure stands for a variable of the page's style (`report.css`). Titles and legends are the page's,
so that names never pass through a plot's own little language.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from tiered_kv.errors import MissingExtraError
from tiered_kv.observe.report.markup import Html, element

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_VARIABLES: Final = ("--ink", "--quiet", "--grid", "--surface", "--miss", "--good", "--warn", "--bad", "--accent")
SERIES_COLORS: Final = 8
"""Colours for tiers; a ninth tier has the first one's again, dashed."""
_NAMES: Final = (*_VARIABLES, *(f"--tier-{index}" for index in range(SERIES_COLORS)))
_PLACEHOLDER: Final = re.compile(r"#f1e2([0-9a-f]{2})")
_GROUP_ID: Final = re.compile(r'(?<=<g) id="[^"]*"')
"""Nothing refers to the names of groups, and the figures of a page would have the same ones."""
_OWN_STYLE: Final = re.compile(r"<!--.*?-->|<style.*?</style>", re.DOTALL)
"""It would reach beyond the figure: the page's style has the same."""

INK, QUIET, GRID, SURFACE, MISS, GOOD, WARN, BAD, ACCENT = (f"#f1e2{index:02x}" for index in range(len(_VARIABLES)))
_DASHES: Final = ("-", "--", ":", "-.")
_LONG_AXIS: Final = 300.0
_WIDTH_IN: Final = 5.2
_HEIGHT_IN: Final = 2.7

_STYLE: Final[dict[str, Any]] = {  # Any: what matplotlib takes for a setting
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "text.parse_math": False,
    "text.color": INK,
    "axes.labelcolor": QUIET,
    "axes.labelsize": 8,
    "axes.edgecolor": GRID,
    "axes.xmargin": 0,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.unicode_minus": False,
    "axes.formatter.useoffset": False,
    "figure.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.3,
    "lines.solid_joinstyle": "round",
    "xtick.color": GRID,
    "xtick.labelcolor": QUIET,
    "ytick.color": GRID,
    "ytick.labelcolor": QUIET,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}


def require_matplotlib() -> None:
    """Make sure that figures can be drawn, without loading what draws them.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise MissingExtraError("a report", "report")


def tier_color(index: int) -> str:
    """Return the colour of the tier with this number in a figure; the primary tier is 0."""
    return f"#f1e2{len(_VARIABLES) + index % SERIES_COLORS:02x}"


def tier_variable(index: int) -> str:
    """Return the same colour in the page around the figures."""
    return f"var(--tier-{index % SERIES_COLORS})"


def tier_dashes(index: int) -> str:
    """Return how a tier's line is drawn: tiers of one colour differ in it."""
    return _DASHES[index // SERIES_COLORS % len(_DASHES)]


def draw(
    name: str, description: str, plot: Callable[[Any], None], *, rows: int = 1, height_in: float = _HEIGHT_IN
) -> Html:
    """Return a figure as SVG, to stand in the page.

    Args:
        name: Tells this figure's marks from those of others of the page.
        description: Says what it shows to those who do not see it.
        plot: Draws into the axes, or into an array of axes if there are several rows.
        rows: Axes below each other, which share their horizontal axis.
        height_in: Of the figure; it is 5.2 inches wide.
    """
    with _figure(name, rows, height_in) as (figure, axes):
        plot(axes)
        figure.align_ylabels()
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return _inline(stream.getvalue(), description)


def plain_log(axis: Axis) -> None:
    """Write the numbers of a logarithmic axis as people do: 1, 2, 5, 10; of a long one, the powers of ten only."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0,) if high / low > _LONG_AXIS else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    axis.set_minor_locator(NullLocator())


@contextmanager
def _figure(name: str, rows: int, height_in: float) -> Iterator[tuple[Figure, Any]]:
    from matplotlib import style
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # The salt makes the marks of each figure its own, and the same in each run.
    with style.context(["default", {**_STYLE, "svg.hashsalt": name}]):  # whatever the user has chosen for plots
        figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
        FigureCanvasSVG(figure)
        yield figure, figure.subplots(rows, 1, sharex=True)


def _inline(svg: str, description: str) -> Html:
    """Return what matplotlib wrote as an element of a page, with the page's colours and letters."""
    view_box = re.search(r'viewBox="([-0-9. ]+)"', svg)
    assert view_box is not None, "matplotlib tells the size of what it draws"
    inner = svg[svg.index(">", view_box.end()) + 1 : svg.rindex("</svg>")]
    inner = _GROUP_ID.sub("", _OWN_STYLE.sub("", inner))
    inner = _PLACEHOLDER.sub(lambda found: f"var({_NAMES[int(found[1], 16)]})", inner)
    inner = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--letters)", inner)
    return element("svg", Html(inner), viewBox=view_box[1], role="img", aria_label=description)
