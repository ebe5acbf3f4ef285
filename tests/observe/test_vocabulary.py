"""One vocabulary: the table of metrics and the page of counters name the same things, with the same labels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tiered_kv.observe.vocabulary import MANAGER, TIER, TOTAL, Metric

PAGE = (Path(__file__).parents[2] / "docs/reference/counters.md").read_text()
OF_MANAGER = ("Of the primary tier", "Of every secondary tier", "Of the history", "Of the audit", "Histograms")
OF_TIERS = (
    "Of tiers made with the toolkit",
    *(f"Of {name}" for name in ("nvme", "memory", "fs", "redis", "s3")),
)


def described(*titles: str) -> dict[str, tuple[str, ...]]:
    """Return the labels of each counter in the tables of these sections."""
    found = {}
    for title in titles:
        (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
        table = re.split(r"^\| (?:counter|histogram) \|", text, flags=re.MULTILINE)[1].partition("\n\n")[0]
        columns = [cell.strip() for cell in table.splitlines()[0].strip(" |").split("|")]
        at = columns.index("labels") + 1
        for row in table.splitlines()[2:]:
            cells = [cell.strip() for cell in row.split("|")[1:-1]]
            for name in re.findall(r"`(\w+)`", cells[0]):
                found[name] = tuple(re.findall(r"`(\w+)`", cells[at]))
    return found


@pytest.mark.parametrize(("table", "titles"), [(MANAGER, OF_MANAGER), (TIER, OF_TIERS)], ids=["manager", "tiers"])
def test_the_table_has_what_the_page_has(table: dict[str, Metric], titles: tuple[str, ...]) -> None:
    assert {name: metric.labels for name, metric in table.items()} == described(*titles)


@pytest.mark.parametrize("table", [MANAGER, TIER], ids=["manager", "tiers"])
def test_no_two_names_are_one_metric_to_prometheus(table: dict[str, Metric]) -> None:
    names = [name.removesuffix(TOTAL) for name in table]
    assert len(set(names)) == len(names)
    endings = ("_bucket", "_count", "_sum", "_created", "_info")
    assert [name for name in names if name.endswith(endings) or name == "dropped_series"] == []


def test_every_metric_says_what_it_is() -> None:
    for name, metric in {**MANAGER, **TIER}.items():
        assert metric.help.endswith("."), name
        assert "tier" not in metric.labels
