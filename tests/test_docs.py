"""The documentation: its links lead somewhere, and it names what there is to name."""

from __future__ import annotations

import re
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
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
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
    page = (ROOT / "docs/counters.md").read_text()
    assert {name for name in names if not is_described(name, page)} == {"failed_stores_injected"}  # this test's own


@pytest.mark.parametrize("error", [OSError(28, "full"), OSError(5, "bad"), TimeoutError(), ValueError()])
def test_every_reason_of_the_toolkit_is_described(error: Exception) -> None:
    assert f"`{failure_reason(error)}`" in (ROOT / "docs/counters.md").read_text()


def is_described(name: str, page: str) -> bool:
    for family in ("failed_stores_", "failed_loads_"):
        if name.startswith(family):
            return f"`{family}…`" in page and f"`{name.removeprefix(family)}`" in page
    return f"`{name}`" in page
