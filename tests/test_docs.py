"""The documentation: its links lead somewhere, and it names what there is to name."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiered_kv.stack import open_stack
from tiered_kv.testing.faults import FailingTier
from tiered_kv.testing.four_methods import FourMethodTier
from tiered_kv.tiering.factory import SecondaryTierFactory
from tiered_kv.toolkit.jobs import failure_reason
from tiered_kv.workload.generator import ChatWorkload
from tiered_kv.workload.replay import replay

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
KIB = 1 << 10


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken = [link for link in links_of(page) if not leads_somewhere(page, link)]
    assert broken == []


def links_of(page: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", link)]


def leads_somewhere(page: Path, link: str) -> bool:
    name, _, heading = link.partition("#")
    target = page.parent / name if name else page
    return target.exists() and (not heading or heading in headings_of(target))


def headings_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, made as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.fixture
def failing() -> Iterator[str]:
    class AlwaysFailing(FailingTier):
        def __init__(self, spec: object, view: memoryview, tier_type: str) -> None:
            super().__init__(FourMethodTier(spec, view, tier_type))
            self.failing = True

    SecondaryTierFactory.register("failing", AlwaysFailing)
    yield "failing"
    SecondaryTierFactory.unregister("failing")


def test_every_counter_of_a_busy_replay_is_described(tmp_path: Path, failing: str) -> None:
    config: dict[str, object] = {
        "namespace": {"model": "m"},
        "block": {"bytes": 4 * KIB},
        "primary": {"capacity": 400 * KIB},
        "secondary": [
            {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": 1024 * KIB, "store_budget": 64 * KIB},
            {"type": "memory", "capacity": 512 * KIB, "admit_after": 2},
            {"type": failing},
        ],
    }
    chats = ChatWorkload(chats=20, turns=4, active_chats=10, turn_blocks=3)
    with open_stack(config) as stack:
        report = replay(stack.manager, stack.kv_view, chats.requests())
    names = {name for tier in report.tiers.values() for name in tier.counters}
    assert set(report.tiers) == {"cpu", "nvme", "memory", failing}
    assert {"reclaimed_segments", "skipped_admission", "failed_stores", "breaker_opened"} <= names
    page = (ROOT / "docs/reference/counters.md").read_text()
    assert {name for name in names if not is_described(name, page)} == {"failed_stores_injected"}  # this test's own


@pytest.mark.parametrize("error", [OSError(28, "full"), OSError(5, "bad"), TimeoutError(), ValueError()])
def test_every_reason_of_the_toolkit_is_described(error: Exception) -> None:
    assert f"`{failure_reason(error)}`" in (ROOT / "docs/reference/counters.md").read_text()


BUILT_IN: dict[str, dict[str, object]] = {
    "fs": {"path": "", "capacity": "64MiB"},
    "memory": {"capacity": "64MiB"},
    "nvme": {"path": "", "capacity": "64MiB"},
    "redis": {"url": "redis://127.0.0.1:1"},
    "s3": {
        "bucket": "bucket",
        "endpoint_url": "http://127.0.0.1:1",
        "region": "us-east-1",
        "access_key_id": "id",
        "secret_access_key": "secret",
        "capacity": "64MiB",
    },
}
"""Entries of all built-in tiers, with every setting that brings a counter; nobody listens where they lead to."""


def test_every_built_in_tier_is_looked_at() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["tiered_kv"].keys() == BUILT_IN.keys()


@pytest.mark.parametrize("tier_type", BUILT_IN)
def test_a_tier_has_the_counters_that_the_page_gives_it_and_no_others(tier_type: str, tmp_path: Path) -> None:
    if tier_type == "s3":
        pytest.importorskip("boto3", reason="boto3 is not installed")
    entry = {"type": tier_type, **BUILT_IN[tier_type]}
    if "path" in entry:
        entry["path"] = str(tmp_path / "kv")
    tier = SecondaryTierFactory.create(None, memoryview(bytearray(16 * KIB)).cast("B", (4, 4 * KIB)), entry)
    try:
        counters = set(tier.stats())
    finally:
        tier.shutdown()
    assert counters == counters_of("tiers made with the toolkit") | counters_of(tier_type)


def counters_of(section: str) -> set[str]:
    """Return the counters that the page describes in a section, families (`failed_…`) left out."""
    page = (ROOT / "docs/reference/counters.md").read_text()
    (text,) = re.findall(rf"^## Of {section}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    table = text.partition("| counter |")[2].partition("\n\n")[0]
    cells = " ".join(row.split("|")[1] for row in table.splitlines() if row.startswith("|"))
    return {name for name in re.findall(r"`(\w+…?)`", cells) if not name.endswith("…")}


def test_the_primary_tier_and_the_manager_have_the_counters_that_the_page_gives_them() -> None:
    with open_stack({"namespace": {"model": "m"}, "block": {"bytes": KIB}, "primary": {"capacity": 4 * KIB}}) as stack:
        assert set(stack.counters()["cpu"]) == counters_of("the primary tier")
    # Those of a tier come as they happen, so their names are looked for where they are counted.
    source = "".join(path.read_text() for path in (ROOT / "tiered_kv/tiering").glob("*.py"))
    counted = set(re.findall(r"counters(?:\[PRIMARY_NAME\])?\[\"(\w+)\"\]", source))
    described = counters_of("every secondary tier")
    of_audit = counters_of("the audit")
    verdicts = {f"audit_{verdict}_blocks" for verdict in ("identical", "close", "different")}
    assert counted <= described | of_audit
    assert counted & of_audit == of_audit - verdicts, "the verdicts are one counter in the code"
    built = {"stored_blocks", "stored_bytes", "loaded_blocks", "loaded_bytes", "store_jobs", "load_jobs"}
    built |= {"skipped_budget", "skipped_admission", "skipped_breaker", "skipped_disabled"}
    built |= {"failed_stores", "failed_loads", "jobs_in_flight", "breaker_opened"}
    assert described == (counted - of_audit) | built, "no described counter is missing"


def is_described(name: str, page: str) -> bool:
    for family in ("failed_stores_", "failed_loads_"):
        if name.startswith(family):
            return f"`{family}…`" in page and f"`{name.removeprefix(family)}`" in page
    return f"`{name}`" in page
