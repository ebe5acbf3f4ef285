"""Blocking and asyncio tiers: whatever the author's methods do, jobs and lookups end as promised."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.toolkit.conftest import BLOCK_BYTES, PATIENCE_S, AsyncDictTier, DictTier, MakeStage, Stage
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.errors import TierUnavailableError
from tiered_kv.testing.conformance import TierConformance
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import OpenTier, TierRig, make_keys
from tiered_kv.tiering.base import JobMetadata, JobResult
from tiered_kv.toolkit import Outcome, jobs
from tiered_kv_fs.settings import FsSettings
from tiered_kv_fs.tier import FsTier
from tiered_kv_memory.settings import MemorySettings
from tiered_kv_memory.tier import MemoryTier

KINDS: dict[str, Callable[..., Any]] = {"blocking": DictTier, "async": AsyncDictTier}


class TestAsyncTier(TierConformance):
    wait_s = 2 * PATIENCE_S

    @pytest.fixture
    def open_tier(self) -> OpenTier:
        return lambda spec, view: AsyncDictTier(spec, view, "async-dict", lookup_timeout_s=PATIENCE_S)


@pytest.fixture(params=KINDS)
def stage(make_stage: MakeStage, request: pytest.FixtureRequest) -> Stage:
    return make_stage(KINDS[request.param])


def test_a_lookup_has_its_own_deadline_and_not_that_of_the_job_before_it(stage: Stage) -> None:
    left_s: dict[str, float] = {}
    stage.tier.before = lambda operation, keys: left_s.update({operation: stage.tier.part_deadline - time.monotonic()})
    stage.rig.wait([stage.rig.submit_store(make_keys(1), deadline=time.monotonic() + 1000.0)])
    assert stage.rig.lookup(make_keys(1)[0])
    assert left_s["store"] > PATIENCE_S
    assert 0.0 < left_s["lookup"] <= PATIENCE_S


@pytest.mark.parametrize("kind", KINDS)
def test_loads_that_never_end_leave_stores_a_share_and_stores_leave_loads_theirs(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(jobs, "PATIENCE_S", 0.0)
    one_at_a_time: dict[str, Any] = {"blocking": {"threads": 1}, "async": {"blocks_in_flight_max": 2}}[kind]
    stage = make_stage(KINDS[kind], **one_at_a_time)
    stage.rig.wait([stage.rig.submit_store(make_keys(2, str(number))) for number in range(20)])
    stage.hold()
    queued = [stage.rig.submit_load(make_keys(2, "0"))]
    wait_until(lambda: stage.tier.started[-1] == "load")
    begun = len(stage.tier.started)
    queued += [stage.rig.submit_load(make_keys(2, str(number))) for number in range(20)]
    queued += [stage.rig.submit_store(make_keys(2, f"new {number}")) for number in range(4)]
    stage.gate.set()
    assert all(result.success for result in stage.rig.wait(queued))
    order = [operation for operation, keys in stage.tier.parts[begun:] if operation != "lookup"]
    stores = [place for place, operation in enumerate(order) if operation == "store"]
    assert len(stores) == 4
    loads_between = np.diff([-1, *stores]) - 1
    assert (loads_between <= jobs.LOADS_A_STORE).all()
    assert (loads_between[1:] >= jobs.LOADS_A_STORE - 1).all(), "a call may have served loads of several jobs"


def test_a_result_says_when_its_job_ended(stage: Stage) -> None:
    began_s = time.monotonic()
    (result,) = stage.rig.wait([stage.rig.submit_store(make_keys(1))])
    assert result.ended_s is not None
    assert began_s <= result.ended_s <= time.monotonic()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("author's bug"), "error"),
        (OSError(errno.ENOSPC, "full"), "no_space"),
        (OSError(errno.EIO, "broken"), "io_error"),
        (TimeoutError(), "timeout"),
        (TierUnavailableError("down"), "unavailable"),
        (SystemExit(), "error"),
    ],
)
def test_an_exception_fails_the_part_and_the_tier_works_on(stage: Stage, error: BaseException, reason: str) -> None:
    keys = make_keys(6)

    def fail_second_part(operation: str, part: Sequence[OffloadKey]) -> None:
        if keys[2] in part:
            raise error

    stage.tier.before = fail_second_part
    result = stage.rig.store(keys)
    assert (result.success, result.reason) == (False, reason)
    assert list(result.successful_keys or ()) == [*keys[:2], *keys[4:]]
    stage.tier.before = lambda *_: None
    assert stage.rig.store(keys).success


@pytest.mark.parametrize(
    "returned",
    [
        None,
        True,
        [],
        [True, True],
        {"a": True},
        Outcome(make_keys(1, "other")),
        Outcome(42),  # type: ignore[arg-type]
        Outcome([{}]),  # type: ignore[list-item]
        "n",
        ["no"],
        Outcome(dict.fromkeys(make_keys(1), False)),
    ],
)
def test_wrong_outcomes_are_failures_and_wrong_answers_misses(stage: Stage, returned: object) -> None:
    stage.tier.returned = returned
    assert stage.rig.load(make_keys(1)) == set()
    assert stage.rig.lookup(make_keys(1)[0]) is False


def test_a_lookup_knows_the_request_of_each_key(stage: Stage) -> None:
    req_ids: list[str] = []
    stage.tier.before = lambda operation, keys: req_ids.extend(stage.tier.probe_req_ids)
    assert stage.rig.lookup(make_keys(1)[0], ReqContext("a request")) is False
    assert set(req_ids) == {"a request"}


def test_a_failed_load_corrects_the_answer(stage: Stage) -> None:
    (key,) = make_keys(1)
    stage.rig.store([key])
    request = ReqContext("request")
    assert stage.rig.lookup(key, request)
    stage.tier.kept.clear()
    stage.rig.wait([stage.rig.submit_load([key], request=request)])
    assert stage.tier.lookup(key, request) is False


def test_a_job_of_an_earlier_epoch_is_void(stage: Stage) -> None:
    epochs: list[int] = []

    def note_epoch(operation: str, keys: Sequence[OffloadKey]) -> object:
        epochs.append(stage.tier.part_epoch)
        return stage.wait()

    stage.rig.store(make_keys(1, "first"))
    stage.tier.before = note_epoch
    job = stage.rig.submit_store(make_keys(1))
    wait_until(lambda: epochs)
    stage.tier.begin_epoch()
    stage.gate.set()
    (result,) = stage.rig.wait([job])
    assert (result.success, result.reason, len(result.successful_keys or ())) == (False, "reset", 0)
    assert stage.rig.store(make_keys(1, "later")).success
    assert epochs == [0, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_shutdown_leaves_behind_what_cannot_be_ended_and_closes_when_it_ends(make_stage: MakeStage, kind: str) -> None:
    stage = make_stage(KINDS[kind], shutdown_timeout_s=0.1)
    stage.rig.store(make_keys(1))
    is_blocked = threading.Event()

    def block(operation: str, keys: Sequence[OffloadKey]) -> None:
        is_blocked.set()
        stage.gate.wait(PATIENCE_S)  # which holds the event loop, too

    stage.tier.before = block
    stage.rig.submit_load(make_keys(1))
    assert is_blocked.wait(PATIENCE_S)
    before = time.monotonic()
    stage.tier.shutdown()
    assert time.monotonic() - before < PATIENCE_S / 2
    assert not stage.tier.closed.is_set()
    stage.gate.set()
    assert stage.tier.closed.wait(PATIENCE_S)
    assert stage.rig.store(make_keys(2)).reason == "shutdown"


def test_a_tier_that_was_never_used_is_closed(stage: Stage) -> None:
    stage.tier.shutdown()
    assert stage.tier.closed.is_set() or isinstance(stage.tier, AsyncDictTier), "whose client was never opened"


def test_only_the_first_error_of_a_kind_is_logged_and_without_its_text(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(operation: str, keys: Sequence[OffloadKey]) -> None:
        if operation == "store":
            raise ConnectionError("redis://user:hunter2@host refused")

    stage.tier.before = fail
    assert stage.rig.store(make_keys(8)).reason == "io_error"
    (record,) = caplog.records
    assert "store_blocks raised ConnectionError" in record.getMessage()
    assert "hunter2" not in record.getMessage()


def test_what_cannot_work_is_refused() -> None:
    flat = memoryview(bytearray(2 * BLOCK_BYTES))
    view = flat.cast("B", (2, BLOCK_BYTES))
    with pytest.raises(ValueError, match="num_blocks, block_bytes"):
        DictTier(None, flat, "dict")
    with pytest.raises(ValueError, match="at least 1"):
        DictTier(None, view, "dict", threads=0)
    with pytest.raises(ValueError, match="at least 1"):
        AsyncDictTier(None, view, "dict", blocks_in_flight_max=0)


NUM_BLOCKS = 16


def opening_memory(path: Path) -> OpenTier:
    return lambda spec, view: MemoryTier(spec, view, "memory", MemorySettings.model_validate({"capacity": "1MiB"}))


def opening_fs(path: Path) -> OpenTier:
    settings = FsSettings.model_validate({"path": str(path / "kv"), "capacity": "1MiB"})
    return lambda spec, view: FsTier(spec, view, "fs", settings)


@pytest.fixture(params=[opening_memory, opening_fs], ids=["memory", "fs"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TierRig]:
    opening: Callable[[Path], OpenTier] = request.param
    rig = TierRig(opening(tmp_path), num_blocks=NUM_BLOCKS, block_bytes=4096, wait_s=20.0)
    yield rig
    rig.close()


@pytest.mark.parametrize("rows", [(0, NUM_BLOCKS), (-1, 0), (2, 2), (0, 1, 2), (), ((0,), (1,))], ids=str)
def test_a_load_into_other_rows_is_refused_and_keeps_the_blocks(
    rig: TierRig, rows: tuple[object, ...], caplog: pytest.LogCaptureFixture
) -> None:
    keys = make_keys(2)
    assert rig.store(keys).success
    before = rig._region.array.copy()
    for number in range(2):
        result = submitted(rig, rows, number, is_promotion=True)
        assert not result.success
        assert result.reason == "no_row"
    assert np.array_equal(rig._region.array, before)
    assert rig.load(keys) == set(keys)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert f"0 to {NUM_BLOCKS - 1}" in errors[0].message


@pytest.mark.parametrize("rows", [(0, NUM_BLOCKS), (-1, 0), (0,)], ids=str)
def test_a_store_out_of_other_rows_stores_nothing(rig: TierRig, rows: tuple[int, ...]) -> None:
    result = submitted(rig, rows, 0, is_promotion=False)
    assert not result.success
    assert not result.successful_keys
    assert [rig.lookup(key) for key in make_keys(2)] == [False, False]
    assert rig.store(make_keys(2)).success


def submitted(rig: TierRig, rows: tuple[object, ...], number: int, *, is_promotion: bool) -> JobResult:
    """Return the result of a job of two blocks."""
    job = JobMetadata(1000 + number, make_keys(2), np.array(rows, np.int64), is_promotion, ReqContext("r"))
    (rig.tier.submit_load if is_promotion else rig.tier.submit_store)(job)
    results: list[JobResult] = []

    def is_reported() -> bool:
        results.extend(rig.tier.get_finished())
        return bool(results)

    wait_until(is_reported, rig.wait_s)
    return results[0]
