"""The documentation: its links lead somewhere, it names what there is to name, and each proof has its figure."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.faulty import FourMethodTier
from tests.support.figures import PROOFS, Figures, main
from tests.support.pages import COUNTERS, tables, tier_metrics, with_tables
from tests.support.stacks import BUILT_IN_TIERS, IN_DIRECTORIES, Register, manager_of, stack_of
from tiered_kv.metrics.counters import count_of, flat_counts
from tiered_kv.metrics.metric import Metric
from tiered_kv.metrics.vocabulary import ACCOUNT, MANAGER, PRIMARY, SECONDARY
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.testing.faults import FailingTier
from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit.jobs import failure_reason
from tiered_kv.workload.replay import replay
from tiered_kv.workload.request import ChatWorkload

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
KIB = 1 << 10
WORDS_MAX = 80_230
"""Of all pages together, code and tables included: what one adds, another gives up."""


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken = [link for link in links_of(page) if not leads_somewhere(page, link)]
    assert broken == []


def test_all_pages_together_can_be_read() -> None:
    assert sum(len(page.read_text().split()) for page in PAGES) <= WORDS_MAX


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
def failing(register: Register) -> str:
    class AlwaysFailing(FailingTier):
        def __init__(self, spec: object, view: memoryview, tier_type: str) -> None:
            super().__init__(FourMethodTier(spec, view, tier_type))
            self.failing = True

    register("failing", AlwaysFailing)
    return "failing"


def test_every_counter_of_a_busy_replay_is_described(tmp_path: Path, failing: str) -> None:
    config = stack_of(
        {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": 1024 * KIB, "store_budget": 64 * KIB},
        {"type": "memory", "capacity": 512 * KIB, "admit_after": 2},
        {"type": failing},
        blocks=100,
    )
    chats = ChatWorkload(chats=20, turns=4, active_chats=10, turn_blocks=3)
    with open_stack(config) as stack:
        report = replay(manager_of(stack), stack.region.kv_view, chats.requests())
    assert set(report.tiers) == {"cpu", "nvme", "memory", failing}
    assert "reclaimed_segments_total" in report.tiers["nvme"].counters["tier"]
    assert count_of(report.tiers["memory"].counters, "skipped_blocks_total", "admission")
    assert report.tiers[failing].counters["failed_blocks_total"].keys() == {"store"}
    assert report.tiers[failing].counters["breaker_opened_total"]
    for name, tier in report.tiers.items():
        check_described(name, tier.counters, reasons_of_its_own=frozenset({"injected"}))


@pytest.mark.parametrize("error", [OSError(28, "full"), OSError(5, "bad"), TimeoutError(), ValueError()])
def test_every_reason_of_the_toolkit_is_described(error: Exception) -> None:
    assert f"`{failure_reason(error)}`" in COUNTERS.read_text()


def test_every_built_in_tier_is_looked_at() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["tiered_kv"].keys() == BUILT_IN_TIERS.keys()


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """A stack of all built-in tiers, those left out whose library is not installed."""
    tiers = []
    for tier_type, entry in BUILT_IN_TIERS.items():
        place: dict[str, object] = {"path": str(tmp_path / tier_type)} if tier_type in IN_DIRECTORIES else {}
        if tier_type not in LIBRARIES or importlib.util.find_spec(LIBRARIES[tier_type]):
            tiers.append({**entry, **place, "type": tier_type, "write_budget": "1PiB/day"})
    with open_stack(stack_of(*tiers, blocks=8, audit=1)) as stack:
        yield stack


def test_every_counter_of_the_built_in_tiers_is_described_and_no_other(stack: Stack) -> None:
    keys = make_keys(24)
    blocks = np.zeros((len(keys), 4 * KIB), np.uint8)
    for _ in range(2):
        stack.put(keys, blocks, timeout=0.1)
        stack.get(keys, blocks, timeout=0.1)
    stack.flush(5.0)
    told = stack.counters()
    assert {path[:2] for path, value in flat_counts(told["s3"]) if value} >= {("failed_blocks_total", "store")}
    for name, counters in told.items():
        check_described(name, counters)
    # Those without labels are shown from the start.
    of_cpu = {"unexplained_blocks_total", *plain(PRIMARY), *(name for name in OF_CPU if name in ACCOUNT)}
    assert {name for name in numbers(told["cpu"]) if "audit" not in name} == of_cpu
    for name in stack.tier_names:
        assert numbers(told[name]) - AUDITED == plain(ACCOUNT) | plain(SECONDARY)
        assert numbers(told[name]["tier"]) == plain(of_tier(name))


def test_the_page_of_counters_has_the_lists_that_the_code_makes() -> None:
    page = COUNTERS.read_text()
    assert page == with_tables(page), "python -m tests.support.pages"
    assert set(re.findall(r"<!-- from the code: (\w+) -->", page)) == tables().keys()


TIER = {name: metric for name, (metric, _) in tier_metrics().items()}


@pytest.mark.parametrize("metrics", [MANAGER, TIER], ids=["manager", "tiers"])
def test_the_names_of_counters_have_no_labels_in_them(metrics: Mapping[str, Metric]) -> None:
    for name, metric in metrics.items():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", name), name
        if metric.labels and not metric.bounds:
            is_of_tenants = metric.labels == ("tenant",)  # who holds how much now
            assert name.endswith("_total") or is_of_tenants, f"{name} has labels, and is no count of events"
            stem = name.removesuffix("total")
            longer = [other for other in metrics if other.startswith(stem) and other != name]
            assert not longer, f"{longer} have a label of {name} in their names"


OF_CPU = ("stored_blocks_total", "stored_bytes_total", "loaded_blocks_total", "loaded_bytes_total")
AUDITED = {"audit_largest_difference_ratio", "audit_stopped"}
LIBRARIES = {"redis": "redis", "s3": "boto3", "gcs": "obstore", "azure": "obstore"}


def check_described(tier: str, counters: Mapping[str, Any], reasons_of_its_own: frozenset[str] = frozenset()) -> None:
    """Check that the vocabulary has each counter of a tier and its labels, and the page its reasons."""
    page = COUNTERS.read_text()
    for path, _ in flat_counts(counters):
        (name, *labels), described = (path[1:], of_tier(tier)) if path[0] == "tier" else (path, MANAGER)
        assert name in described, f"{name} of {tier} is not described"
        assert len(labels) == len(described[name].labels), f"{name} of {tier} has other labels than the page says"
        unknown = {label for label in labels if f"`{label}`" not in page} - reasons_of_its_own
        assert not unknown, f"{unknown} of {name} of {tier} are not described"


def of_tier(tier: str) -> dict[str, Metric]:
    """Return the metrics of a tier's own."""
    return {name: metric for name, (metric, types) in tier_metrics().items() if {tier, "all"} & {*types}}


def plain(metrics: Mapping[str, Metric]) -> set[str]:
    """Return the counters without labels."""
    return {name for name, metric in metrics.items() if not metric.labels and not metric.bounds}


def numbers(counters: Mapping[str, Any]) -> set[str]:
    return {name for name, value in counters.items() if not isinstance(value, Mapping)}


# The page of guarantees has the figures of every proof that there is.


PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "guarantees.md"
ROW = re.compile(r"^\| `([^`]+)` \| ([^|]+) \| +([\d,-]+) \| +([\d,-]+) \|", re.MULTILINE)


def test_the_page_has_a_figure_for_every_proof() -> None:
    rows = {name: (of, tried, passed) for name, of, tried, passed in ROW.findall(PAGE.read_text())}
    assert set(rows) == set(PROOFS)
    for name, (of, tried, passed) in rows.items():
        assert of == PROOFS[name].promise
        assert tried == passed != "-", f"{name} did not pass, or was not run"


def test_figures_add_up_and_can_be_written_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, other = Figures(), Figures()
    assert not figures
    figures.add("soak", 1, 1, "seed 1")
    figures.add("soak", 2, 1, "seed 2")
    other.add("simulation", 1000, 1000)
    other.add("simulation", 500, 500, "of another run")
    with pytest.raises(KeyError):
        figures.add("nonesuch", 1, 1)
    paths = [tmp_path / "table.json", tmp_path / "other.json"]
    figures.write(paths[0])
    other.write(paths[1])
    assert main([str(paths[1])]) == 0
    assert "| `soak` | limits | - | - | seconds; not run |" in capsys.readouterr().out
    assert main(list(map(str, paths))) == 1, "a soak is broken"
    printed = capsys.readouterr().out
    assert "| `soak` | limits | 3 | 2 | seconds; seed 1; seed 2 |" in printed
    assert "| `simulation` | wrong bytes | 1,500 | 1,500 | seeds; of another run |" in printed


# The Python API that the site shows.


@pytest.mark.parametrize("package", ["tiered_kv", "tiered_kv.toolkit"])
def test_every_public_name_has_a_docstring_for_the_site(package: str) -> None:
    """In the source, as mkdocstrings reads it: what has none is left out of the page."""
    module = importlib.import_module(package)
    missing = []
    for home, names in module._MODULES.items():
        source = ast.parse(Path(str(importlib.import_module(home).__file__)).read_text())
        missing += sorted(set(names.split()) - documented_names(source))
    assert missing == []
    assert f"::: {package}\n" in "".join(page.read_text() for page in PAGES)


def documented_names(module: ast.Module) -> set[str]:
    """Return the names of classes and functions with docstrings, and of assignments with a text behind them."""
    names = set()
    for statement, after in itertools.pairwise([*module.body, ast.Pass()]):
        match statement, after:
            case ((ast.ClassDef() | ast.FunctionDef() as definition), _) if ast.get_docstring(definition):
                names.add(definition.name)
            case ast.Assign(targets=[ast.Name(name)]), ast.Expr(ast.Constant(str())):
                names.add(name)
    return names
