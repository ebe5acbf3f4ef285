"""One vocabulary: the table of metrics and the page of counters name the same things, with the same labels."""

from __future__ import annotations

import pytest

from tests.support.pages import counters_of
from tiered_kv.metrics.vocabulary import MANAGER, TIER, TOTAL, Metric

OF_MANAGER = ("Of the primary tier", "Of every secondary tier", "Of the history", "Of the audit", "Histograms")
OF_TIERS = (
    "Of tiers made with the toolkit",
    *(f"Of {name}" for name in ("nvme", "memory", "fs", "redis", "s3")),
)


def described(*titles: str) -> dict[str, tuple[str, ...]]:
    """Return the labels of each counter in the tables of these sections."""
    return {name: labels for title in titles for name, (labels, _) in counters_of(title).items()}


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
