"""A tier whose opening hangs ends the opening of its stack in time; one that is not required comes in later."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hanging import HangingMount, impatient_mount
from tests.support.stacks import PATIENT, stack_of
from tests.support.tenants import BLOCK_BYTES, Tenant
from tiered_kv import DirectTiers, Namespace, open_stack
from tiered_kv.errors import ConfigError, TierUnavailableError
from tiered_kv.stack.open import Stack
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import make_keys

WAIT_S = 60.0
of_each_kind = pytest.mark.parametrize("kind", ["nvme", "fs"])


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingMount]:
    with impatient_mount(tmp_path / "mount", monkeypatch) as mount:
        yield mount


def stack(kind: str, mount: HangingMount, **settings: object) -> dict[str, object]:
    return stack_of(entry(kind, mount, **settings), block_bytes=BLOCK_BYTES)


def entry(kind: str, mount: HangingMount, **settings: object) -> dict[str, object]:
    return {
        "type": kind,
        "path": f"{mount.path}/kv",
        "capacity": 64 << 20,
        "breaker_cooldown": 0.01,
        **PATIENT,
        **settings,
    }


def tenants(folder: Path, mount: HangingMount, kind: str, **settings: object) -> tuple[Tenant, Tenant]:
    """Return a tenant whose tier is not required, and the same one with a tier that is."""
    late, now = (Tenant("alice", folder, entry(kind, mount, required=each, **settings)) for each in (False, True))
    return late, now


def put_until_stored(alice: Tenant, opened: Stack) -> None:
    """Store new blocks until the tier takes one."""
    numbers = itertools.count(100)
    wait_until(lambda: alice.put(opened, alice.keys(1, next(numbers))), WAIT_S)


@of_each_kind
@pytest.mark.parametrize("is_new", [True, False])
def test_an_opening_that_hangs_at_a_call_ends_in_its_time_and_leaves_nothing(
    mount: HangingMount, kind: str, is_new: bool
) -> None:
    """Of the calls a few; `tests/trust/test_hanging_openings.py` tries all."""
    mount.thread = "-open"
    if not is_new:
        open_stack(stack(kind, mount)).close()
    mount.calls = 0
    open_stack(stack(kind, mount, path=f"{mount.path}/{'other' if is_new else 'kv'}")).close()
    calls = mount.calls
    assert calls > 10
    threads = threading.active_count()
    for number in range(0, calls, 9):
        mount.hang(number)
        place = f"{mount.path}/{number if is_new else 'kv'}"
        hangs, said = mount.hangs, ""
        try:
            open_stack(stack(kind, mount, path=place, open_timeout=0.05)).close()
        except TierUnavailableError as error:
            said = str(error)
        is_told = f"no answer in 0.05 s from {place}; a mount or a device may hang" in said
        assert is_told or (not said and mount.hangs == hangs)  # this opening made fewer calls
        mount.answer()
        wait_until(lambda: threading.active_count() == threads, WAIT_S)  # what it opened too late is closed
        open_stack(stack(kind, mount, path=place)).close()


@of_each_kind
def test_a_stack_opens_without_a_tier_that_is_not_required_and_takes_it_in_when_it_answers(
    mount: HangingMount, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    alice, patient = tenants(tmp_path, mount, kind, name="late")
    assert patient.store(8) == 8
    mount.hang()
    with open_stack(alice.file) as opened:
        assert any("tier 'late': not in use until it can be opened" in text for text in caplog.messages)
        assert alice.wrong(opened, alice.keys(8)) == (0, 0)
        assert alice.put(opened, alice.keys(8, 20)) == 0
        mount.answer()
        put_until_stored(alice, opened)
        assert any("tier 'late': opened, and in use from now on" in text for text in caplog.messages)
        assert alice.wrong(opened, alice.keys(8)) == (8, 0)
    assert patient.load(8) == (8, 0)


@of_each_kind
def test_a_reset_before_the_tier_comes_in_holds_for_its_blocks(mount: HangingMount, tmp_path: Path, kind: str) -> None:
    alice, patient = tenants(tmp_path, mount, kind)
    assert patient.store(8) == 8
    mount.hang()
    with open_stack(alice.file) as opened:
        opened.reset_cache()
        mount.answer()
        put_until_stored(alice, opened)
        assert alice.wrong(opened, alice.keys(8)) == (0, 0)
    assert patient.load(8) == (0, 0)


def test_a_directory_that_another_stack_uses_comes_in_when_it_is_free(mount: HangingMount, tmp_path: Path) -> None:
    alice, patient = tenants(tmp_path, mount, "nvme")
    with open_stack(patient.file) as first, open_stack(alice.file) as second:
        assert alice.put(first, alice.keys(4)) == 4
        assert alice.put(second, alice.keys(4)) == 0
        first.close()
        put_until_stored(alice, second)
        assert alice.wrong(second, alice.keys(4)) == (4, 0)


def test_wrong_settings_are_an_error_though_the_tier_is_not_required(mount: HangingMount) -> None:
    with pytest.raises(ConfigError, match="too small"):
        open_stack(stack("nvme", mount, required=False, capacity=1 << 10))


@of_each_kind
def test_a_stack_closes_while_a_tier_still_hangs_and_what_opens_too_late_is_closed(
    mount: HangingMount, kind: str
) -> None:
    threads = threading.active_count()
    mount.hang()
    memory = memoryview(bytearray(4 * BLOCK_BYTES))
    late = entry(kind, mount, required=False)
    tiers = DirectTiers(memory, block_bytes=BLOCK_BYTES, tiers=[late], namespace=Namespace(model="m"))
    keys = make_keys(2)
    assert tiers.wait("store", keys, [0, BLOCK_BYTES], timeout_s=WAIT_S) == [False, False]
    assert tiers.wait("load", keys, [0, BLOCK_BYTES], timeout_s=WAIT_S) == [False, False]
    assert tiers.close(WAIT_S)
    mount.answer()
    wait_until(lambda: threading.active_count() == threads, WAIT_S)
    now = {**late, "required": True}
    assert DirectTiers(memory, block_bytes=BLOCK_BYTES, tiers=[now], namespace=Namespace(model="m")).close(WAIT_S)
