"""A report's page: HTML elements, its head, the run, the machine and the configuration.

`replay` and `simulate` call it on the main thread. What must stay true: no name, path or reason brings markup in, since
all text of an element is escaped, unless it is of the type `Html`. A page shows no secret.
"""

from __future__ import annotations

import html
import json
import os
import platform
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path
from string import Template
from typing import Final

import yaml

from tiered_kv import __version__
from tiered_kv.config.secrets import redact, scrub
from tiered_kv.config.stack_config import StackConfig
from tiered_kv.config.units import rounded_bytes

_ENDLESS: Final = 1 << 20
"""Columns of YAML, so wide that no line is broken. `scrub` would miss a secret on two lines."""
_CPU_MODEL: Final = re.compile(r"^model name\s*:\s*(.+)$", re.MULTILINE)
_COLORS: Final = ("ink", "quiet", "grid", "miss", *(f"tier-{index}" for index in range(8)))
"""Variables of the page's style. matplotlib knows no variables, so it draws in placeholders: `#f1e2` and the index."""
INK, QUIET, GRID, MISS, *_TIERS = (f"#f1e2{number:02x}" for number in range(len(_COLORS)))


def tier_color(index: int) -> str:
    """Return the colour of the tier with this number; the primary tier is 0."""
    return _TIERS[index % len(_TIERS)]


class Html(str):
    """HTML text, which is not escaped again. Only this module and `figures` make it."""

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
    kinds = ["" if index in texts else "number" for index in range(len(columns))]

    def line(tag: str, row: Sequence[str]) -> Html:
        return element("tr", *(element(tag, cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)))

    body = element("tbody", *(line("td", row) for row in rows))
    return element("div", element("table", element("thead", line("th", columns)), body), class_="table")


def facts(pairs: Iterable[tuple[str, str]]) -> Html:
    """Return a list of names and values."""
    return element("dl", *(element("div", element("dt", name), element("dd", value)) for name, value in pairs))


@dataclass(frozen=True, slots=True)
class Run:
    """A run of the command, for a page.

    Attributes:
        stack: The stack's file, as it was given; empty without one.
        arguments: The arguments of the command, the verb first.
        config: The stack's configuration; None without a stack.
        began: The time when it began, with its time zone.
    """

    stack: str
    arguments: Sequence[str]
    config: StackConfig | None
    began: datetime

    @property
    def stack_name(self) -> str:
        return Path(self.stack).name

    def scrub(self, text: str) -> str:
        """Return a text without the secrets of the configuration and of URLs."""
        return scrub(text, set() if self.config is None else self.config.secret_texts())


def page(
    run: Run,
    *,
    kind: str,
    heading: str,
    lede: str,
    sections: Iterable[Html],
    tiles: Iterable[Html] = (),
    settings: Iterable[tuple[str, str]] = (),
    notes: Iterable[str] = (),
) -> str:
    """Return a whole page; at its end are the `settings` of the run. Notes that begin with CORRUPT are shown in red."""
    here = resources.files("tiered_kv.cli.report")
    shown_notes = (
        element("p", run.scrub(text), class_="note bad" if text.startswith("CORRUPT") else "note") for text in notes
    )
    texts = {
        "kind": kind,
        "heading": heading[:1].upper() + heading[1:],
        "lede": lede,
        "version": __version__,
        "date": _date(run.began),
    }
    text = Template((here / "page.html").read_text("utf-8")).substitute(
        {name: html.escape(run.scrub(text)) for name, text in texts.items()},
        style=(here / "report.css").read_text("utf-8"),
        notes=joined(shown_notes),
        tiles=element("div", *tiles, class_="tiles"),
        sections=joined([*sections, _conditions(run, settings)]),
    )
    return re.sub("#f1e2([0-9a-f]{2})", lambda found: f"var(--{_COLORS[int(found[1], 16)]})", text)


def tile(value: str, unit: str, name: str, *, is_bad: bool = False) -> Html:
    """Return one of the numbers at the top of a page."""
    shown = element("span", value, " ", element("small", unit), class_="value")
    return element("div", shown, element("span", name), class_="tile bad" if is_bad else "tile")


def figure(title: str, about: str, plot: Html, legend: Iterable[tuple[str, str]] = ()) -> Html:
    """Return a plot with its title, a caption, and a legend of names and colours."""
    keys = element("div", *(element("span", color_key(color), name) for name, color in legend), class_="legend")
    caption = element("figcaption", element("h3", title), element("p", about), keys)
    return element("figure", caption, plot, class_="card")


def color_key(color: str) -> Html:
    """Return a small square of a colour of the figures."""
    return element("span", class_="key", style=f"background: {color}")


def section(title: str, about: str, *content: Html) -> Html:
    return element("section", element("h2", title), element("p", about, class_="about"), *content)


def plots(*figures: Html) -> Html:
    """Return figures beside each other."""
    return element("div", *figures, class_="plots")


def _conditions(run: Run, settings: Iterable[tuple[str, str]]) -> Html:
    """Return the part of a page about the conditions of the measurement."""
    command = shlex.join(["tiered-kv", *(str(redact(each)) for each in run.arguments)])
    parts = {
        "Run": facts([("begun", _date(run.began)), *settings]),
        "Machine": facts(_machine()),
        "Command": element("pre", run.scrub(command)),
    }
    if run.config is not None:
        plain = json.loads(json.dumps(run.config.shown(), default=str, skipkeys=True))
        config = yaml.safe_dump(plain, sort_keys=False, default_flow_style=None, width=_ENDLESS, allow_unicode=True)
        parts["Configuration, secrets left out"] = element("pre", run.scrub(config))
    about = "Compare figures only with those of the same machine, configuration and command."
    return section("How it was measured", about, *(card(element("h3", title), part) for title, part in parts.items()))


def _date(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M:%S %Z")


def _machine() -> list[tuple[str, str]]:
    """Return the facts about the machine that results depend on, without its name."""
    try:
        model = _CPU_MODEL.search(Path("/proc/cpuinfo").read_text("utf-8", "replace"))
    except OSError:
        model = None
    return [
        ("processor", model[1].strip() if model else platform.machine()),
        ("cores", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"),
        ("memory", rounded_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))),
        ("kernel", f"{platform.system()} {platform.release()}"),
        ("Python", f"{platform.python_implementation()} {platform.python_version()}"),
        ("tiered-kv", __version__),
    ]
