"""HTML that escapes whatever is not marked as HTML, so that no name, path or reason can bring markup into a page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


class Html(str):
    """Text that is HTML already. Only this module and the plots make it."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str) -> Html:
    """Return an element. Children and attributes are escaped, except children that are `Html`.

    Args:
        children: What stands in it, in this order.
        attributes: By name; `class_` is `class`, and `aria_label` is `aria-label`.
    """
    named = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(value)}"' for name, value in attributes.items()
    )
    return Html(f"<{tag}{named}>{joined(children)}</{tag}>")


def joined(children: Iterable[str]) -> Html:
    """Return several pieces one after the other; those that are no `Html` are escaped."""
    return Html("".join(each if isinstance(each, Html) else html.escape(each) for each in children))


def card(*children: str) -> Html:
    """Return a box of the page."""
    return element("div", *children, class_="card")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, texts: Sequence[int] = (0,)) -> Html:
    """Return a table; all columns but those in `texts` hold numbers, which are aligned to the right."""

    def line(tag: str, row: Sequence[str], **attributes: str) -> Html:
        kinds = ("" if index in texts else "number" for index in range(len(row)))
        cells = (element(tag, cell, class_=kind, **attributes) for cell, kind in zip(row, kinds, strict=True))
        return element("tr", *cells)

    head = element("thead", line("th", columns, scope="col"))
    body = element("tbody", *(line("td", row) for row in rows))
    return element("div", element("table", head, body), class_="table")


def facts(pairs: Iterable[tuple[str, str]]) -> Html:
    """Return a list of names and what they are."""
    return element("dl", *(element("div", element("dt", name), element("dd", value)) for name, value in pairs))


def bar(share: float) -> Html:
    """Return a bar that is `share` (0 to 1) of its room."""
    return element("span", style=f"width: {100 * share:.2f}%", class_="bar")
