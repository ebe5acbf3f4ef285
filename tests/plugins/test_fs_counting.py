"""A count of a shared directory while its ledger, or its lock, is lost: what is written afterwards is never too low."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.testing.disk_use import occupied_bytes
from tiered_kv.testing.rig import TierRig, make_keys
from tiered_kv.testing.waiting import wait_for_each
from tiered_kv.tiering.base import TierSpec
from tiered_kv_fs import administration
from tiered_kv_fs import sweeper as sweeper_module
from tiered_kv_fs.counters import Counters
from tiered_kv_fs.layout import LEDGER_NAME, SWEEP_NAME, temporary_name
from tiered_kv_fs.ledger import LedgerState
from tiered_kv_fs.posix import take_away
from tiered_kv_fs.settings import FsSettings
from tiered_kv_fs.survey import Survey, survey
from tiered_kv_fs.sweeper import Sweep, Sweeper
from tiered_kv_fs.tier import FsTier
from tiered_kv_fs.volume import Identity, Volume

DIGEST = bytes(range(16))
BLOCK_BYTES = 65_536
CAPACITY_BYTES = 32 << 20
QUOTA_BYTES = 16 << 20
GRANT_BYTES = 4 << 20
UNKNOWN_BYTES = 8 << 20


class Bench:
    """A directory with a ledger that has been counted, one owner with a grant, and blocks that it has stored of it."""

    def __init__(self, path: Path, quota_bytes: int | None) -> None:
        self.path = path
        self.volume = Volume(str(path), Identity(DIGEST, {"model": "m"}, BLOCK_BYTES))
        self.sweeper = self.sweeper_with(quota_bytes)
        assert self.sweeper.make_room(0) is Sweep.DONE
        self.grant(GRANT_BYTES)
        self.shard = path / DIGEST.hex() / self.volume.found_epoch / "00"
        self.shard.mkdir(parents=True)
        for number in range(GRANT_BYTES // BLOCK_BYTES // 2):
            (self.shard / f"{number:032x}").write_bytes(bytes(BLOCK_BYTES))

    def sweeper_with(self, quota_bytes: int | None) -> Sweeper:
        return Sweeper(self.volume, CAPACITY_BYTES, quota_bytes, UNKNOWN_BYTES, Counters())

    def grant(self, size_bytes: int) -> None:
        """Give the owner a grant, as its keeper does."""
        with self.volume.ledger.locked() as state:
            state.grants[self.volume.owner.name] = state.grants.get(self.volume.owner.name, 0) + size_bytes
            if state.total_bytes is not None:
                state.add(size_bytes, self.volume.namespace)

    def state(self) -> LedgerState:
        with self.volume.ledger.locked() as state:
            return state

    def lying_bytes(self) -> int:
        return occupied_bytes(self.path)


@pytest.fixture(params=[None, QUOTA_BYTES], ids=["capacity", "quota"])
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(tmp_path / "kv", request.param)
    yield bench
    bench.volume.close(gives_up=True)


def test_what_an_owner_writes_that_joins_amid_a_count_is_left_to_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = bench.shard / f".{'a' * 32}.{'b' * 16}.1.tmp"
    ended.write_bytes(bytes(BLOCK_BYTES))
    joined: dict[Path, Volume] = {}

    def look_after_it_joins(root: str, live_epochs: set[tuple[str, str]], *, own_namespace: str = "") -> Survey:
        volume = Volume(str(bench.path), Identity(DIGEST, {"model": "m"}, BLOCK_BYTES))
        written = bench.shard / temporary_name("c" * 32, volume.owner.name)
        written.write_bytes(bytes(BLOCK_BYTES))
        joined[written] = volume
        return survey(root, live_epochs, own_namespace=own_namespace)

    monkeypatch.setattr(sweeper_module, "survey", look_after_it_joins)
    bench.sweeper.make_room(0, must_count=True)
    assert joined
    for written, volume in joined.items():
        assert written.exists()
        volume.close(gives_up=True)
    assert not ended.exists()


def meanwhile(monkeypatch: pytest.MonkeyPatch, *happenings: Callable[[], object]) -> None:
    """Have something happen after each of the next looks into the directory, and before what they found is written."""
    waiting = list(happenings)

    def looked(root: str, live_epochs: set[tuple[str, str]], *, own_namespace: str = "") -> Survey:
        found = survey(root, live_epochs, own_namespace=own_namespace)
        if waiting:
            waiting.pop(0)()
        return found

    monkeypatch.setattr(sweeper_module, "survey", looked)


@pytest.mark.parametrize("loss", ["deleted", "cut off", "damaged"])
def test_a_ledger_that_is_lost_while_it_is_counted_knows_no_total_until_the_next_count(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    ledger = bench.path / LEDGER_NAME

    def lose() -> None:
        bench.grant(GRANT_BYTES)  # of which no count can know any more
        if loss == "deleted":
            ledger.unlink()
        else:
            text = bytearray(ledger.read_bytes() if loss == "damaged" else b"")
            text[100:110] = b"x" * 10
            ledger.write_bytes(text)

    meanwhile(monkeypatch, lose)
    bench.sweeper.make_room(0, must_count=True)
    state = bench.state()
    assert state.total_bytes is None
    assert state.share_bytes(bench.volume.namespace) is None
    bench.sweeper.make_room(0)
    state = bench.state()
    assert state.total_bytes is not None
    assert state.total_bytes >= bench.lying_bytes() + UNKNOWN_BYTES


def test_grants_that_are_given_while_the_directory_is_counted_are_counted_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile(monkeypatch, lambda: bench.grant(GRANT_BYTES))
    bench.sweeper.make_room(0, must_count=True)
    total_bytes = bench.state().total_bytes
    assert total_bytes is not None
    assert 0 <= total_bytes - bench.lying_bytes() - 2 * GRANT_BYTES < 1 << 20


def test_what_another_s_count_has_missed_already_is_not_taken_off_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.sweeper.make_room(0, must_count=True)
    other = bench.sweeper_with(None)
    removed: list[str] = []

    def taken_away(path: str, aside: str, dir_fd: int | None = None) -> os.stat_result | None:
        taken = take_away(path, aside, dir_fd)
        removed.append(path)
        if len(removed) == 8:  # somebody cleans up, and the other takes the lock of a new file
            (bench.path / SWEEP_NAME).unlink()
            assert other.make_room(0, must_count=True) is Sweep.DONE
        return taken

    monkeypatch.setattr(sweeper_module, "take_away", taken_away)
    state = bench.state()
    assert state.total_bytes is not None
    bench.sweeper.make_room(CAPACITY_BYTES - state.total_bytes + 8 * BLOCK_BYTES)
    assert len(removed) >= 8
    total_bytes = bench.state().total_bytes
    assert total_bytes is not None
    assert total_bytes >= bench.lying_bytes() + GRANT_BYTES


def test_a_block_that_is_replaced_by_a_smaller_one_as_it_is_evicted_is_taken_off_as_what_it_is(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.sweeper.make_room(0, must_count=True)
    state = bench.state()
    assert state.total_bytes is not None
    small_bytes = 4096

    def replaced_first(path: str, aside: str, dir_fd: int | None = None) -> os.stat_result | None:
        """Have another process replace the file, and tell the ledger of what it took away and of what it put there."""
        (bench.shard / path).write_bytes(bytes(small_bytes))
        with bench.volume.ledger.locked() as state:
            state.take_off(BLOCK_BYTES - small_bytes, bench.volume.namespace)
        return take_away(path, aside, dir_fd)

    monkeypatch.setattr(sweeper_module, "take_away", replaced_first)
    wanted_bytes = CAPACITY_BYTES - state.total_bytes + 8 * BLOCK_BYTES
    bench.sweeper.make_room(wanted_bytes)
    total_bytes = bench.state().total_bytes
    assert total_bytes is not None
    assert total_bytes < state.total_bytes
    assert total_bytes >= bench.lying_bytes() + GRANT_BYTES


def write_as_before(bench: Bench, granted_bytes: int) -> None:
    """Write the ledger as a release does that knows of no count: without the word."""
    bench.grant(granted_bytes)
    with bench.volume.ledger.locked() as state:
        state.count = ""


@pytest.mark.parametrize("is_known", [True, False], ids=["total known", "total unknown"])
def test_a_count_counts_though_a_release_that_knows_of_none_writes_the_ledger_meanwhile(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    granted_bytes = GRANT_BYTES if is_known else 0  # nothing is granted of a total that is not known
    if not is_known:
        with bench.volume.ledger.locked() as state:
            state.total_bytes = None
            state.shares[bench.volume.namespace].total_bytes = None
    meanwhile(monkeypatch, *[lambda: write_as_before(bench, granted_bytes)] * 3)
    for times in range(1, 4):
        bench.sweeper.make_room(0, must_count=True)
        state = bench.state()
        totals = [state.total_bytes, state.share_bytes(bench.volume.namespace)]
        lying = [bench.lying_bytes(), occupied_bytes(bench.path / bench.volume.namespace)]
        for total_bytes, lying_bytes in zip(totals, lying, strict=True):
            assert total_bytes is not None
            assert 0 <= total_bytes - lying_bytes - GRANT_BYTES - times * granted_bytes < 1 << 20


def test_what_is_evicted_is_taken_off_though_a_release_that_knows_of_no_count_writes_the_ledger_meanwhile(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.sweeper.make_room(0, must_count=True)
    state = bench.state()
    assert state.total_bytes is not None
    removed: list[str] = []

    def taken_away(path: str, aside: str, dir_fd: int | None = None) -> os.stat_result | None:
        write_as_before(bench, 0)
        removed.append(path)
        return take_away(path, aside, dir_fd)

    monkeypatch.setattr(sweeper_module, "take_away", taken_away)
    bench.sweeper.make_room(CAPACITY_BYTES - state.total_bytes + 8 * BLOCK_BYTES)
    assert bench.state().total_bytes == state.total_bytes - len(removed) * BLOCK_BYTES


def test_what_another_s_count_has_missed_already_is_not_taken_off_by_a_purge(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.sweeper.make_room(0, must_count=True)
    other = bench.sweeper_with(None)
    elsewhere = bench.path / ("f" * 32) / ("0" * 16) / "00"  # another namespace's, which is not purged
    elsewhere.mkdir(parents=True)
    for number in range(64):
        (elsewhere / f"{number:032x}").write_bytes(bytes(BLOCK_BYTES))
    removed = 0

    def unlinked(fd: int, name: str, *rest: Any) -> None:  # Any: as the real one
        nonlocal removed
        unlink(fd, name, *rest)
        removed += 1
        if removed == 16:
            (bench.path / SWEEP_NAME).unlink()
            assert other.make_room(0, must_count=True) is Sweep.DONE

    unlink = administration._unlink
    monkeypatch.setattr(administration, "_unlink", unlinked)
    settings = FsSettings(path=str(bench.path), capacity=CAPACITY_BYTES)
    purged = administration.FsAdministration(settings).purge(DIGEST.hex(), time.monotonic() + 60)
    assert purged.blocks == GRANT_BYTES // BLOCK_BYTES // 2
    total_bytes = bench.state().total_bytes
    assert total_bytes is not None
    assert total_bytes >= bench.lying_bytes() + GRANT_BYTES


def test_the_capacity_holds_though_the_ledger_is_lost_in_every_other_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv"
    capacity_bytes = 8 << 20
    settings = FsSettings(path=str(path), capacity=capacity_bytes, threads=4)
    rig = TierRig(
        lambda spec, view: FsTier(spec, view, "fs", settings),
        num_blocks=64,
        block_bytes=BLOCK_BYTES,
        wait_s=60,
        spec=TierSpec("fs", BLOCK_BYTES, DIGEST, {"model": "m"}),
    )

    def lose() -> None:
        (path / LEDGER_NAME).unlink()

    def store(number: int) -> bool:
        is_stored = rig.store(make_keys(8, f"batch-{number}")).success
        assert occupied_bytes(path) <= capacity_bytes
        return is_stored

    batches = 48  # three times the capacity
    try:
        rig.store(make_keys(8, "first"))
        meanwhile(monkeypatch, *(happening for _ in range(8) for happening in (lose, lambda: None)))
        wait_for_each((partial(store, number) for number in range(batches)), what="room again")
    finally:
        rig.close()
