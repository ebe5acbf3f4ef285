"""HTML elements. All text is escaped, unless it is of the type `Html`: no name, path or reason brings markup in."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


class Html(str):
    """HTML text. Only this module and `figures` make it."""

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
    """Return a table. Columns that are not in `texts` hold numbers, aligned to the right."""

    def line(tag: str, row: Sequence[str], **attributes: str) -> Html:
        kinds = ("" if index in texts else "number" for index in range(len(row)))
        cells = (element(tag, cell, class_=kind, **attributes) for cell, kind in zip(row, kinds, strict=True))
        return element("tr", *cells)

    head = element("thead", line("th", columns, scope="col"))
    body = element("tbody", *(line("td", row) for row in rows))
    return element("div", element("table", head, body), class_="table")


def facts(pairs: Iterable[tuple[str, str]]) -> Html:
    """Return a list of names and values."""
    return element("dl", *(element("div", element("dt", name), element("dd", value)) for name, value in pairs))


def bar(share: float) -> Html:
    """Return a bar that fills `share` (0 to 1) of its cell."""
    return element("span", style=f"width: {100 * share:.2f}%", class_="bar")
