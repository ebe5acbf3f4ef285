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
        tag: Its name.
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


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()) -> Html:
    """Return a table.

    Args:
        columns: The heads.
        rows: The cells, in the order of `columns`.
        numbers: The columns that hold numbers, which are aligned to the right.
    """

    def cells(tag: str, row: Sequence[str], **attributes: str) -> Html:
        shown = [
            element(tag, cell, **attributes, **({"class_": "number"} if index in numbers else {}))
            for index, cell in enumerate(row)
        ]
        return element("tr", *shown)

    head = element("thead", cells("th", columns, scope="col"))
    body = element("tbody", *(cells("td", row) for row in rows))
    return element("div", element("table", head, body), class_="table")


def facts(pairs: Iterable[tuple[str, str]]) -> Html:
    """Return a list of names and what they are."""
    return element(
        "dl", *(element("div", element("dt", name), element("dd", value)) for name, value in pairs), class_="facts"
    )


def bar(share: float) -> Html:
    """Return a bar that is `share` (0 to 1) of its room."""
    return element("span", element("span", style=f"width: {100 * min(max(share, 0.0), 1.0):.2f}%"), class_="bar")
