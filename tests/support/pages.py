"""Files, commands and tables on pages of the documentation, which tests run or compare.

`python -m tests.support.pages` writes the lists of `counters.md` from the code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.support.stacks import BUILT_IN_TIERS
from tiered_kv.config.hooks import tier_plugins
from tiered_kv.metrics.metric import Metric
from tiered_kv.metrics.vocabulary import (
    ACCOUNT,
    ATTACHED,
    AUDIT,
    COMMON,
    EVENTS,
    HISTORY,
    PRIMARY,
    RECORDING,
    SECONDARY,
    SERVER,
    TENANTS,
)
from tiered_kv.reasons import FAILED, SENTENCES, SKIPPED, Fate, RecordStatus, TooSlow

_DOCS = Path(__file__).parents[2] / "docs"
COUNTERS = _DOCS / "reference/counters.md"


def shown(page: str) -> dict[str, str]:
    """Return the code blocks of a page below `docs/` that have a comment above them, by that comment."""
    text = (_DOCS / page).read_text()
    return dict(re.findall(r"<!-- ([^\n]+) -->\n```\w+\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))


def write_shown(page: str, directory: Path) -> list[str]:
    """Write the files that a page shows; return their names in order."""
    files = shown(page)
    for name, text in files.items():
        (directory / name).write_text(text)
    return [*files]


def commands(page: str) -> list[str]:
    """Return the lines of shell blocks that run `tiered-kv`."""
    blocks = re.findall(r"^```(?:ba)?sh\n(.*?)^```$", (_DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines() if line.startswith("tiered-kv ")]


def tables() -> dict[str, str]:
    """Return the lists of `counters.md` that come from the code, by the name that the page gives them."""
    of_records = {status.value for status in RecordStatus} - {"truncated", "checksum"}
    fates = [fate.label for fate in Fate if fate > Fate.STORED]
    rows = [
        f"| {_name(name, each)} | {', '.join(types)} | {each.help} |" for name, (each, types) in tier_metrics().items()
    ]
    return {
        **{
            title: _list({_name(*each): _text(each[1]) for each in table.items()})
            for title, table in MANAGER_TABLES.items()
        },
        "TIER": "\n".join(["| counter | of | what it counts |", "| --- | --- | --- |", *rows]),
        "SKIPPED": _list({f"`{reason}`": reason.sentence for reason in SKIPPED}),
        "TOO_SLOW_REASONS": _list({f"`{reason}`": reason.sentence for reason in TooSlow}),
        "FAILED": _list({f"`{reason}`": reason.sentence for reason in FAILED if reason not in of_records}),
        "FATES": _list({f"`{word}`": SENTENCES[word] for word in fates}),
    }


def tier_metrics() -> dict[str, tuple[Metric, list[str]]]:
    """Return by name the metrics of the built-in tiers' own, each with the types that declare it."""
    types = {name: tier_plugins().resolve(name).metrics for name in BUILT_IN_TIERS}
    metrics = COMMON | {metric.name: metric for declared in types.values() for metric in declared}
    return {
        name: (metric, [each for each, declared in types.items() if metric in declared] or ["all"])
        for name, metric in metrics.items()
    }


MANAGER_TABLES = {
    "PRIMARY": PRIMARY,
    "ACCOUNT": ACCOUNT,
    "SECONDARY": SECONDARY,
    "HISTORY": HISTORY,
    "AUDIT": AUDIT,
    "EVENTS": EVENTS,
    "TENANTS": TENANTS,
    "RECORDING": RECORDING,
    "ATTACHED": ATTACHED,
    "SERVER": SERVER,
}


def _name(name: str, metric: Metric) -> str:
    return f"`{name}{{{', '.join(metric.labels)}}}`" if metric.labels else f"`{name}`"


def _text(metric: Metric) -> str:
    """Return what a metric counts, with the few values of its label; longer lists stand below it on the page."""
    few = [f"`{value}`" for (value, *_) in metric.values] if len(metric.values) <= 3 else []
    return f"{metric.help.removesuffix('.')}: {', '.join(few)}." if few else metric.help


def _list(items: Mapping[str, str]) -> str:
    return "\n".join(f"- {what}: {text}" for what, text in items.items())


def with_tables(text: str) -> str:
    """Return the text of a page with the lists that its comments name."""
    written = tables()
    comment = re.compile(r"^<!-- from the code: (\w+) -->\n(?:\n(?:[|-] .*\n)+)?", re.MULTILINE)
    return comment.sub(lambda found: f"<!-- from the code: {found[1]} -->\n\n{written[found[1]]}\n", text)


def undescribed(names: Iterable[str], page: str, section: str = "") -> set[str]:
    """Return the names that a page, or its section, does not mention as code."""
    text = (_DOCS / page).read_text()
    if section:
        text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return {name for name in names if f"`{name}`" not in text}


if __name__ == "__main__":
    COUNTERS.write_text(with_tables(COUNTERS.read_text()))
