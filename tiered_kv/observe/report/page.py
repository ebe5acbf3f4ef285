"""The page around the plots of a report: its head, and what it says of the run, the machine and the configuration."""

from __future__ import annotations

import html
import json
import os
import platform
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from importlib import resources
from pathlib import Path
from string import Template
from typing import Final

import yaml

from tiered_kv import __version__
from tiered_kv.config.redaction import redact, scrub
from tiered_kv.config.stack_config import StackConfig
from tiered_kv.config.units import rounded_bytes
from tiered_kv.errors import ConfigError
from tiered_kv.observe.report.figures import require_matplotlib
from tiered_kv.observe.report.markup import Html, element, facts, joined
from tiered_kv.tiering.base import SecondaryTierManager

_ENDLESS: Final = 1 << 20
"""Columns of YAML that is not broken into lines, so that no secret is broken either."""
_CPU_MODEL: Final = re.compile(r"^model name\s*:\s*(.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Run:
    """A run of the command, of which a page is written.

    Args:
        stack: The stack's file, as it was given.
        arguments: Those of the command, the verb first.
        config: The stack's configuration.
        began: When the run began, with its time zone.
        described: What each secondary tier said of itself when it was opened, by name; texts for people.
    """

    stack: str
    arguments: Sequence[str]
    config: StackConfig
    began: datetime
    described: dict[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def stack_name(self) -> str:
        """The name of the stack's file."""
        return Path(self.stack).name

    def note_tiers(self, names: Iterable[str], tiers: Iterable[SecondaryTierManager]) -> None:
        """Keep what open tiers say of themselves, for those that can."""
        for name, tier in zip(names, tiers, strict=True):
            with suppress(Exception):  # whatever a stranger's tier raises
                self.described[name] = dict(_said(key, value) for key, value in tier.describe().items())

    def told(self, text: str) -> str:
        """Return a text without any secret of the configuration, and without what is secret in URLs."""
        return scrub(text, self.config.secret_texts())


@dataclass(frozen=True, slots=True)
class Tile:
    """One of the figures at the top of a page: a value, its unit, what it is, and whether it is bad news."""

    value: str
    unit: str
    name: str
    is_bad: bool = False


def check_target(path: Path) -> None:
    """Make sure, before anything is measured, that a page can be made and written to `path`.

    Raises:
        ConfigError: It cannot, or the library that draws is not installed (MissingExtraError).
    """
    require_matplotlib()
    place = path if path.exists() else path.parent
    if path.is_dir() or not os.access(place, os.W_OK):
        raise ConfigError(f"the page cannot be written to '{path}'", location="--report")


def write_page(path: Path, page: str) -> None:
    """Write a page to a file, in place of what was there.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        path.write_text(page, encoding="utf-8", errors="backslashreplace")  # names of files may be any bytes
    except OSError as error:
        raise ConfigError(f"the page cannot be written to '{path}': {error.strerror}", location="--report") from error


def page(
    run: Run,
    *,
    kind: str,
    heading: str,
    lede: str,
    notes: Iterable[Html],
    tiles: Iterable[Tile],
    sections: Iterable[Html],
) -> str:
    """Return a whole page. `kind`, `heading` and `lede` are texts; the rest is made with `markup`."""
    here = resources.files("tiered_kv.observe.report")
    shown_tiles = element("div", *(_tile(each) for each in tiles), class_="tiles")
    return Template((here / "page.html").read_text("utf-8")).substitute(
        version=html.escape(__version__),
        style=(here / "report.css").read_text("utf-8"),
        title=html.escape(run.told(f"{heading} - {kind}")),
        kind=html.escape(kind),
        heading=html.escape(run.told(heading)),
        lede=html.escape(run.told(lede)),
        notes=joined(notes),
        tiles=shown_tiles,
        sections=joined(sections),
        date=html.escape(_date(run.began)),
    )


def counted(count: int, noun: str) -> str:
    """Return a number of things: "1 block", "2,000 blocks"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def note(text: str, *, is_bad: bool = False) -> Html:
    """Return what a reader must not miss."""
    return element("p", text, class_="note bad" if is_bad else "note")


def figure(title: str, about: str, plot: Html, legend: Html | None = None, *, is_wide: bool = False) -> Html:
    """Return a plot with its title, its legend and a caption. A wide one has the page's width, its words beside it."""
    caption = element("figcaption", element("h3", title), element("p", about), *([legend] if legend else []))
    return element("figure", caption, plot, class_="card wide" if is_wide else "card")


def legend(keys: Iterable[tuple[str, str]]) -> Html:
    """Return what colours mean: names, and each one's colour of the page."""
    return element("div", *(element("span", color_key(color), name) for name, color in keys), class_="legend")


def color_key(color: str) -> Html:
    """Return a small square of a colour of the page."""
    return element("span", class_="key", style=f"background: {color}")


def section(title: str, about: str, *content: Html) -> Html:
    """Return a part of a page: what it is about in plain words, and its content."""
    return element("section", element("h2", title), element("p", about, class_="about"), *content)


def conditions(run: Run, settings: Iterable[tuple[str, str]]) -> Html:
    """Return the part of a page that says under which conditions the figures were measured."""
    plain = json.loads(json.dumps(run.config.shown(), default=str, skipkeys=True))
    config = yaml.safe_dump(plain, sort_keys=False, default_flow_style=None, width=_ENDLESS, allow_unicode=True)
    command = shlex.join(["tiered-kv", *(str(redact(each)) for each in run.arguments)])
    parts = [
        _card("Run", facts([("begun", _date(run.began)), *settings])),
        _card("Machine", facts(_machine())),
        _card("Command", element("pre", run.told(command))),
        _card("Configuration, secrets left out", element("pre", run.told(config))),
    ]
    for name, described in run.described.items():
        said = ((run.told(key), run.told(text)) for key, text in described.items())
        parts.append(_card(f"What tier {name} said of itself", facts(said)))
    about = "Compare figures only with those of the same machine, configuration and requests."
    return section("How it was measured", about, *parts)


def _said(name: str, value: object) -> tuple[str, str]:
    """Return for people what a tier said of itself."""
    if isinstance(value, bool):
        text = "yes" if value else "no"
    else:
        text = rounded_bytes(value) if isinstance(value, int) and name.endswith("_bytes") else str(value)
    return name.removesuffix("_bytes").replace("_", " "), text


def _card(title: str, content: Html) -> Html:
    return element("div", element("h3", title), content, class_="card")


def _tile(tile: Tile) -> Html:
    value = element("span", tile.value, " ", element("small", tile.unit), class_="value")
    return element(
        "div", value, element("span", tile.name, class_="name"), class_="tile bad" if tile.is_bad else "tile"
    )


def _date(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M:%S %Z")


def _machine() -> list[tuple[str, str]]:
    """Return what the figures depend on, and nothing that names the machine."""
    try:
        model = _CPU_MODEL.search(Path("/proc/cpuinfo").read_text("utf-8", "replace"))
    except OSError:
        model = None
    usable = len(os.sched_getaffinity(0))
    cores = f"{usable} usable of {os.cpu_count()}"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [
        ("processor", model[1].strip() if model else platform.machine()),
        ("cores", cores),
        ("memory", rounded_bytes(memory)),
        ("kernel", f"{platform.system()} {platform.release()}"),
        ("Python", f"{platform.python_implementation()} {platform.python_version()}"),
        ("tiered-kv", __version__),
    ]
