"""A reason is one of an enum, from where it arises to where it is shown; a word of a tier keeps its name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.faulty import FourMethodTier
from tests.support.stacks import forget_memory, manager_of, plugged_class, stack_of
from tiered_kv.errors import TierBusyError
from tiered_kv.reasons import FAILED, SENTENCES, SKIPPED, Fate, Reason, RecordStatus, TooSlow
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.tiering.answers import checked_result
from tiered_kv.tiering.base import JobMetadata, JobResult
from tiered_kv.toolkit.jobs import failure_reason

KEYS = [bytes([index]) * 8 for index in range(4)]
BLOCKS = np.ones((4, 4096), np.uint8)


class WordyTier(FourMethodTier):
    """Stores nothing, and says why in a word of its own."""

    word: Any = "strike"

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._finished.append(JobResult(job_metadata.job_id, False, [], self.word))

    def shutdown(self) -> None:
        self._region.release()


class LosingTier(FourMethodTier):
    """Loses what it stores, and says why in a word that means another thing elsewhere."""

    word = "refused"

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._finished.append(JobResult(job_metadata.job_id, False, [], self.word))

    def shutdown(self) -> None:
        self._region.release()


def put(stack: Stack) -> None:
    assert stack.put(KEYS, BLOCKS, timeout=60) == 4
    assert stack.flush(60)


def test_every_reason_has_a_word_a_sentence_and_a_fate_that_the_counters_and_the_page_know() -> None:
    assert len(Reason.__members__) == len({reason.value for reason in Reason})
    for reason in Reason:
        assert reason.sentence
        assert reason.fate.label in SENTENCES
    assert {*SKIPPED} | {*FAILED} | {Reason.REFUSED, Reason.TOO_SLOW} == {*Reason}
    assert all(each.sentence for each in TooSlow)


def test_every_status_of_a_record_but_ok_is_a_reason() -> None:
    statuses = [status for status in RecordStatus if status is not RecordStatus.OK]
    assert [status.cause.value for status in statuses] == [status.value for status in statuses]
    assert {status.reason for status in statuses} <= {*Reason} - {Reason.OTHER}


def test_a_word_of_a_tier_is_a_reason_or_its_own() -> None:
    assert Reason.of("no_space") is Reason.NO_SPACE
    assert Reason.of("strike") is Reason.OTHER
    assert Reason.of("") is Reason.FAILED
    assert [Reason.of(word) for word in ("refused", "too_slow")] == [Reason.OTHER] * 2, "these are of one request"
    assert all(Reason.of(reason.value).fate < Fate.TOO_SLOW for reason in Reason), "the history's table has four bits"


@pytest.mark.parametrize(
    ("said", "cause", "word"),
    [
        ("no_space", Reason.NO_SPACE, "no_space"),
        (Reason.CHECKSUM, Reason.CHECKSUM, "checksum"),
        ("strike", Reason.OTHER, "strike"),
        ("", Reason.FAILED, "failed"),
        (None, Reason.FAILED, "failed"),
        (7, Reason.OTHER, "7"),
        ("a sentence is no word", Reason.ERROR, "error"),
    ],
)
def test_a_result_has_the_reason_and_the_word(said: Any, cause: Reason, word: str) -> None:
    result = checked_result(JobResult(1, False, None, said))
    assert (result.cause, result.word) == (cause, word)
    assert type(result.word) is str


def test_a_tier_s_own_word_is_counted_by_its_name() -> None:
    with plugged_class("wordy", WordyTier), open_stack(stack_of({"type": "wordy"})) as stack:
        put(stack)
        counters = stack.counters()["wordy"]
        assert counters["failed_blocks_total"]["store"]["strike"] == 4
        assert {type(word) for word in counters["failed_blocks_total"]["store"]} == {str}


def test_what_a_tier_calls_refused_is_a_failure_of_the_tier_and_not_want_of_room_above_it() -> None:
    with plugged_class("losing", LosingTier), open_stack(stack_of({"type": "losing"})) as stack:
        put(stack)
        forget_memory(manager_of(stack))
        assert stack.get(KEYS, np.zeros_like(BLOCKS), timeout=60) == 0
        misses = stack.counters()["losing"]["misses_total"]
        assert {word: count for word, count in misses.items() if count} == {"failed": 4}


def test_an_exception_stands_for_a_reason() -> None:
    assert failure_reason(OSError(28, "full")) is Reason.NO_SPACE
    assert failure_reason(OSError(5, "bad")) is Reason.IO_ERROR
    assert failure_reason(TimeoutError()) is Reason.TIMEOUT
    assert failure_reason(TierBusyError("held", tier="t", operation="open")) is Reason.BUSY
    assert failure_reason(ValueError()) is Reason.ERROR
