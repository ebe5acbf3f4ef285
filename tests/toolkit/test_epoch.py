"""The epoch: a reset holds, whatever happens to the mark in the storage."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tiered_kv.errors import FormatError, TierUnavailableError
from tiered_kv.toolkit.epoch import CHECK_PAUSE_S, CHECK_WAIT_S, MARK_BYTES_MAX, Epoch, EpochMark, _retired

NEVER = math.inf


class Storage:
    """A mark in memory, with its history, and faults."""

    def __init__(self) -> None:
        self.data: bytes | None = None
        self.history: list[bytes] = []
        self.is_down = self.loses_answers = False
        self.before: Callable[[str], object] = lambda operation: None
        self.reads = 0

    def read(self, deadline: float) -> bytes | None:
        self._begin("read")
        self.reads += 1
        return self.data

    def create(self, data: bytes, deadline: float) -> None:
        self._begin("create")
        if self.data is None:
            self.write(data, deadline)

    def write(self, data: bytes, deadline: float) -> None:
        self._begin("write")
        self.data = data
        self.history.append(data)
        if self.loses_answers:
            raise TierUnavailableError("no answer")

    def _begin(self, operation: str) -> None:
        if self.is_down:
            raise TierUnavailableError("down")
        self.before(operation)


@pytest.fixture
def storage() -> Storage:
    return Storage()


def stored_value(storage: Storage) -> str:
    assert storage.data is not None
    mark = EpochMark.decode(storage.data)
    assert mark is not None
    return mark.value


def check(epoch: Epoch) -> None:
    """Have the epoch check the mark now."""
    epoch.recheck()
    epoch.value(NEVER)


def test_a_mark_is_one_short_line(storage: Storage) -> None:
    data = EpochMark(10**15 - 1, "0123456789abcdef").encode()
    assert data.count(b"\n") == 1
    assert len(data) <= MARK_BYTES_MAX
    assert EpochMark.decode(data) == EpochMark(10**15 - 1, "0123456789abcdef")


def test_two_that_open_an_empty_storage_at_once_share_an_epoch(storage: Storage) -> None:
    second = Epoch(storage)
    values: list[str] = []

    def let_the_second_be_faster(operation: str) -> None:
        if operation == "create" and not values:
            values.append("")
            values.append(second.saved_value(NEVER))

    storage.before = let_the_second_be_faster
    assert Epoch(storage).saved_value(NEVER) == values[-1]


def test_a_reset_needs_no_storage(storage: Storage) -> None:
    epoch = Epoch(storage)
    before = epoch.saved_value(NEVER)
    storage.is_down = True
    epoch.renew()
    assert epoch.value(NEVER) != before
    with pytest.raises(TierUnavailableError):
        epoch.saved_value(NEVER)
    storage.is_down = False
    assert epoch.saved_value(NEVER) == stored_value(storage) != before


def test_a_reset_before_the_first_use_retires_what_the_storage_has(storage: Storage) -> None:
    storage.data = EpochMark(3, "0" * 16).encode()
    epoch = Epoch(storage)
    epoch.renew()
    assert epoch.saved_value(NEVER) == stored_value(storage)
    storage.data = EpochMark(3, "0" * 16).encode()
    assert Epoch(storage).saved_value(NEVER) != "0" * 16


def test_a_reset_whose_write_was_done_and_not_answered_stays_done(storage: Storage) -> None:
    storage.data = EpochMark(7, "0" * 16).encode()
    running, resetting = Epoch(storage), Epoch(storage)
    running.saved_value(NEVER)
    resetting.renew()
    storage.loses_answers = True
    with pytest.raises(TierUnavailableError):
        resetting.saved_value(NEVER)
    storage.loses_answers = False
    value = resetting.saved_value(NEVER)
    _retired.clear()  # the other process has not seen it
    check(running)
    assert stored_value(storage) == value


def test_a_process_that_was_idle_does_not_undo_a_reset_that_came_after_a_fall_back(storage: Storage) -> None:
    idle = Epoch(storage)
    first = idle.saved_value(NEVER)
    for _ in range(2):
        idle.renew()
        second = idle.saved_value(NEVER)
    storage.data = storage.history[0]
    _retired.clear()  # another process
    resetting = Epoch(storage)
    assert resetting.saved_value(NEVER) == first
    resetting.renew()
    third = resetting.saved_value(NEVER)
    _retired.clear()
    check(idle)
    assert idle.value(NEVER) == second
    _retired.clear()  # a later process
    assert Epoch(storage).saved_value(NEVER) not in (first, second)
    after = stored_value(storage)
    for epoch in (resetting, idle, resetting, idle):
        check(epoch)
    assert stored_value(storage) == after
    assert resetting.value(NEVER) == third


@pytest.mark.parametrize("found", [None, b"damaged", "its own"])
def test_a_process_whose_epoch_is_over_does_not_bring_it_back(storage: Storage, found: Any) -> None:
    running, resetting = Epoch(storage), Epoch(storage)
    old = running.saved_value(NEVER)
    resetting.renew()
    resetting.saved_value(NEVER)
    check(running)  # it sees the other's reset
    storage.data = storage.history[0] if found == "its own" else found
    check(running)
    _retired.clear()  # a later process
    assert Epoch(storage).saved_value(NEVER) != old


def test_a_damaged_mark_that_an_opening_finds_is_counted_and_logged(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    first = Epoch(storage, tier="far")
    first.saved_value(NEVER)
    assert (first.repairs, caplog.text) == (0, "")
    storage.data = b"damaged"
    second = Epoch(storage, tier="far")
    second.saved_value(NEVER)
    assert second.repairs == 1
    assert "tier 'far': the epoch's mark is damaged" in caplog.text


def test_a_mark_that_is_lost_again_and_again_does_not_fill_the_log(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    epoch = Epoch(storage, tier="far")
    epoch.saved_value(NEVER)
    for _ in range(30):
        storage.data = None
        check(epoch)
    assert epoch.repairs == 30
    assert len([each for each in caplog.messages if "lost the epoch's mark" in each]) == 6


def test_checks_are_made_now_and_then_or_when_there_is_a_doubt(storage: Storage) -> None:
    now_s = 0.0
    epoch = Epoch(storage, clock=lambda: now_s)
    value = epoch.saved_value(NEVER)
    reads = storage.reads
    for _ in range(100):
        assert epoch.value(NEVER) == epoch.saved_value(NEVER) == value
    assert storage.reads == reads
    epoch.recheck()
    epoch.value(NEVER)
    assert storage.reads == reads + 1
    now_s = CHECK_PAUSE_S
    epoch.saved_value(NEVER)
    epoch.saved_value(NEVER)
    assert storage.reads == reads + 2


def test_stores_check_the_mark_more_often_where_it_may_be_evicted(storage: Storage) -> None:
    now_s = 0.0
    epoch = Epoch(storage, store_pause_s=CHECK_PAUSE_S / 10, clock=lambda: now_s)
    value = epoch.saved_value(NEVER)
    now_s, storage.data = CHECK_PAUSE_S / 5, None
    assert epoch.value(NEVER) == value
    assert storage.data is None  # a load waits for no other answer
    assert epoch.saved_value(NEVER) == value == stored_value(storage)


def test_a_mark_that_does_not_answer_costs_few_jobs_its_time(storage: Storage) -> None:
    now_s = 0.0

    def hang(operation: str) -> None:
        nonlocal now_s
        now_s += CHECK_WAIT_S
        raise TimeoutError

    epoch = Epoch(storage, clock=lambda: now_s)
    value = epoch.saved_value(NEVER)
    storage.before = hang
    epoch.recheck()
    for _ in range(100):
        assert epoch.value(NEVER) == value
    assert now_s == CHECK_WAIT_S
    now_s = CHECK_PAUSE_S
    epoch.value(NEVER)
    assert now_s == CHECK_PAUSE_S + CHECK_WAIT_S


def test_a_mark_that_does_not_answer_costs_few_stores_their_time_where_they_check_more_often(storage: Storage) -> None:
    now_s = 0.0

    def hang(operation: str) -> None:
        nonlocal now_s
        now_s += CHECK_WAIT_S
        raise TimeoutError

    epoch = Epoch(storage, store_pause_s=CHECK_WAIT_S, clock=lambda: now_s)
    value = epoch.saved_value(NEVER)
    storage.before = hang
    now_s = CHECK_WAIT_S
    for _ in range(100):
        assert epoch.saved_value(NEVER) == value
    assert now_s == 2 * CHECK_WAIT_S


def test_a_check_that_fails_at_once_fails_no_job_and_is_repeated_by_the_next(storage: Storage) -> None:
    epoch = Epoch(storage, clock=lambda: 0.0)
    value = epoch.saved_value(NEVER)
    storage.data = None
    storage.is_down = True
    epoch.recheck()
    assert epoch.saved_value(NEVER) == value
    storage.is_down = False
    assert epoch.saved_value(NEVER) == value
    assert stored_value(storage) == value


def test_the_mark_of_another_version_is_refused_and_left(storage: Storage) -> None:
    storage.data = b"tiered-kv epoch 2 whatever it says\n"
    with pytest.raises(FormatError, match="format version 2"):
        Epoch(storage).saved_value(NEVER)
    assert storage.data == b"tiered-kv epoch 2 whatever it says\n"


def test_a_reset_during_a_write_is_written_by_the_next_use(storage: Storage) -> None:
    epoch = Epoch(storage)
    storage.before = lambda operation: operation == "create" and epoch.renew()
    overtaken = epoch.saved_value(NEVER)
    assert not epoch.is_saved
    assert epoch.saved_value(NEVER) == stored_value(storage) != overtaken
    assert epoch.is_saved


def test_no_thread_waits_longer_than_its_deadline_for_another(storage: Storage) -> None:
    reading, may_answer = threading.Event(), threading.Event()

    def wait(operation: str) -> None:
        reading.set()
        assert may_answer.wait(60)

    storage.before = wait
    epoch = Epoch(storage)
    thread = threading.Thread(target=epoch.saved_value, args=(NEVER,))
    thread.start()
    try:
        assert reading.wait(60)
        with pytest.raises(TimeoutError):
            epoch.saved_value(0.0)
        epoch.renew()  # nor does a reset wait
        assert epoch.value(0.0)
    finally:
        may_answer.set()
        thread.join()


def test_processes_share_blocks_again_after_one_drew_an_epoch_because_the_mark_was_lost(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    idle, another = Epoch(storage, tier="kv"), Epoch(storage)
    old = idle.saved_value(NEVER)
    assert another.saved_value(NEVER) == old
    storage.data = None
    new = Epoch(storage).saved_value(NEVER)
    assert new != old
    for epoch in (idle, another):
        epoch.recheck()
        assert epoch.saved_value(NEVER) == new, "the first use after it was idle"
        assert epoch.value(NEVER) == new
        assert epoch.repairs == 1
    assert "tier 'kv': the storage had lost the epoch's mark" in caplog.text


@pytest.mark.parametrize("lost", [None, b"damaged"])
def test_after_a_reset_and_a_loss_processes_share_the_epoch_of_the_reset_and_older_ones_stay_out(
    storage: Storage, lost: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, running = Epoch(storage), Epoch(storage)
    old = older.saved_value(NEVER)
    running.saved_value(NEVER)
    value = running.renew()
    running.saved_value(NEVER)
    storage.data = lost
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 60.0)
    _retired.pop(old, None)  # only the process that was reset has seen it: the others are other processes
    later = Epoch(storage)
    assert later.saved_value(NEVER) != value
    for epoch in (older, running, later, older):
        check(epoch)
    assert running.saved_value(NEVER) == later.saved_value(NEVER) == stored_value(storage) == value
    assert older.saved_value(NEVER) != value, "it may store what the reset was to remove"
    assert running.repairs == 1
    assert later.repairs == (1 if lost is None else 2)  # it drew a new one, too


def test_a_process_does_not_join_the_epoch_of_a_reset_after_the_mark_was_lost(storage: Storage) -> None:
    running = Epoch(storage)
    old = running.saved_value(NEVER)
    storage.data = None
    resetting = Epoch(storage)
    resetting.saved_value(NEVER)
    resetting.renew()
    resetting.saved_value(NEVER)
    check(running)
    assert running.value(NEVER) == old


def test_a_process_whose_epoch_is_over_does_not_join_one_that_was_drawn_later(storage: Storage) -> None:
    running, resetting = Epoch(storage), Epoch(storage)
    old = running.saved_value(NEVER)
    resetting.saved_value(NEVER)
    resetting.renew()
    resetting.saved_value(NEVER)
    check(running)  # it sees the other's reset
    storage.data = None
    new = Epoch(storage).saved_value(NEVER)
    check(running)
    assert running.value(NEVER) == old
    assert stored_value(storage) == new, "nor does it take it from those that share it"


def test_an_older_state_of_the_storage_is_no_new_epoch(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Epoch(storage)
    old = first.saved_value(NEVER)
    storage.data = None
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 3600.0)
    running = Epoch(storage)
    value = running.saved_value(NEVER)
    storage.data = storage.history[0]
    check(running)
    assert running.value(NEVER) == value != old


def test_a_storage_that_is_not_shared_keeps_its_process_in_its_epoch(storage: Storage) -> None:
    running = Epoch(storage, is_shared=False)
    value = running.saved_value(NEVER)
    storage.data = None
    Epoch(storage).saved_value(NEVER)
    check(running)
    assert running.value(NEVER) == value


class Processes(RuleBasedStateMachine):
    """Processes that open, reset and close beside a storage that loses its mark and falls back."""

    def __init__(self) -> None:
        super().__init__()
        self.storage = Storage()
        self.epochs = [Epoch(self.storage) for _ in range(3)]
        self.retired: set[str] = set()  # as all of them are one process here

    @rule(index=st.integers(0, 2))
    def use(self, index: int) -> None:
        epoch = self.epochs[index]
        value = epoch.saved_value(NEVER)
        assert value == epoch.value(NEVER)
        assert epoch.is_saved

    @rule(index=st.integers(0, 2))
    def reset(self, index: int) -> None:
        before = self.epochs[index].saved_value(NEVER)
        self.epochs[index].renew()
        self.retired.add(before)
        assert self.epochs[index].value(NEVER) != before

    @rule(index=st.integers(0, 2))
    def reopen(self, index: int) -> None:
        self.epochs[index] = Epoch(self.storage)
        assert self.epochs[index].saved_value(NEVER) not in self.retired

    @rule(index=st.integers(0, 2))
    def check(self, index: int) -> None:
        check(self.epochs[index])

    @rule(back=st.integers(0, 10))
    def fall_back(self, back: int) -> None:
        if self.storage.history:
            self.storage.data = self.storage.history[-1 - min(back, len(self.storage.history) - 1)]

    @rule(found=st.sampled_from([None, b"", b"nonsense"]))
    def lose(self, found: bytes | None) -> None:
        self.storage.data = found

    @invariant()
    def a_storage_that_all_have_checked_has_a_mark_that_is_in_use(self) -> None:
        for epoch in self.epochs * 2:
            epoch.saved_value(NEVER)
            check(epoch)
        assert stored_value(self.storage) not in self.retired


TestProcesses = Processes.TestCase
TestProcesses.settings = settings(max_examples=settings().max_examples // 2, stateful_step_count=30)
