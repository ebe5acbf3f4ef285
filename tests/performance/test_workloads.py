"""The workloads that hit rates are measured on have the keys of a prefix cache."""

from __future__ import annotations

import pytest

from tests.performance.policy_hits import WORKLOADS


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_block_follows_one_other(workload: str) -> None:
    make, _ = WORKLOADS[workload]
    predecessors: dict[int, int | None] = {}
    for ids in make():
        before: int | None = None
        for block_id in ids:
            assert predecessors.setdefault(block_id, before) == before
            before = block_id
