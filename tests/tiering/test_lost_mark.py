"""A storage that loses the epoch's mark: processes that go on share blocks again with one that drew a new mark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.entries import s3_entry
from tests.support.stacks import block_hashes, forget_memory, manager_of, stack_of
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit import epoch

WAIT_S = 60.0
BLOCK_BYTES = 4096


def put(stack: Stack, label: str) -> None:
    assert stack.put(block_hashes(make_keys(1, label)), np.ones((1, BLOCK_BYTES), np.uint8), timeout=WAIT_S) == 1
    assert stack.flush(WAIT_S)


def finds(stack: Stack, label: str) -> bool:
    return stack.contains(block_hashes(make_keys(1, label)), timeout=WAIT_S) == 1


@pytest.fixture(params=["fs", "s3"])
def entry_and_loss(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[dict[str, object], Callable[[Any], None]]:
    """The entry of a tier, and what deletes the mark in its storage; it gets the open tier."""
    if request.param == "fs":
        directory = tmp_path / "kv"
        entry: dict[str, object] = {"type": "fs", "path": str(directory), "capacity": "8MiB"}
        return entry, lambda tier: next(directory.rglob("epoch")).unlink()
    server, bucket = request.getfixturevalue("moto_server"), request.getfixturevalue("moto_bucket")
    entry = s3_entry(server, bucket, presence_ttl=0)
    return entry, lambda tier: tier._control.delete([tier._naming.epoch])


def test_processes_share_blocks_again_after_the_mark_was_deleted(
    entry_and_loss: tuple[dict[str, object], Callable[[Any], None]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    entry, lose = entry_and_loss
    monkeypatch.setattr(epoch, "CHECK_PAUSE_S", 0.0)  # each use looks at the mark
    config = stack_of({**entry, "job_timeout": WAIT_S, "lookup_timeout": WAIT_S}, block_bytes=BLOCK_BYTES)
    with open_stack(config) as running:
        put(running, "before")
        lose(manager_of(running).secondary_tiers[0])
        with open_stack(config) as later:
            put(later, "of the later one")
            wait_until(lambda: finds(running, "of the later one"), WAIT_S, what="a block of the later process")
            put(running, "of the running one")
            assert finds(later, "of the running one")
            forget_memory(manager_of(running))
            assert not finds(running, "before")
        (tier,) = (counters["tier"] for name, counters in running.counters().items() if name == entry["type"])
        assert tier["epoch_repairs_total"] == 1
    assert f"tier '{entry['type']}': the storage had lost the epoch's mark" in caplog.text
