"""A mount hangs at each call of a tier's opening: the opening ends in its time, and the tier is right once it answers.

A tier that is required is named in the error, and opens when it is tried again. Without one that is not required the
stack opens, misses, and takes the tier in as soon as the mount answers.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.figures import Figures, Profile
from tests.support.hanging import HangingMount, impatient_mount
from tests.support.tenants import Tenant
from tiered_kv import open_stack
from tiered_kv.errors import TierUnavailableError
from tiered_kv.testing.control import wait_until

pytestmark = [pytest.mark.trust, pytest.mark.slow]

STEPS = (12, 1)
"""Every how many of an opening's calls the short and the full profile take."""
WAIT_S = 60.0
BLOCKS = 8


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingMount]:
    with impatient_mount(tmp_path / "mount", monkeypatch) as mount:
        mount.thread = "-open"
        yield mount


@pytest.mark.parametrize("required", [True, False], ids=["required", "not-required"])
@pytest.mark.parametrize("is_new", [True, False], ids=["new", "old"])
@pytest.mark.parametrize("kind", ["nvme", "fs"])
def test_at_whichever_call_an_opening_hangs_it_ends_in_time_and_the_tier_is_right_later(
    kind: str, is_new: bool, required: bool, mount: HangingMount, tmp_path: Path, profile: Profile, figures: Figures
) -> None:
    def tenant(place: object, **settings: object) -> Tenant:
        entry = {"type": kind, "path": f"{mount.path}/{place}", "capacity": 64 << 20, "breaker_cooldown": 0.01}
        return Tenant("alice", tmp_path, {**entry, **settings})

    if not is_new:
        assert tenant("old").store(BLOCKS) == BLOCKS
    mount.calls = 0
    open_stack(tenant("other" if is_new else "old").file).close()
    calls = mount.calls
    assert calls > 10
    tried = 0
    for number in range(0, calls, profile.pick(*STEPS)):
        place = number if is_new else "old"
        late = tenant(place, required=required, **({"open_timeout": 0.05} if required else {}))
        hung = hangs_at(mount, number, late, tenant(place), old_blocks=0 if is_new else BLOCKS)
        tried += hung  # one opening may make fewer calls than another
    figures.add("hanging-openings", tried, tried)
    assert tried > calls // profile.pick(*STEPS) // 2


def hangs_at(mount: HangingMount, number: int, late: Tenant, patient: Tenant, old_blocks: int) -> bool:
    """Open a tenant's stack while its tier hangs at a call; return whether that call was made."""
    threads, hangs = threading.active_count(), mount.hangs
    mount.hang(number)
    said = ""
    with ExitStack() as closing:
        try:
            opened = closing.enter_context(open_stack(late.file))
        except TierUnavailableError as error:
            said = str(error)
        else:
            if mount.hangs > hangs:
                assert late.wrong(opened, late.keys(old_blocks)) == (0, 0), "a block of a tier that is not open"
                assert not late.put(opened, late.keys(1, 100))
            mount.answer()
            numbers = itertools.count(1000)
            wait_until(lambda: late.put(opened, late.keys(1, next(numbers))), WAIT_S)
            assert late.wrong(opened, late.keys(old_blocks)) == (old_blocks, 0)
    hung = mount.hangs > hangs
    assert not said or f"no answer in 0.05 s from {late.path}; a mount or a device may hang" in said
    mount.answer()
    wait_until(lambda: threading.active_count() == threads, WAIT_S)  # what was opened too late is closed
    assert patient.load(max(1, old_blocks)) == (old_blocks, 0)
    assert patient.store(1, 2000 + number) == 1
    return hung
