"""Block records damaged in a tier's storage: each is a counted miss, and never wrong bytes.

Each damage changes one stored block. The block must then be a counted miss, not be offered again, leave its neighbours
alone, and load after the next store. Every other batch of damages happens before the tier is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from tests.support.damage import RECORD_FIELDS, Damage, Kind, record_damages, seal_record
from tests.support.doors import Door
from tests.support.figures import Figures, Profile
from tests.support.places import Place, PlaceOf
from tiered_kv.base import OffloadKey
from tiered_kv.metrics.counters import count_of
from tiered_kv.testing.rig import TierRig, block_content, compressible_content, make_keys
from tiered_kv.tiering.base import TierSpec

pytestmark = [pytest.mark.trust, pytest.mark.slow, pytest.mark.usefixtures("patient_nvme")]

BATCH = 24
NEIGHBOURS = 4
PARTS = 3
"""So that no test takes minutes in the full profile."""
SPEC = TierSpec("corruption", 4096, bytes(range(16)), {"model": "corruption"})
OTHER_NAMESPACE = bytes(range(1, 17))
CODECS = {"raw": block_content, "zstd": compressible_content}
CORRUPT = ("corrupt_blocks_total",)
UNREADABLE = {
    "memory": CORRUPT,
    "fs": ("unreadable_blocks_total",),
    "redis": ("failed_blocks_total", "load", "unknown_codec"),
    "s3": ("unreadable_blocks_total",),
}
"""The name and labels of what counts sound records of an unknown codec; by the tier's type."""
TIERS = tuple(UNREADABLE)


@dataclass
class Bench:
    """A tier, a door to its stored blocks, and the cases that were tried and that failed."""

    place: Place
    rig: TierRig
    door: Door
    tried: int = 0
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return self.place.kind

    def counted(self, path: tuple[str, ...] = CORRUPT) -> int:
        return count_of(self.rig.tier.stats(), *path)

    def blame(self, case: str, why: str) -> None:
        self.failures.setdefault(case, why)

    def add_to(self, figures: Figures, note: str) -> None:
        figures.add(f"corruption/{self.kind}", self.tried, self.tried - len(self.failures), note)
        assert not self.failures, (
            "\n".join(f"{self.kind}: {case}: {why}" for case, why in list(self.failures.items())[:20])
            + "\n(the damages are named in tests.support.damage; the same ones come in every run)"
        )


Opened = Callable[[str, str], Bench]
"""Opens a tier of a kind, with a codec, on new storage."""


@pytest.fixture
def opened(place_of: PlaceOf) -> Opened:
    def open_bench(kind: str, codec: str) -> Bench:
        place = place_of(kind)
        rig = place.open(SPEC, CODECS[codec], codec=codec)
        return Bench(place, rig, place.door(rig))

    return open_bench


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("tier", TIERS)
def test_a_damaged_record_is_a_counted_miss_and_is_stored_again(
    opened: Opened, tier: str, codec: str, part: int, profile: Profile, figures: Figures
) -> None:
    bench = opened(tier, codec)
    damages = [*record_damages(full=profile is Profile.FULL), *replays(bench, codec)]
    if tier == "s3":  # half of them with each codec: ten requests a damage take their time
        damages = damages[list(CODECS).index(codec) :: 2]
    damages = damages[part::PARTS]
    try:
        for number, start in enumerate(range(0, len(damages), BATCH)):
            batch = damages[start : start + BATCH]
            _try_batch(bench, batch, f"batch {number}", reopens=tier != "memory" and number % 2 == part % 2)
    finally:
        bench.add_to(figures, "raw and zstd records")


def replays(bench: Bench, codec: str) -> list[Damage]:
    """Return damages that put another sound record in a block's place."""
    other, third = make_keys(2, "another block")
    bench.rig.store([other, third])
    others, foreign = bench.door.read(other), bench.door.read(third)
    assert others is not None
    assert foreign is not None

    def of_namespace(data: bytes) -> bytes:
        """Return the block's own record, sound, as another namespace has it."""
        digest = next(each for each in RECORD_FIELDS if each.name == "namespace digest")
        return seal_record(digest.written(data, int.from_bytes(OTHER_NAMESPACE, "little")))

    return [
        Damage("another block's record", lambda _: others),
        Damage("another block's header", lambda data: others[:128] + data[128:]),
        Damage("another block's payload", lambda data: data[:128] + others[128:]),
        Damage("the record of a third block", lambda _: foreign),
        Damage("its record in another namespace", of_namespace),
        Damage("another block's record, cut", lambda _: others[:-1]),
    ]


def _try_batch(bench: Bench, batch: Sequence[Damage], label: str, *, reopens: bool) -> None:
    """Try one damage a block, all at once, with undamaged neighbours among them."""
    rig = bench.rig
    keys, neighbours = make_keys(len(batch), label), make_keys(NEIGHBOURS, f"{label}, neighbours")
    assert rig.store([*keys, *neighbours]).success
    victims: dict[OffloadKey, Damage] = {}
    for key, damage in zip(keys, batch, strict=True):
        data = bench.door.read(key)
        assert data is not None
        damaged = damage.apply(data)
        if damaged == data:
            continue  # such as a zero set to zero
        bench.door.write(key, damaged)
        assert bench.door.read(key) == damaged, "the damage did not happen"
        victims[key] = damage
    bench.tried += len(victims)
    if reopens:
        rig.reopen()
    try:
        _check_misses(bench, victims)
        _check_healing(bench, victims)
        loaded = rig.load(neighbours) | rig.load(neighbours)  # a value that is too long costs redis a connection
        missing = [key for key in neighbours if key not in loaded]
    except AssertionError as error:  # the rig's own: wrong bytes, a job without an end
        for damage in victims.values():
            bench.blame(damage.name, f"with its batch: {error}")
        return
    if missing:
        bench.blame(batch[0].name, f"or one of its batch: {len(missing)} undamaged neighbours do not load")


def _check_misses(bench: Bench, victims: dict[OffloadKey, Damage]) -> None:
    """Load every victim in a separate job: none may load, each is counted once."""
    rig = bench.rig
    for group, counters in (
        ({k: d for k, d in victims.items() if d.kind is Kind.BROKEN}, CORRUPT),
        ({k: d for k, d in victims.items() if d.kind is Kind.UNREADABLE}, UNREADABLE[bench.kind]),
    ):
        before = bench.counted(counters)
        for key, result in zip(group, rig.wait([rig.submit_load([key]) for key in group]), strict=True):
            if rig.succeeded(result):
                bench.blame(group[key].name, "it was loaded")
        counted = bench.counted(counters) - before
        if counted != len(group):
            names = ", ".join(damage.name for damage in group.values())
            bench.blame(names, f"{counted} of {len(group)} were counted as {counters}")
    for key, offered in zip(victims, rig.lookup_all(list(victims)), strict=True):
        if offered:
            bench.blame(victims[key].name, "it is offered again")
        if bench.kind != "memory" and victims[key].kind is Kind.UNREADABLE and bench.door.read(key) is None:
            bench.blame(victims[key].name, "it is gone, and others could have read it")


def _check_healing(bench: Bench, victims: dict[OffloadKey, Damage]) -> None:
    """Store the victims again: all are good then."""
    keys = list(victims)
    if not keys:
        return
    stored = bench.rig.store(keys).success
    loaded = bench.rig.load(keys)
    for key, damage in victims.items():
        if not stored or key not in loaded:
            bench.blame(damage.name, "it is not good again after the next store")


@pytest.mark.parametrize("tier", [tier for tier in TIERS if tier != "memory"])
def test_storage_from_before_a_reset_may_be_put_back(opened: Opened, tier: str, figures: Figures) -> None:
    """An older version of the storage comes back beside the new one, by a restored backup or a slow replica."""
    bench = opened(tier, "raw")
    keys = make_keys(8, "before")
    assert bench.rig.store(keys).success
    old = bench.place.stored()
    assert bench.rig.tier.reset_cache()
    bench.rig.epoch = 1
    assert bench.rig.store(keys[:4]).success
    now = bench.place.stored()
    gone = {name: data for name, data in old.items() if name not in now}
    bench.place.restore(gone)
    offered = [bench.rig.lookup_all(keys)]
    loaded = [bench.rig.load(keys)]
    bench.rig.reopen()
    offered.append(bench.rig.lookup_all(keys))
    loaded.append(bench.rig.load(keys))
    expected = [[True] * 4 + [False] * 4] * 2, [set(keys[:4])] * 2
    figures.add(f"corruption/{tier}", 1, int((offered, loaded) == expected))
    assert (offered, loaded) == expected
