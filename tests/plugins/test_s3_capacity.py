"""The capacity of a bucket's namespace: kept by all who share it together, whatever they do at the same time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from tiered_kv.errors import TierUnavailableError
from tiered_kv.testing.waiting import wait_until
from tiered_kv.toolkit.epoch import Epoch
from tiered_kv_s3 import caretaker
from tiered_kv_s3 import grants as grants_module
from tiered_kv_s3.bucket import Bucket
from tiered_kv_s3.caretaker import Caretaker
from tiered_kv_s3.counters import Counters
from tiered_kv_s3.grants import CLOCKS_S, Grants
from tiered_kv_s3.ledger import Ledger, Stored
from tiered_kv_s3.listing import Listed, Listing
from tiered_kv_s3.mark import MarkObject
from tiered_kv_s3.naming import Naming
from tiered_kv_s3.presence import Presence
from tiered_kv_s3.suspects import Suspects
from tiered_kv_s3.sweeper import Sweeper
from tiered_kv_s3.verdict import Verdict

BLOCKS = "kv/blocks/"
GRANTS = "kv/grants/"
RECORD_BYTES = 10


def is_block(name: str) -> bool:
    return not name.endswith(".txt")


def soon() -> float:
    return time.monotonic() + 10.0


class SharedBucket:
    """Objects in a dictionary, with a clock of its own; what others do meanwhile happens at every request."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[int, float]] = {}
        self.now_s = 0.0
        self.refuses_deletes = False
        self.page_objects = 3

    def meanwhile(self) -> None:
        return

    def used_bytes(self) -> int:
        return sum(size for name, (size, _) in self.objects.items() if name.startswith(BLOCKS))

    def put(self, name: str, pieces: Sequence[bytes], deadline: float) -> Verdict:
        self.meanwhile()
        self.objects[name] = (sum(map(len, pieces)), self.now_s)
        return Verdict.DONE

    def delete(self, name: str, deadline: float) -> Verdict:
        self.meanwhile()
        if self.refuses_deletes:
            return Verdict.DENIED
        self.objects.pop(name, None)
        return Verdict.DONE


class SharedListing:
    """Lists a `SharedBucket` page by page, and deletes in it."""

    def __init__(self, bucket: SharedBucket) -> None:
        self._bucket = bucket

    def pages(self, prefix: str, deadline: float) -> Iterator[list[Listed]]:
        after = ""
        while True:
            self._bucket.meanwhile()
            names = sorted(name for name in self._bucket.objects if name.startswith(prefix) and name > after)
            page = names[: self._bucket.page_objects]
            found = [(name, *self._bucket.objects[name]) for name in page]
            yield [Listed(name, size, self._bucket.now_s - written_s) for name, size, written_s in found]
            if len(names) == len(page):
                return
            after = page[-1]

    def delete(self, names: Sequence[str], deadline: float) -> int:
        if self._bucket.refuses_deletes:
            return 0
        for name in names:
            self._bucket.meanwhile()
            self._bucket.objects.pop(name, None)
        return len(names)


class Process:
    """One of those that share the bucket."""

    def __init__(
        self, bucket: SharedBucket, number: int, capacity_bytes: int | None, ttl_s: float | None = None
    ) -> None:
        listing = cast(Listing, SharedListing(bucket))
        self.bucket = bucket
        self.counters = Counters()
        self.ledger = Ledger(capacity_bytes, RECORD_BYTES)
        self.presence = Presence(
            cast(Bucket, bucket), listing, self.counters, Suspects(), answer_ttl_s=60.0, object_ttl_s=ttl_s
        )
        self.grants = Grants(cast(Bucket, bucket), listing, GRANTS, 1.0) if capacity_bytes else None
        self.sweeper = Sweeper(listing, BLOCKS, is_block, self.ledger, self.grants, self.presence, ttl_s, self.counters)
        self._number = number
        self._stores = 0

    def sweep(self) -> None:
        self.sweeper.sweep(lambda: False)

    def store(self, outcome: Stored = Stored.YES) -> bool:
        """Store one block; return whether there was room."""
        if not self.ledger.reserve(RECORD_BYTES, time.monotonic()):
            return False
        self._stores += 1
        name = f"{BLOCKS}{self._number}-{self._stores:05}"
        self.bucket.meanwhile()
        if outcome is not Stored.NO:
            self.bucket.now_s += 0.001
            self.bucket.objects[name] = (RECORD_BYTES, self.bucket.now_s)
            self.bucket.meanwhile()
        self.ledger.settle(RECORD_BYTES, outcome)
        return True


class Turns:
    """Runs actors on threads of their own, one at a time, and has the next one drawn at each of their requests."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self._scheduler = threading.Semaphore(0)
        self._actors: dict[int, threading.Semaphore] = {}  # by thread
        self._threads: list[threading.Thread] = []
        self._is_over = False

    def add(self, step: Callable[[], None]) -> None:
        """Have `step` called again and again."""
        turn = threading.Semaphore(0)

        def act() -> None:
            self._actors[threading.get_ident()] = turn
            turn.acquire()
            try:
                while not self._is_over:
                    step()
                    self.give_up_turn()
            finally:
                self._scheduler.release()

        self._threads.append(threading.Thread(target=act))
        self._threads[-1].start()

    def give_up_turn(self) -> None:
        """Let others go on. Once it is over everybody runs to the end of what it does, one after the other."""
        if not self._is_over:
            self._scheduler.release()
            self._actors[threading.get_ident()].acquire()

    def run(self, turns: int, check: Callable[[], None]) -> None:
        while len(self._actors) < len(self._threads):
            time.sleep(0.001)
        actors = [self._actors[thread.ident or 0] for thread in self._threads]
        try:
            for _ in range(turns):
                self.chance.choice(actors).release()
                self._scheduler.acquire()
                check()
        finally:
            self._is_over = True
            for thread, actor in zip(self._threads, actors, strict=True):
                actor.release()
                thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_the_capacity_holds_whatever_those_who_share_it_do_at_the_same_time(seed: int) -> None:
    turns = Turns(seed)
    bucket = SharedBucket()
    bucket.meanwhile = turns.give_up_turn  # type: ignore[method-assign]
    capacity_bytes = RECORD_BYTES * turns.chance.choice((7, 20, 40))
    processes = [Process(bucket, number, capacity_bytes) for number in range(turns.chance.randint(1, 4))]
    outcomes = (Stored.YES, Stored.YES, Stored.YES, Stored.PERHAPS, Stored.NO)
    stored = 0

    def actor_of(process: Process) -> Callable[[], None]:
        def store() -> None:
            nonlocal stored
            stored += process.store(turns.chance.choice(outcomes))

        return store

    for process in processes:
        turns.add(process.sweep)
        for _ in range(3):
            turns.add(actor_of(process))

    def check() -> None:
        assert bucket.used_bytes() <= capacity_bytes

    turns.run(4000, check)
    assert stored > 20


def test_one_process_uses_nearly_all_of_the_capacity() -> None:
    process = Process(SharedBucket(), 0, 100 * RECORD_BYTES)
    for _ in range(60):
        process.sweep()
        while process.store():
            pass
    assert process.bucket.used_bytes() >= 95 * RECORD_BYTES
    process.sweep()
    assert process.bucket.used_bytes() == 80 * RECORD_BYTES, "and makes room for the next stores"


def test_the_oldest_blocks_go_first_and_are_known_to_be_gone() -> None:
    process = Process(SharedBucket(), 0, 10 * RECORD_BYTES)
    for age in (3, 9, 1, 7, 5, 2, 8, 4, 6, 0):
        process.bucket.objects[f"{BLOCKS}{age}"] = (RECORD_BYTES, -float(age))
    process.sweep()
    assert sorted(process.bucket.objects) == [f"{BLOCKS}{age}" for age in range(8)] + list(process.bucket.objects)[-1:]
    assert process.counters["deleted_blocks"] == 2
    assert process.presence.known(f"{BLOCKS}9", BLOCKS) is False


def test_foreign_objects_among_the_blocks_are_counted_and_never_deleted() -> None:
    process = Process(SharedBucket(), 0, 10 * RECORD_BYTES, ttl_s=100.0)
    process.bucket.objects = {f"{BLOCKS}{age}": (RECORD_BYTES, -float(age)) for age in range(9)}
    process.bucket.objects[f"{BLOCKS}notes.txt"] = (RECORD_BYTES, -1000.0)
    process.sweep()
    left = {name for name in process.bucket.objects if name.startswith(BLOCKS)}
    assert left == {f"{BLOCKS}notes.txt", *(f"{BLOCKS}{age}" for age in range(7))}
    assert process.ledger.used_bytes == 8 * RECORD_BYTES


def test_blocks_past_their_time_go_whatever_room_there_is() -> None:
    process = Process(SharedBucket(), 0, None, ttl_s=6.5)
    for age in range(10):
        process.bucket.objects[f"{BLOCKS}{age}"] = (RECORD_BYTES, -float(age))
    process.sweep()
    assert sorted(process.bucket.objects) == [f"{BLOCKS}{age}" for age in range(7)]


def test_the_grant_of_a_process_that_was_killed_is_free_after_its_time() -> None:
    bucket = SharedBucket()
    killed, other = Process(bucket, 0, 100 * RECORD_BYTES), Process(bucket, 1, 100 * RECORD_BYTES)
    killed.sweep()
    other.sweep()
    (name,) = [name for name in bucket.objects if name.startswith(GRANTS) and "-30" in name][:1]
    bucket.now_s += 30 + CLOCKS_S + 1
    other.sweep()
    assert name not in bucket.objects
    stored = 0
    for _ in range(60):
        other.sweep()
        while other.store():
            stored += 1
    assert bucket.used_bytes() > 90 * RECORD_BYTES


def test_who_could_not_renew_its_grant_stores_nothing_any_more() -> None:
    ledger = Ledger(100, RECORD_BYTES)
    ledger.begin_round()
    ledger.end_listing(0, 0, 0, time.monotonic() - 0.001)
    assert not ledger.reserve(RECORD_BYTES, soon())


def test_a_grant_holds_for_longer_than_a_round_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = SharedBucket()
    grants, _ = two_grants(bucket, monkeypatch)
    assert grants.announce(10) == 30.0
    grants.allow_for(100.0)
    assert grants.announce(10) == 230.0
    assert [name[-4:] for name in bucket.objects] == ["-230"]


def test_a_round_that_took_longer_than_its_grant_held_is_followed_by_another() -> None:
    process = Process(SharedBucket(), 0, 100 * RECORD_BYTES)
    assert process.grants is not None
    process.grants.allow_for(-100.0)  # the grant is over before the round is
    assert process.sweeper.sweep(lambda: False)
    assert not process.store()
    assert not process.sweeper.sweep(lambda: False)
    assert process.store()


def test_a_grant_of_a_process_that_is_killed_is_kept_from_the_others_no_longer_than_its_rounds_need() -> None:
    bucket = SharedBucket()
    grants = [Grants(cast(Bucket, bucket), cast(Listing, SharedListing(bucket)), GRANTS, 60.0) for _ in range(2)]
    killed, other = grants
    killed.allow_for(600.0)  # a round was slow once
    killed.allow_for(4.9)
    killed.announce(10)
    bucket.now_s = 90 + CLOCKS_S  # 60 s to the next round, a pause as long as the last one, and 20 s
    assert other.of_others(soon()).total_bytes == 10
    bucket.now_s += 0.1
    assert other.of_others(soon()).total_bytes == 0
    assert bucket.objects == {}


def two_grants(bucket: SharedBucket, monkeypatch: pytest.MonkeyPatch) -> list[Grants]:
    """Grants of two processes, which live by the bucket's clock and hold for 30 s."""
    monkeypatch.setattr(grants_module, "time", SimpleNamespace(monotonic=lambda: bucket.now_s))
    return [Grants(cast(Bucket, bucket), cast(Listing, SharedListing(bucket)), GRANTS, 1.0) for _ in range(2)]


def test_a_grant_announced_again_while_another_deletes_the_lapsed_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = SharedBucket()
    stopped, other = two_grants(bucket, monkeypatch)
    assert stopped.announce(10) == 30.0
    (lapsed,) = bucket.objects
    bucket.now_s = 30 + CLOCKS_S + 1
    delete, put = bucket.delete, bucket.put

    def put_another(name: str, pieces: Sequence[bytes], deadline: float) -> Verdict:
        assert name != lapsed
        return put(name, pieces, deadline)

    bucket.put = put_another  # type: ignore[method-assign]

    def late_delete(name: str, deadline: float) -> Verdict:
        bucket.delete = delete  # type: ignore[method-assign]
        assert stopped.announce(10) == bucket.now_s + 30
        return delete(name, deadline)

    bucket.delete = late_delete  # type: ignore[method-assign]
    other.of_others(soon())
    assert bucket.delete is delete, "the lapsed grant was to be deleted"
    assert other.of_others(soon()).total_bytes == 10
    assert len(bucket.objects) == 1, "and its owner has deleted it too"
    assert stopped.of_others(soon()).total_bytes == 0


def test_a_grant_that_lapses_while_it_is_renewed_is_announced_under_another_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket = SharedBucket()
    slow, _ = two_grants(bucket, monkeypatch)
    slow.announce(10)
    (former,) = bucket.objects
    bucket.now_s = 29.0
    assert slow.announce(10) == 59.0
    assert list(bucket.objects) == [former], "it holds, so the same name tells all"
    bucket.now_s = 58.0

    def pass_time() -> None:
        bucket.meanwhile = lambda: None  # type: ignore[method-assign]
        bucket.now_s = 59.0 + CLOCKS_S + 1  # others find it lapsed before the renewal arrives

    bucket.meanwhile = pass_time  # type: ignore[method-assign]
    assert slow.announce(10) == bucket.now_s + 30
    assert len(bucket.objects) == 1
    assert former not in bucket.objects


def test_a_grant_s_name_is_not_written_again_once_it_was_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = SharedBucket()
    owner, other = two_grants(bucket, monkeypatch)
    names = []
    for size in (1, 2, 1, 2, *range(3, 1100)):
        owner.announce(size)
        (name,) = bucket.objects
        names.append(name)
    assert len(set(names)) == len(names)
    owners = {name.removeprefix(GRANTS)[:16] for name in names[4:]}
    assert len(owners) == 2, "a new one, so that no more than 1000 names have to be remembered"
    bucket.refuses_deletes = True
    for size in (2000, 1099):  # the deletion that was refused may be carried out all the same
        with pytest.raises(TierUnavailableError):
            owner.announce(size)
    assert len(bucket.objects) == 3
    assert other.of_others(soon()).total_bytes == 1099 + 2000 + 1099
    bucket.refuses_deletes = False
    owner.give_up(soon())
    assert bucket.objects == {}


def test_a_process_that_ends_leaves_its_grant_to_the_others() -> None:
    process = Process(SharedBucket(), 0, 100 * RECORD_BYTES)
    process.sweep()
    assert any(name.startswith(GRANTS) for name in process.bucket.objects)
    assert process.ledger.close()
    assert not process.ledger.reserve(RECORD_BYTES, soon())
    assert process.grants is not None
    process.grants.give_up(soon())
    assert process.bucket.objects == {}


def test_stores_that_wait_for_the_first_listing_fail_when_that_fails() -> None:
    ledger = Ledger(100, RECORD_BYTES)
    answers: list[bool] = []
    deadline = time.monotonic() + 600.0  # long after this test has failed
    thread = threading.Thread(target=lambda: answers.append(ledger.reserve(RECORD_BYTES, deadline)), daemon=True)
    thread.start()

    def has_failed() -> bool:
        ledger.fail_round()
        return bool(answers)

    wait_until(has_failed, what="the end of a store's wait")
    thread.join()
    assert answers == [False]


class Pauses(threading.Event):
    """A caretaker's end, for which it waits between its rounds: the pauses are noted, and take no time."""

    def __init__(self, pauses_max: int, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self.taken_s: list[float | None] = []
        self._pauses_max = pauses_max
        self._meanwhile = meanwhile

    def wait(self, timeout: float | None = None) -> bool:
        self.taken_s.append(timeout)
        self._meanwhile()
        if len(self.taken_s) == self._pauses_max:
            self.set()
        return self.is_set()


def test_a_server_that_does_not_delete_is_not_asked_in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(SharedBucket(), 0, 10 * RECORD_BYTES)
    process.bucket.refuses_deletes = True
    process.bucket.objects = {f"{BLOCKS}{number}": (RECORD_BYTES, 0.0) for number in range(20)}
    epoch = Epoch(MarkObject(cast(Bucket, process.bucket), "kv/epoch", "s3"))
    keeper = Caretaker(
        cast(Bucket, process.bucket),
        Naming("kv", bytes(16)),
        {},
        epoch,
        process.sweeper,
        process.ledger,
        process.counters,
        interval_s=0.01,
        name="caretaker",
    )
    pauses = Pauses(4, meanwhile=keeper.start)  # as every store does that finds no room
    monkeypatch.setattr(keeper, "_stop", pauses)
    keeper.start()
    assert keeper.join(60.0)
    assert process.counters["failed_rounds"] == 4
    assert pauses.taken_s == [caretaker.RETRY_S] * 4


def test_a_caretaker_that_gets_no_thread_is_started_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(SharedBucket(), 0, 10 * RECORD_BYTES)
    naming = Naming("kv", bytes(16))
    keeper = Caretaker(
        cast(Bucket, process.bucket),
        naming,
        {},
        Epoch(MarkObject(cast(Bucket, process.bucket), "kv/epoch", "s3")),
        process.sweeper,
        process.ledger,
        process.counters,
        interval_s=60.0,
        name="caretaker",
    )

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        keeper.start()
    assert not keeper.has_started
    assert keeper.join(0.0)
    keeper.start()
    assert keeper.has_started
    keeper.stop()
    assert keeper.join(60.0)


def test_what_cannot_be_deleted_is_an_error_and_stays_counted() -> None:
    process = Process(SharedBucket(), 0, 10 * RECORD_BYTES)
    process.bucket.refuses_deletes = True
    process.bucket.objects = {f"{BLOCKS}{number}": (RECORD_BYTES, 0.0) for number in range(20)}
    with pytest.raises(TierUnavailableError, match="12 blocks could not be deleted"):
        process.sweep()
    assert process.ledger.used_bytes == 20 * RECORD_BYTES
    assert not process.store()
