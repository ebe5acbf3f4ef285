"""The names that programs and dashboards read do not change by accident: golden/names.json has them all.

After a change on purpose: python -m tests.stack.exporters.test_frozen_names
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.support.stacks import BUILT_IN_TIERS, IN_DIRECTORIES, stack_of
from tiered_kv.metrics.histogram import is_histogram
from tiered_kv.stack.exporters.metrics import StackCollector, exposition
from tiered_kv.stack.open import open_stack

GOLDEN = Path(__file__).parent / "golden" / "names.json"


def shape(value: Any) -> object:  # Any: a number, a histogram, or a dictionary of them by label
    """Return the labels of a counter, without its numbers."""
    if is_histogram(value):
        return "histogram"
    return {label: shape(inner) for label, inner in sorted(value.items())} if isinstance(value, dict) else "number"


def labels_of(sample: Sample) -> str:
    """Return a sample's labels, without its tier and a histogram's buckets."""
    shown = {name: value for name, value in sample.labels.items() if name not in ("tier", "le")}
    return ",".join(f"{name}={value}" for name, value in sorted(shown.items()))


def names(directory: Path) -> dict[str, object]:
    """Return what a stack over the tiers that need no server counts and exposes as soon as it is open."""
    tiers = [
        {"type": name, **BUILT_IN_TIERS[name], **({"path": str(directory / name)} if name in IN_DIRECTORIES else {})}
        for name in ("memory", "nvme", "fs")
    ]
    tiers[0] |= {"write_budget": "1PiB/day"}
    with open_stack(stack_of(*tiers, audit=1.0)) as stack:
        text = exposition(StackCollector(stack.counters)).decode()
        return {
            "counters": {tier: shape(counted) for tier, counted in sorted(stack.counters().items())},
            "metrics": {
                f"{family.name} {family.type}": " ".join(sorted({labels_of(sample) for sample in family.samples}))
                for family in text_string_to_metric_families(text)
            },
        }


def test_the_names_are_those_of_the_golden_file(tmp_path: Path) -> None:
    assert names(tmp_path) == json.loads(GOLDEN.read_text())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        GOLDEN.write_text(json.dumps(names(Path(scratch)), indent=1) + "\n")
