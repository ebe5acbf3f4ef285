"""The s3 tier's parts by themselves: settings, names, what is asked and how often, and the mark of the epoch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import pytest
from pydantic import ValidationError

from tiered_kv.base import OffloadKey
from tiered_kv.errors import TierUnavailableError
from tiered_kv.hooks import TierPlugins
from tiered_kv.testing.clock import ManualClock
from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit.epoch import MARK_BYTES_MAX, EpochMark
from tiered_kv_s3.bucket import Bucket, Sink
from tiered_kv_s3.counters import Counters
from tiered_kv_s3.listing import PAGE_OBJECTS, Listed, Listing
from tiered_kv_s3.mark import MarkError, MarkObject
from tiered_kv_s3.naming import Naming
from tiered_kv_s3.presence import HEADS_PER_PAGE, LISTED_PAGES_MAX, Presence
from tiered_kv_s3.settings import S3Settings
from tiered_kv_s3.suspects import MISS_S, Suspects, Way
from tiered_kv_s3.verdict import Verdict

NAMING = Naming("kv", bytes(range(16)))
FIRST_EPOCH = "0123456789abcdef"
PREFIX = NAMING.blocks_of(FIRST_EPOCH)


def soon() -> float:
    return time.monotonic() + 10.0


# -- settings and names ----------------------------------------------------------------------------


def test_names_are_ours_only_if_all_of_them_is() -> None:
    block = NAMING.block(FIRST_EPOCH, make_keys(1)[0])
    ours = [NAMING.namespace, NAMING.epoch, block]
    assert [name for name in ours if not NAMING.owns(name)] == []
    assert [name for name in ours if NAMING.is_block(name)] == [block]
    foreign = [f"{name}{more}" for name in ours for more in ("x", "/x", "\n", ".bak")]
    foreign += [f"x{name}" for name in ours] + [NAMING.root, NAMING.blocks, block.upper()]
    foreign.append(block.replace(block[-32:-30], "zz"))
    assert [name for name in foreign if NAMING.owns(name) or NAMING.is_block(name)] == []


def test_settings_are_strict() -> None:
    good = {"bucket": "kv-blocks"}
    S3Settings.model_validate(good)
    for wrong in (
        {"bucket": "a/b"},
        {"prefix": "/a"},
        {"prefix": "a//b"},
        {"prefix": "a b"},
        {"prefix": ".."},
        {"prefix": "a/./b"},
        {"endpoint_url": "localhost:9000"},
        {"endpoint_url": "http://user:password@host"},
        {"endpoint_url": "http://host:port"},
        {"access_key_id": "id"},
        {"session_token": "token"},
        {"profile": "p", "access_key_id": "i", "secret_access_key": "s"},
        {"kms_key_id": "k"},
        {"server_encryption": "ROT13"},
        {"connections": 1},
        {"capacity": 0},
        {"size": 3},
    ):
        with pytest.raises(ValidationError):
            S3Settings.model_validate({**good, **wrong})


def test_the_plugin_registers_the_tier_type() -> None:
    import tiered_kv_s3

    plugins = TierPlugins()
    plugins.register(tiered_kv_s3)
    (report,) = plugins.reports()
    assert [tier.name for tier in report.tiers] == ["s3"]


def test_names_hold_namespace_epoch_and_key() -> None:
    name = NAMING.block("00000000000000aa", OffloadKey(b"some key of any length" * 40))
    parts = name.split("/")
    assert parts[:4] == ["kv", bytes(range(16)).hex(), "blocks", "00000000000000aa"]
    assert parts[5].startswith(parts[4])
    assert (len(parts[4]), len(parts[5])) == (2, 32)
    assert name.startswith(NAMING.blocks)


# -- what is asked ---------------------------------------------------------------------------------


class FakeBucket:
    """Objects in a dictionary; counts presence requests."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.heads = 0
        self.answer: Verdict | None = None
        self.knows_conditions = True

    def are_there(self, names: Sequence[str], deadline: float) -> list[Verdict]:
        self.heads += len(names)
        return [self.answer or (Verdict.DONE if name in self.objects else Verdict.ABSENT) for name in names]

    def get(self, name: str, sink: Sink, deadline: float, *, expires: bool = True) -> Verdict:
        assert not expires, "the epoch is not subject to ttl"
        if self.answer is not None:
            return self.answer
        if name not in self.objects:
            return Verdict.ABSENT
        parts = sink(len(self.objects[name]))
        if parts is None:
            return Verdict.OVERSIZED
        parts[0][:] = self.objects[name]
        return Verdict.DONE

    def put(self, name: str, pieces: Sequence[bytes], deadline: float, *, only_if_absent: bool = False) -> Verdict:
        if self.answer is not None:
            return self.answer
        if only_if_absent and not self.knows_conditions:
            return Verdict.REFUSED
        if only_if_absent and name in self.objects:
            return Verdict.PRESENT
        self.objects[name] = b"".join(pieces)
        return Verdict.DONE


class FakeListing:
    """Lists what it is given, oldest last; counts pages."""

    def __init__(self, entries: Sequence[Listed] = ()) -> None:
        self.entries = list(entries)
        self.pages_listed = 0
        self.is_broken = False

    def pages(self, prefix: str, deadline: float) -> Iterator[list[Listed]]:
        if self.is_broken:
            raise TierUnavailableError("it does not list")
        for start in range(0, max(1, len(self.entries)), PAGE_OBJECTS):
            self.pages_listed += 1
            yield self.entries[start : start + PAGE_OBJECTS]


def make_presence(bucket: FakeBucket, listing: FakeListing, answer_ttl_s: float = 60.0) -> tuple[Presence, Counters]:
    counters = Counters()
    presence = Presence(
        cast(Bucket, bucket),
        cast(Listing, listing),
        counters,
        Suspects(),
        answer_ttl_s=answer_ttl_s,
        object_ttl_s=100.0,
    )
    return presence, counters


def names_of(label: str, count: int) -> list[str]:
    return [NAMING.block(FIRST_EPOCH, key) for key in make_keys(count, label)]


def test_few_blocks_take_a_head_each_and_many_take_a_listing() -> None:
    bucket, listing = FakeBucket(), FakeListing([Listed(name, 1, 0.0) for name in names_of("here", 5)])
    bucket.objects = dict.fromkeys(names_of("here", 5), b"")
    presence, _ = make_presence(bucket, listing)
    few = names_of("here", HEADS_PER_PAGE - 1)
    assert presence.ask(few, PREFIX, soon()) == [True] * 5 + [False] * (len(few) - 5)
    assert (bucket.heads, listing.pages_listed) == (len(few), 0)
    many = names_of("other", 50)
    assert presence.ask(many, PREFIX, soon()) == [False] * 50
    assert presence.ask([*many, *few], PREFIX, soon()) == [False] * 50 + [True] * 5 + [False] * (len(few) - 5)
    assert (bucket.heads, listing.pages_listed) == (len(few), 1)


def test_answers_are_asked_for_again_when_they_are_too_old() -> None:
    bucket, listing = FakeBucket(), FakeListing()
    presence, _ = make_presence(bucket, listing, answer_ttl_s=0.0)
    names = names_of("block", 40)
    for turn in (1, 2):
        assert presence.ask(names, PREFIX, soon()) == [False] * 40
        assert (bucket.heads, listing.pages_listed) == (0, turn)


def test_what_this_process_stored_or_missed_overrules_an_older_listing() -> None:
    bucket, listing = FakeBucket(), FakeListing([Listed(name, 1, 0.0) for name in names_of("here", 20)])
    presence, _ = make_presence(bucket, listing)
    names = names_of("here", 30)
    assert presence.ask(names, PREFIX, soon()) == [True] * 20 + [False] * 10
    presence.note(names[0], False, time.monotonic())
    presence.note(names[29], True, time.monotonic())
    assert presence.ask(names, PREFIX, soon()) == [False] + [True] * 19 + [False] * 9 + [True]
    presence.forget()
    assert presence.known(names[1], PREFIX) is None


def test_a_listing_answers_for_its_own_epoch_only() -> None:
    bucket, listing = FakeBucket(), FakeListing()
    presence, _ = make_presence(bucket, listing)
    presence.ask(names_of("block", 20), PREFIX, soon())
    other = NAMING.blocks_of("f" * 16)
    assert presence.known(NAMING.block("f" * 16, make_keys(1)[0]), other) is None


def test_blocks_past_their_time_are_not_there() -> None:
    names = names_of("old", 20)
    listing = FakeListing([Listed(name, 1, 99.0 if index else 101.0) for index, name in enumerate(names)])
    presence, _ = make_presence(FakeBucket(), listing)
    assert presence.ask(names, PREFIX, soon()) == [False] + [True] * 19


@pytest.mark.parametrize("reason", ["broken", "too long"])
def test_where_listing_does_not_do_each_block_is_asked_for(reason: str) -> None:
    bucket, listing = FakeBucket(), FakeListing()
    if reason == "broken":
        listing.is_broken = True
    else:
        listing.entries = [Listed(f"{PREFIX}{index}", 1, 0.0) for index in range((LISTED_PAGES_MAX + 5) * PAGE_OBJECTS)]
    bucket.objects = dict.fromkeys(names_of("here", 10), b"")
    presence, _ = make_presence(bucket, listing)
    for label in ("here", "there"):
        assert presence.ask(names_of(label, 30), PREFIX, soon()) == [label == "here"] * 10 + [False] * 20
    assert bucket.heads == 60
    assert listing.pages_listed <= LISTED_PAGES_MAX, "it is not tried again at once"


def test_answers_that_cannot_be_had_are_misses_that_are_counted_and_not_kept() -> None:
    bucket = FakeBucket()
    presence, counters = make_presence(bucket, FakeListing())
    names = names_of("block", 3)
    bucket.answer = Verdict.TIMEOUT
    assert presence.ask(names, PREFIX, soon()) == [False] * 3
    assert counters["failed_lookups"] == 3
    bucket.answer = None
    bucket.objects = dict.fromkeys(names, b"")
    assert presence.ask(names, PREFIX, soon()) == [True] * 3


# -- blocks that fail by themselves ----------------------------------------------------------------


def test_a_block_that_fails_while_others_are_answered_is_a_miss_for_a_while(clock: ManualClock) -> None:
    suspects = Suspects(clock)
    suspects.note_answer(Way.READ)
    assert suspects.note_failed_read("bad", clock())
    assert "bad" in suspects
    assert "good" not in suspects
    clock.advance(MISS_S)
    assert "bad" not in suspects


def test_where_nothing_is_answered_the_bucket_fails_and_a_block_is_a_miss_after_its_second_failure(
    clock: ManualClock,
) -> None:
    suspects = Suspects(clock)
    suspects.note_answer(Way.READ)
    clock.advance(1.0)
    assert not suspects.note_failed_read("block", clock())
    assert "block" not in suspects
    suspects.note_answer(Way.STORE)
    assert not suspects.note_failed_read("block", clock()), "stores tell nothing about reads"
    assert "block" in suspects
    suspects.forget("block")
    assert "block" not in suspects


# -- the mark of the epoch -------------------------------------------------------------------------


def mark_of(bucket: FakeBucket) -> MarkObject:
    return MarkObject(cast(Bucket, bucket), NAMING.epoch, "s3")


def test_a_mark_is_created_once_and_written_over() -> None:
    mark = mark_of(FakeBucket())
    assert mark.read(soon()) is None
    mark.create(b"first", soon())
    mark.create(b"second", soon())
    assert mark.read(soon()) == b"first"
    mark.write(b"third", soon())
    assert mark.read(soon()) == b"third"


def test_a_server_without_conditions_is_written_to_all_the_same() -> None:
    bucket = FakeBucket()
    bucket.knows_conditions = False
    mark = mark_of(bucket)
    mark.create(b"first", soon())
    assert mark.read(soon()) == b"first"


def test_what_is_too_long_for_a_mark_is_damaged() -> None:
    bucket = FakeBucket()
    bucket.objects[NAMING.epoch] = EpochMark(1, "0123456789abcdef").encode() + bytes(MARK_BYTES_MAX)
    data = mark_of(bucket).read(soon())
    assert data is not None
    assert EpochMark.decode(data) is None


def test_a_mark_that_cannot_be_read_or_written_is_an_error_with_its_reason() -> None:
    bucket = FakeBucket()
    bucket.answer = Verdict.DENIED
    mark = mark_of(bucket)
    attempts: list[Callable[[], object]] = [
        lambda: mark.read(soon()),
        lambda: mark.create(b"", soon()),
        lambda: mark.write(b"", soon()),
    ]
    for attempt in attempts:
        with pytest.raises(MarkError, match="denied") as raised:
            attempt()
        assert raised.value.verdict is Verdict.DENIED
