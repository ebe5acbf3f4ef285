"""A cluster's memory of six masters whose servers fail, come, go and move, under two clients that load and store."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("redis", reason="redis-py is not installed")

from tests.support.cluster_memory import ClusterSettings, prove, table, table_of_rates

BRIEF = ClusterSettings(
    block_bytes=4 << 10,
    blocks=480,  # more than the client's memory
    rounds_per_s=4.0,
    steady_s=1.0,
    # A busy machine is no dead server.
    load_s=20.0,
    tier={"lookup_timeout": "20s", "timeout": "20s", "connect_timeout": "3s"},
    killed_s=4.0,
    paused_s=8.0,
    grace_s=4,
    moved_slots=70,
    rate_block_bytes=(16 << 10,),
    rate_bytes=1 << 20,
    rate_rounds=1,
)


@pytest.mark.slow
def test_what_happens_to_a_master_costs_its_own_blocks_and_no_wrong_byte(tmp_path: Path) -> None:
    measured, events = prove(BRIEF, tmp_path)  # which ends only once all blocks are found again after each event
    assert [(each.clients, each.wrong) for each in measured] == [(1, 0), (2, 0)]
    assert all(each.store and each.load for each in measured)
    assert len(table_of_rates(measured)) == len(measured) + 2
    assert len(events) == len(table(events)) - 2 == 5
    for event in events:
        assert event.wrong == 0
        assert event.before.other_loaded + event.before.hit_loaded > 0
    killed, paused, _, lost, _ = events
    for event in (killed, paused, lost):
        assert event.during.other_loaded > event.during.other_wanted / 2, "the other masters' blocks"
        assert event.during.hit_loaded < event.during.hit_wanted, "nothing happened to the master"
