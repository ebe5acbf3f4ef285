"""The s3 tier's parts by themselves: settings, names, what is asked and how often, and the mark of the epoch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import cast

import pytest
from pydantic import ValidationError

from tiered_kv.base import OffloadKey
from tiered_kv.hooks import TierPlugins
from tiered_kv.testing.clock import ManualClock
from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit.epoch import MARK_BYTES_MAX, EpochMark
from tiered_kv_s3.bucket import Bucket, Sink
from tiered_kv_s3.counters import Counters
from tiered_kv_s3.mark import MarkError, MarkObject
from tiered_kv_s3.naming import Naming
from tiered_kv_s3.presence import Presence
from tiered_kv_s3.settings import S3Settings
from tiered_kv_s3.suspects import MISS_S, Suspects, Way
from tiered_kv_s3.verdict import Verdict

NAMING = Naming("kv", bytes(range(16)))
FIRST_EPOCH = "0123456789abcdef"


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
        self.heads = self.rounds = 0
        self.asked: list[str] = []
        self.answer: Verdict | None = None
        self.answers: dict[str, Verdict] = {}
        self.meanwhile: Callable[[], None] = lambda: None
        self.knows_conditions = True

    def are_there(self, names: Sequence[str], deadline: float) -> list[Verdict]:
        self.heads += len(names)
        self.rounds += 1
        self.asked += names
        there = {True: Verdict.DONE, False: Verdict.ABSENT}
        told = [self.answer or self.answers.get(name) or there[name in self.objects] for name in names]
        self.meanwhile()
        return told

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


def presence_of(bucket: FakeBucket, answer_ttl_s: float = 60.0) -> tuple[Presence, Counters]:
    counters = Counters()
    return Presence(cast(Bucket, bucket), counters, Suspects(), answer_ttl_s=answer_ttl_s), counters


def names_of(label: str, count: int) -> list[str]:
    return [NAMING.block(FIRST_EPOCH, key) for key in make_keys(count, label)]


@pytest.mark.parametrize("there", [0, 1, 15, 16, 17, 64, 499, 500, 983, 984, 998, 999, 1000])
def test_a_prompt_of_a_thousand_blocks_is_located_with_48_requests_and_three_round_trips(there: int) -> None:
    bucket = FakeBucket()
    names = names_of("prompt", 1000)
    bucket.objects = dict.fromkeys(names[:there], b"")
    presence, _ = presence_of(bucket)
    assert presence.ask([names], soon()) == [[True] * there + [False] * (1000 - there)]
    assert bucket.heads <= 48
    assert bucket.rounds <= 3
    assert bucket.asked[0] == names[0], "the first block is always asked for"


def test_prompts_are_located_side_by_side() -> None:
    bucket = FakeBucket()
    prompts = [names_of(f"prompt {number}", 1000) for number in range(3)]
    for number, names in enumerate(prompts):
        bucket.objects |= dict.fromkeys(names[: 300 * number], b"")
    answers = presence_of(bucket)[0].ask(prompts, soon())
    assert answers == [[True] * 300 * number + [False] * (1000 - 300 * number) for number in range(3)]
    assert bucket.rounds <= 3


def test_a_hole_is_answered_as_there_until_its_load_has_found_it() -> None:
    bucket = FakeBucket()
    names = names_of("prompt", 1000)
    bucket.objects = dict.fromkeys([*names[:5], *names[6:700]], b"")
    presence, _ = presence_of(bucket)
    assert presence.ask([names], soon()) == [[True] * 700 + [False] * 300]
    presence.note(names[5], False, time.monotonic())  # as the load does
    (answers,) = presence.ask([names], soon())
    assert answers[:6] == [True] * 5 + [False]


@pytest.mark.parametrize("count", [3, 16, 40, 300])
def test_blocks_that_are_asked_for_in_another_order_are_found_all_the_same(count: int) -> None:
    bucket = FakeBucket()
    names = names_of("window", count)[::-1]  # as for sliding windows: the last first
    bucket.objects = dict.fromkeys(names[1:], b"")
    assert presence_of(bucket)[0].ask([names], soon()) == [[False] + [True] * (count - 1)]


def test_a_first_block_that_is_gone_is_found_although_later_ones_are_remembered() -> None:
    bucket = FakeBucket()
    names = names_of("prompt", 100)
    presence, _ = presence_of(bucket)
    presence.note(names[60], True, time.monotonic())
    (answers,) = presence.ask([names], soon())
    assert not answers[0]


def test_a_block_that_the_bucket_does_not_answer_for_does_not_make_it_ask_for_each_of_a_prompt() -> None:
    bucket = FakeBucket()
    names = names_of("prompt", 1000)
    bucket.objects = dict.fromkeys(names, b"")
    bucket.answers[names[66]] = Verdict.SLOW_DOWN  # the second that is asked for
    presence, _ = presence_of(bucket)
    for _ in range(2):  # then it is a suspect
        (answers,) = presence.ask([names], soon())
        assert answers[:67] == [True] * 66 + [False]
    assert names[66] in bucket.asked
    assert bucket.heads <= 48


def test_a_block_that_there_was_no_time_to_ask_for_is_asked_for_by_the_next_lookup() -> None:
    bucket = FakeBucket()
    names = names_of("prompt", 4)
    bucket.objects = dict.fromkeys(names, b"")
    bucket.answers = dict.fromkeys(names[2:], Verdict.UNASKED)
    presence, counters = presence_of(bucket)
    assert presence.ask([names], soon()) == [[True, True, False, False]]
    assert (counters["unanswered_blocks_total"], counters["unanswered_lookups_total"]) == (2, 0)
    bucket.answers.clear()
    assert presence.ask([names], soon()) == [[True] * 4]


def test_a_store_while_a_lookup_travels_overrules_its_answer() -> None:
    bucket = FakeBucket()
    names = names_of("block", 1)
    presence, _ = presence_of(bucket)
    bucket.meanwhile = lambda: presence.note(names[0], True, time.monotonic())
    presence.ask([names], soon())
    assert presence.known(names[0])


def test_answers_are_remembered_and_asked_for_again_when_they_are_too_old() -> None:
    names = names_of("block", 10)
    for answer_ttl_s, heads in ((60.0, 10), (0.0, 20)):
        bucket = FakeBucket()
        bucket.objects = dict.fromkeys(names[:4], b"")
        presence, _ = presence_of(bucket, answer_ttl_s)
        for _ in range(2):
            assert presence.ask([names], soon()) == [[True] * 4 + [False] * 6]
        assert bucket.heads == heads


def test_what_this_process_stored_or_missed_overrules_an_older_answer() -> None:
    presence, _ = presence_of(FakeBucket())
    names = names_of("block", 3)
    assert presence.ask([names], soon()) == [[False] * 3]
    presence.note(names[0], True, time.monotonic())
    assert presence.ask([names], soon()) == [[True, False, False]]
    presence.forget()
    assert presence.known(names[0]) is None


def test_answers_that_cannot_be_had_are_misses_that_are_counted_and_not_kept() -> None:
    bucket = FakeBucket()
    presence, counters = presence_of(bucket)
    names = names_of("block", 3)
    bucket.answer = Verdict.TIMEOUT
    assert presence.ask([names], soon()) == [[False] * 3]
    assert counters["unanswered_lookups_total"] == 3
    bucket.answer = None
    bucket.objects = dict.fromkeys(names, b"")
    assert presence.ask([names], soon()) == [[True] * 3]


# -- blocks that fail by themselves ----------------------------------------------------------------


def test_a_block_that_fails_while_others_are_answered_is_a_miss_for_a_while(clock: ManualClock) -> None:
    suspects = Suspects(clock)
    suspects.note_answer(Way.LOAD)
    assert suspects.note_failed_read(Way.LOAD, "bad", clock())
    assert "bad" in suspects
    assert "good" not in suspects
    clock.advance(MISS_S)
    assert "bad" not in suspects


def test_where_nothing_is_answered_the_bucket_fails_and_a_block_is_a_miss_after_its_second_failure(
    clock: ManualClock,
) -> None:
    suspects = Suspects(clock)
    suspects.note_answer(Way.LOAD)
    clock.advance(1.0)
    assert not suspects.note_failed_read(Way.LOAD, "block", clock())
    assert "block" not in suspects
    suspects.note_answer(Way.STORE)
    suspects.note_answer(Way.LOOKUP)
    assert not suspects.note_failed_read(Way.LOAD, "block", clock()), "stores and lookups tell nothing about loads"
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
