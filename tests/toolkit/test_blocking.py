"""Tiers that use blocking calls: threads, parts and deadlines."""

from __future__ import annotations

import errno
import importlib
import itertools
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.support.pages import write_shown
from tests.support.shortages import Resource, Shortage, outage
from tests.support.stacks import stack_of
from tests.toolkit.conftest import PATIENCE_S, DictTier, MakeStage
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.config.hooks import tier_plugins
from tiered_kv.stack.exporters.metrics import StackCollector, exposition
from tiered_kv.stack.open import open_stack
from tiered_kv.system import step
from tiered_kv.system.step import IDLE_WAIT_S_MAX, Step
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit import Outcome, blocking, concurrency
from tiered_kv.toolkit.blocking import BUSY_WAIT_S_MAX


def test_a_large_job_is_served_in_parts_by_several_threads_and_reported_once(make_stage: MakeStage) -> None:
    stage = make_stage(DictTier, threads=4, part_blocks=4)
    assert stage.rig.store(make_keys(16)).success
    assert stage.tier.parts == [("store", 4)] * 4
    barrier = threading.Barrier(4)
    stage.tier.before = lambda operation, keys: barrier.wait(PATIENCE_S)
    assert stage.rig.wait([stage.rig.submit_load(make_keys(16))])[0].success
    assert stage.tier.parts[4:] == [("load", 4)] * 4
    assert stage.tier.get_finished() == ()


def test_a_store_is_served_in_parts_of_the_least_size_for_stores(make_stage: MakeStage) -> None:
    stage = make_stage(DictTier, threads=4, part_blocks=4, store_part_blocks_min=12)
    assert stage.rig.store(make_keys(16)).success
    assert sorted(stage.tier.parts) == [("store", 4), ("store", 12)]
    assert stage.rig.wait([stage.rig.submit_load(make_keys(16))])[0].success
    assert stage.tier.parts[2:] == [("load", 4)] * 4


def test_small_jobs_that_wait_are_served_by_one_call_and_end_one_by_one(make_stage: MakeStage) -> None:
    stage = make_stage(DictTier, threads=2, part_blocks=4)
    stage.hold()
    jobs = [stage.rig.submit_store(make_keys(1, "first"))]
    wait_until(lambda: stage.tier.parts)
    jobs += [stage.rig.submit_store(make_keys(1, str(number))) for number in range(6)]
    stage.gate.set()
    assert all(result.success for result in stage.rig.wait(jobs))
    assert stage.tier.parts == [("store", 1), ("store", 4), ("store", 1), ("store", 1)], (
        "the last is for the other thread"
    )
    stage.gate.clear()
    loads = [stage.rig.submit_load(make_keys(1, name)) for name in ("first", "0")]  # one for each thread
    wait_until(lambda: stage.tier.started.count("load") == 2)
    loads += [stage.rig.submit_load(make_keys(1, name)) for name in ("1", "2", "absent", "3", "4")]
    stage.gate.set()
    assert [result.success for result in stage.rig.wait(loads)] == [True, True, True, True, False, True, True]
    assert len(stage.tier.parts) < 4 + len(loads)


def test_jobs_served_by_one_call_have_no_key_in_common_and_expire_one_by_one(make_stage: MakeStage) -> None:
    stage = make_stage(DictTier, threads=1, part_blocks=8)
    calls: list[list[OffloadKey]] = []

    def before(operation: str, keys: Sequence[OffloadKey]) -> None:
        calls.append(list(keys))
        stage.wait()

    stage.tier.before = before
    jobs = [stage.rig.submit_store(make_keys(1, "first"))]
    wait_until(lambda: calls)
    deadline = time.monotonic() + 0.01
    jobs += [stage.rig.submit_store(make_keys(1, "late"), deadline=deadline)]
    jobs += [stage.rig.submit_store(make_keys(2, "twice")) for _ in range(2)]
    jobs += [stage.rig.submit_store(make_keys(1, name)) for name in ("a", "b", "c")]
    wait_until(lambda: time.monotonic() > deadline)
    stage.gate.set()
    results = stage.rig.wait(jobs)
    assert [result.success for result in results] == [True, False, True, True, True, True, True]
    assert all(len(set(keys)) == len(keys) for keys in calls)
    assert make_keys(1, "late")[0] not in [key for keys in calls for key in keys]


def test_loads_go_before_stores_and_lookups_before_loads(make_stage: MakeStage) -> None:
    stage = make_stage(DictTier, threads=1)
    stage.hold()
    jobs = [stage.rig.submit_store(make_keys(1))]
    wait_until(lambda: stage.tier.parts)
    jobs += [stage.rig.submit_store(make_keys(1, "other")), stage.rig.submit_load(make_keys(1))]
    stage.tier.lookup(make_keys(1)[0], ReqContext("request"))
    stage.gate.set()
    stage.rig.wait(jobs)
    assert stage.tier.started == ["store", "lookup", "load", "store"]


def test_lookups_that_never_end_leave_the_only_thread_to_jobs_too(make_stage: MakeStage) -> None:
    stage = make_stage(DictTier, threads=1)
    numbers = itertools.count()

    def ask(operation: str, keys: Sequence[OffloadKey]) -> None:
        if operation == "lookup" and not stage.gate.is_set():  # the next lookup waits already when this one ends
            stage.tier.lookup(make_keys(1, f"endless {next(numbers)}")[0], ReqContext("endless"))

    stage.tier.before = ask
    ask("lookup", ())
    wait_until(lambda: stage.tier.started.count("lookup") > 2)
    job = stage.rig.submit_store(make_keys(1))
    assert stage.rig.wait([job])[0].success
    stage.gate.set()


def test_stores_that_hang_leave_a_thread_for_loads(make_stage: MakeStage) -> None:
    stage = make_stage(DictTier, threads=3, part_blocks=1)
    stage.rig.store(make_keys(1))
    stage.hold("store")
    store = stage.rig.submit_store(make_keys(8, "many"))
    assert stage.rig.load(make_keys(1)) == set(make_keys(1))
    assert not stage.gate.is_set()
    stage.gate.set()
    assert stage.rig.wait([store])[0].success


def test_a_store_that_hangs_does_not_stop_the_others(make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "STALL_S", 0.01)
    stage = make_stage(DictTier, threads=3, part_blocks=1)
    hanging = make_keys(1, "hangs")
    stage.tier.before = lambda operation, keys: stage.gate.wait(PATIENCE_S) if keys[0] == hanging[0] else None
    job = stage.rig.submit_store(hanging)
    wait_until(lambda: stage.tier.parts)
    time.sleep(0.02)
    for name in ("some", "more"):
        assert stage.rig.store(make_keys(8, name)).success
    stage.gate.set()
    assert stage.rig.wait([job])[0].success


def test_the_only_thread_of_a_tier_waits_for_no_idle_engine(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Step, "is_busy", lambda step: True)
    monkeypatch.setattr(blocking, "IDLE_WAIT_S_MAX", PATIENCE_S)
    stage = make_stage(DictTier, threads=1)
    jobs = [stage.rig.submit_store(make_keys(1)), stage.rig.submit_load(make_keys(1))]
    began_s = time.monotonic()
    stage.rig.wait(jobs)  # loads and lookups would wait behind the store
    assert time.monotonic() - began_s < PATIENCE_S


def test_stores_go_on_beside_an_engine_that_never_pauses(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience: list[float] = []

    def wait_for_idle() -> None:
        patience.append(step.IDLE_WAIT.left_s)
        step.IDLE_WAIT.left_s = 0.0

    monkeypatch.setattr(blocking, "wait_for_idle", wait_for_idle)
    stage = make_stage(DictTier, threads=2, part_blocks=1)
    assert stage.rig.store(make_keys(1)).success
    assert 0.0 < patience[0] <= IDLE_WAIT_S_MAX, "it is held back for a time"
    monkeypatch.setattr(blocking, "IDLE_WAIT_S_MAX", 0.0)  # from here on, as if that time were over
    assert stage.rig.store(make_keys(4, "others")).success
    assert len(patience) == 5
    assert 0.0 < min(patience[1:]) <= max(patience[1:]) <= BUSY_WAIT_S_MAX


def test_a_store_cannot_write_into_the_primary_blocks(make_stage: MakeStage) -> None:
    class Scribbler(DictTier):
        def store_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
            blocks[0][0] ^= 255
            return Outcome()

    stage = make_stage(Scribbler)
    assert not stage.rig.store(make_keys(1)).success
    stage.rig.check_region()


def test_queued_jobs_expire_though_every_thread_hangs(make_stage: MakeStage) -> None:
    stage = make_stage(DictTier, threads=2, part_blocks=1)
    stage.hold()
    hanging = stage.submit_load_that_begins(make_keys(4))
    now = time.monotonic()
    queued = [stage.rig.submit_load(make_keys(1), deadline=now + seconds) for seconds in (0.2, math.inf, -now, 0.1)]
    endless = queued.pop(1)
    assert [result.reason for result in stage.rig.wait(queued)] == ["expired"] * 3
    assert stage.rig.poll() == 2, "the hanging job is reported while a thread may write into its blocks"
    stage.gate.set()
    late, absent = stage.rig.wait([hanging, endless])
    assert [(late.success, late.reason), (absent.success, absent.reason)] == [(False, "expired"), (False, "absent")]
    assert len(stage.tier.parts) <= 3


def test_a_lookup_that_hangs_is_a_miss_and_the_next_is_served(make_stage: MakeStage) -> None:
    stage = make_stage(DictTier, threads=2, lookup_timeout_s=0.5)
    here, hangs = make_keys(2)
    stage.rig.store([here])
    stage.tier.before = lambda operation, keys: hangs not in keys or stage.gate.wait(PATIENCE_S)
    assert not stage.rig.lookup(hangs)
    assert stage.tier.lookup_failures == 1
    wait_until(lambda: stage.rig.lookup(here))


def test_a_thread_for_lookups_answers_while_every_other_thread_transfers(make_stage: MakeStage) -> None:
    stage = make_stage(DictTier, threads=2, part_blocks=1, lookup_thread=True)
    stage.hold("load")
    job = stage.rig.submit_load(make_keys(4))
    wait_until(lambda: len(stage.tier.parts) == 2)
    assert not stage.rig.lookup(make_keys(1)[0])
    assert stage.tier.started == ["load", "load", "lookup"], "a thread for lookups took a load"
    stage.gate.set()
    stage.rig.wait([job])


def test_shutdown_closes_once_and_reports_what_was_queued(make_stage: MakeStage) -> None:
    stage = make_stage(DictTier, threads=1, part_blocks=1)
    stage.hold()
    jobs = [stage.rig.submit_store(make_keys(1))]
    wait_until(lambda: stage.tier.parts)
    jobs.append(stage.rig.submit_store(make_keys(1, "other")))
    closing = threading.Thread(target=stage.tier.shutdown)
    closing.start()
    wait_until(lambda: stage.rig.poll() == 1)  # it has dropped what was queued
    stage.gate.set()
    closing.join()
    assert stage.tier.closed.is_set()
    assert [(each.success, each.reason) for each in stage.rig.wait(jobs)] == [(True, ""), (False, "shutdown")]
    stage.tier.shutdown()


def test_a_thread_that_meets_an_unexpected_error_serves_the_next_job(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stage = make_stage(DictTier, threads=1)
    with monkeypatch.context() as patch:
        patch.setattr(stage.tier, "_part_queue", None)
        stage.tier._work_tokens.put(True)
        stage.tier._start_thread()
        wait_until(lambda: caplog.records)
    assert "a worker raised AttributeError" in caplog.text
    assert stage.rig.store(make_keys(1)).success


def test_the_system_s_words_are_logged_once_and_those_of_a_library_never(
    make_stage: MakeStage, caplog: pytest.LogCaptureFixture
) -> None:
    class LibraryError(OSError):
        """One whose number may mean something else."""

    stage = make_stage(DictTier, threads=1)
    errors: list[OSError] = [*[OSError(errno.EIO, "a password")] * 2, LibraryError(errno.EACCES, "a password")]

    def fail(operation: str, keys: Sequence[OffloadKey]) -> None:
        raise errors.pop(0)

    stage.tier.before = fail
    for _ in range(3):
        assert not stage.rig.store(make_keys(1)).success
    told, other = caplog.messages
    assert f"raised OSError ({os.strerror(errno.EIO)}) at " in told
    assert "raised LibraryError at " in other
    assert "password" not in caplog.text


def test_a_passed_deadline_is_told_without_a_place_in_the_code(
    make_stage: MakeStage, caplog: pytest.LogCaptureFixture
) -> None:
    stage = make_stage(DictTier, threads=1)

    def fail(operation: str, keys: Sequence[OffloadKey]) -> None:
        raise TimeoutError("a password")

    stage.tier.before = fail
    assert not stage.rig.store(make_keys(1)).success
    (told,) = caplog.messages
    assert "store_blocks did not end before its deadline, counted as 'timeout'" in told
    assert ".py" not in told
    assert "password" not in told


@pytest.mark.parametrize("refused", [1, 2])
def test_threads_that_could_not_start_start_in_a_later_step(make_stage: MakeStage, refused: int) -> None:
    stage = make_stage(DictTier, threads=2, part_blocks=1)
    with Shortage(Resource.THREAD, refused) as shortage:
        job = stage.rig.submit_store(make_keys(1))
        wait_until(lambda: shortage.refused > 0)
    assert [result.success for result in stage.rig.wait([job])] == [True]
    stage.hold()
    loads = [stage.rig.submit_load([key]) for key in make_keys(2)]
    wait_until(lambda: stage.tier.started.count("load") == 2)
    stage.gate.set()
    stage.rig.wait(loads)


def test_a_tier_without_any_thread_is_closed_all_the_same(make_stage: MakeStage) -> None:
    stage = make_stage(DictTier, threads=2)
    with outage(Resource.THREAD):
        stage.tier.shutdown()
    assert stage.tier.closed.is_set()


# The code in docs/how-to/writing-a-tier.md works as it stands there.

ROOT = Path(__file__).parents[2]
PATIENCE = """
from tiered_kv.config.settings import TierSettings
from tiered_kv.testing.conformance import TierConformance

TierSettings.model_fields["lookup_timeout"].default = 60.0
TierSettings.model_rebuild(force=True)
TierConformance.wait_s = 120.0
"""
"""A conftest.py: on a machine that is slow for a second a lookup of the page's tier would be a miss."""


@pytest.fixture
def page_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write the files that the page shows, each under the name that stands above it, and make them importable."""
    names = write_shown("how-to/writing-a-tier.md", tmp_path)
    assert names == ["tiered_kv_folder.py", "stack.yaml", "test_folder.py", "tiered_kv_counting.py"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("tiered_kv_folder", "tiered_kv_counting"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_the_tier_on_the_page_passes_the_conformance_suite(page_files: Path) -> None:
    (page_files / "conftest.py").write_text(PATIENCE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "test_folder.py"]
    environment = {"PYTHONPATH": f"{ROOT}:{page_files}", "PATH": "/usr/bin:/bin", "TMPDIR": str(page_files)}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"\d\d passed", run.stdout), run.stdout


def test_the_stack_on_the_page_opens_and_its_blocks_outlive_it(page_files: Path) -> None:
    plugins = tier_plugins()
    plugins.register(importlib.import_module("tiered_kv_folder"), "folder-of-the-page")
    try:
        keys = [bytes([number]) * 16 for number in range(8)]
        blocks = np.random.default_rng(0).integers(0, 256, (8, 65536), dtype=np.uint8)
        with open_stack(page_files / "stack.yaml") as stack:
            assert stack.put(keys, blocks, timeout=60.0) == 8
            assert stack.flush(timeout=60.0)
        out = np.zeros_like(blocks)
        entries = yaml.safe_load((page_files / "stack.yaml").read_text())
        entries["secondary"][0]["lookup_timeout"] = "60s"  # so that no block is a miss because the machine is busy
        with open_stack(entries) as stack:
            assert stack.get(keys, out, timeout=60.0) == 8
        assert (out == blocks).all()
    finally:
        plugins.unregister("folder-of-the-page")


def test_the_metrics_on_the_page_are_exposed(page_files: Path) -> None:
    plugins = tier_plugins()
    plugins.register(importlib.import_module("tiered_kv_counting"), "counting-of-the-page")
    try:
        entry = {"type": "counting", "path": str(page_files / "kv"), "capacity": "20KiB", "store_budget": "1MiB"}
        blocks = np.zeros((16, 4096), np.uint8)
        with open_stack(stack_of(entry, blocks=64)) as stack:
            for first in range(0, 64, 16):
                stack.put([bytes([number]) * 16 for number in range(first, first + 16)], blocks, timeout=60.0)
                assert stack.flush(timeout=60.0)
            text = exposition(StackCollector(stack.counters)).decode()
            removed = stack.counters()["counting"]["tier"]["removed_files_total"]["room"]
        assert removed > 0
        assert f'tiered_kv_tier_removed_files_total{{cause="room",tier="counting"}} {removed}.0' in text
        assert "# HELP tiered_kv_tier_removed_files_total Files removed from the folder." in text
        assert 'tiered_kv_tier_blocks{tier="counting"}' in text
    finally:
        plugins.unregister("counting-of-the-page")
