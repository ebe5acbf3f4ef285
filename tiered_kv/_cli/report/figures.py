"""HTML elements and figures. A figure is SVG by matplotlib, with colours from the page's style: light, dark or printed.

matplotlib takes no CSS variables. So each colour here is a placeholder, which `in_page` replaces by a variable of
`report.css`. Titles and legends are HTML, since matplotlib would interpret names as its markup.

All text of an element is escaped, unless it is of the type `Html`: no name, path or reason brings markup in.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from tiered_kv.config.units import rounded_seconds
from tiered_kv.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axis import Axis

US_PER_S: Final = 1e6
SERIES_COLORS: Final = 8
"""Colours for tiers; a ninth tier has the first one's again."""
_NAMES: Final = (
    *("ink", "quiet", "grid", "surface", "miss", "accent"),
    *(f"tier-{index}" for index in range(SERIES_COLORS)),
)
"""Variables of the page's style. The placeholder of each is `#f1e2` and its number here."""
_PLACEHOLDER: Final = re.compile(r"#f1e2([0-9a-f]{2})")
INK, QUIET, GRID, SURFACE, MISS, ACCENT, *_TIERS = (f"#f1e2{i:02x}" for i in range(len(_NAMES)))

_LEFT_OUT: Final = re.compile(r'<!--.*?-->|<style.*?</style>|(?<=<g) id="[^"]*"', re.DOTALL)
"""Styles would reach beyond the figure, and the groups of several figures have the same names."""
_LONG_AXIS: Final = 300.0
_WIDTH_IN: Final = 4.4
_TAG: Final = re.compile("<[^>]*>")
_FOLDED_CHARACTERS: Final = 24
"""Of a line in a column of texts, beside which there is room for others."""
_HEIGHT_IN: Final = 2.4

_STYLE: Final[dict[str, Any]] = {  # Any: what matplotlib takes for a setting
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


def tier_color(index: int) -> str:
    """Return the colour of the tier with this number; the primary tier is 0."""
    return _TIERS[index % SERIES_COLORS]


def in_page(text: str) -> str:
    """Replace the placeholders in a text by the page's variables."""
    return _PLACEHOLDER.sub(lambda found: f"var(--{_NAMES[int(found[1], 16)]})", text)


def draw(
    name: str, description: str, plot: Callable[[Any], None], *, rows: int = 1, height_in: float = _HEIGHT_IN
) -> Html:
    """Return a figure as SVG, for a page.

    Args:
        name: Unique in the page.
        description: For readers who do not see the figure.
        plot: Draws into the axes, or into an array of axes if there are several rows.
        rows: Axes below each other, which share their horizontal axis.
        height_in: In inches; the width is 4.4.
    """
    from matplotlib import style
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    stream = io.StringIO()
    # The salt makes the ids of each figure unique, and the same in each run.
    with style.context(["default", {**_STYLE, "svg.hashsalt": name}]):  # not the user's settings
        figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
        FigureCanvasSVG(figure)
        plot(figure.subplots(rows, 1, sharex=True))
        figure.align_ylabels()
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return _inline(stream.getvalue(), description)


def plain_log(axis: Axis, shown: Callable[[float], str] = lambda value: f"{value:,.12g}") -> None:
    """Write 1, 2, 5 and 10 at a logarithmic axis; at a long one, the powers of ten only. `shown` writes a value."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0,) if high / low > _LONG_AXIS else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: shown(value)))
    axis.set_minor_locator(NullLocator())


def shown_us(microseconds: float) -> str:
    """Return a time in the unit that fits it: 1787 is "1.79ms"."""
    return rounded_seconds(microseconds / US_PER_S) if microseconds >= 1 else f"{microseconds:.2g}us"


def _inline(svg: str, description: str) -> Html:
    """Return matplotlib's SVG as an element, with the page's colours and font."""
    view_box = re.search(r'viewBox="([-0-9. ]+)"', svg)
    assert view_box is not None, "matplotlib writes a viewBox"
    inner = svg[svg.index(">", view_box.end()) + 1 : svg.rindex("</svg>")]
    inner = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--letters)", in_page(_LEFT_OUT.sub("", inner)))
    return element("svg", Html(inner), viewBox=view_box[1], role="img", aria_label=description)


class Html(str):
    """HTML text. Only this module makes it."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str) -> Html:
    """Return an element. In the names of attributes, `class_` is `class`, and `aria_label` is `aria-label`."""
    named = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(value)}"' for name, value in attributes.items()
    )
    return Html(f"<{tag}{named}>{joined(children)}</{tag}>")


def joined(children: Iterable[str]) -> Html:
    return Html("".join(each if isinstance(each, Html) else html.escape(each) for each in children))


def card(*children: str) -> Html:
    return element("div", *children, class_="card")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, texts: Sequence[int] = (0,)) -> Html:
    """Return a table. Columns that are not in `texts` hold numbers, aligned to the right.

    Each cell has the name of its column, too: where the table does not fit, a row is a list of names and values.
    """
    rows = list(rows)
    kinds = ["" if index in texts else "number" for index in range(len(columns))]

    def line(row: Sequence[str]) -> Html:
        cells = zip(row, kinds, columns, strict=True)
        return element("tr", *(element("td", cell, class_=kind, data_label=name) for cell, kind, name in cells))

    heads = (element("th", name, class_=kind, scope="col") for name, kind in zip(columns, kinds, strict=True))
    head, body = element("thead", element("tr", *heads)), element("tbody", *map(line, rows))
    widths_rem = (
        _width_rem(cells, at > 0 and at in texts) for at, cells in enumerate(zip(columns, *rows, strict=True))
    )
    return element(
        "div", element("table", head, body), class_="table", style=f"font-size: {sum(widths_rem) / 10:.1f}rem"
    )


def _width_rem(cells: Sequence[str], is_folded: bool) -> float:
    """Return about how wide a column has to be."""
    longest = max(len(_TAG.sub("", cell)) for cell in cells)
    return 1.5 + 0.5 * (min(longest, _FOLDED_CHARACTERS) if is_folded else longest)


def facts(pairs: Iterable[tuple[str, str]]) -> Html:
    """Return a list of names and values."""
    return element("dl", *(element("div", element("dt", name), element("dd", value)) for name, value in pairs))


def bar(share: float) -> Html:
    """Return a bar that fills `share` (0 to 1) of its cell."""
    return element("span", style=f"width: {100 * share:.2f}%", class_="bar")
