"""A directory of the nvme tier with one segment, damaged and opened again, and what each damage may cost."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.entries import rig_of
from tests.support.figures import Figures
from tests.support.segment_map import PAGE_BYTES, Part, SegmentMap, Stretch
from tiered_kv.base import OffloadKey
from tiered_kv.counters import count_of
from tiered_kv.testing.rig import TierRig, block_content, compressible_content, make_keys

ROW = "corruption/nvme"
BLOCK_BYTES = 4096
KEYS = make_keys(12)
CODECS = {"raw": block_content, "zstd": compressible_content}
SEGMENT_NAME = "segment-00010203-000000.kv"


@dataclass(frozen=True)
class Case:
    """A damage to a segment file, and what it may cost.

    Args:
        name: Which one it is.
        data: The file afterwards.
        left: The blocks that must load afterwards.
        claimed: Of the blocks that are lost, those that are found first, so that their loss is counted.
        is_discarded: Whether the file as a whole is of no use.
    """

    name: str
    data: bytes
    left: frozenset[OffloadKey]
    claimed: frozenset[OffloadKey] = frozenset()
    is_discarded: bool = False


@dataclass
class SegmentBench:
    """A directory with one segment of three batches, made by a tier that was closed; opened again for each case."""

    path: Path
    pristine: Path
    codec: str
    tried: int = 0
    failures: dict[str, str] = field(default_factory=dict)

    def open(self) -> TierRig:
        """Open the tier on the directory as it is."""
        entry = {"type": "nvme", "path": str(self.path), "capacity": "1MiB", "segment": "96KiB", "threads": 2}
        return rig_of(
            {**entry, "codec": self.codec}, block_bytes=BLOCK_BYTES, num_blocks=64, content=CODECS[self.codec]
        )

    def fill(self) -> None:
        """Store `KEYS` in three batches, close the tier, and keep a copy."""
        with closing(self.open()) as rig:
            for start in range(0, len(KEYS), 4):
                assert rig.store(KEYS[start : start + 4]).success
        for path in self.path.glob("segment-*.kv"):
            if path.name != SEGMENT_NAME:
                path.unlink()  # made ahead of time, and empty
        shutil.copytree(self.path, self.pristine)

    def segment(self, *, clean: bool) -> bytes:
        """Return the segment as it was closed, or as a crash before its end would have left it."""
        data = (self.pristine / SEGMENT_NAME).read_bytes()
        return data if clean else data[:-PAGE_BYTES] + bytes(PAGE_BYTES)

    def place(self, data: bytes) -> None:
        """Make the directory what it was, but for the segment."""
        shutil.rmtree(self.path)
        shutil.copytree(self.pristine, self.path)
        (self.path / SEGMENT_NAME).write_bytes(data)

    def try_reopening(self, case: Case) -> None:
        """Open the damaged directory, and note what does not hold."""
        self.tried += 1
        self.place(case.data)
        try:
            why = self._reopened(case)
        except Exception as error:  # none may come out of an opening, whatever it finds
            why = f"{type(error).__name__}: {error}"
        if why:
            self.failures[case.name] = why

    def _reopened(self, case: Case) -> str:
        with closing(self.open()) as rig:
            found = {key for key, here in zip(KEYS, rig.lookup_all(KEYS), strict=True) if here}
            loaded = rig.load(KEYS)  # checks the bytes
            stats = rig.tier.stats()
            offered = {key for key, here in zip(KEYS, rig.lookup_all(KEYS), strict=True) if here}
            healed = rig.store(KEYS).success and rig.load(KEYS) == set(KEYS)
        corrupt = count_of(stats, "corrupt_blocks_total")
        checks = {
            "blocks that were found and not loaded are not counted": corrupt == len(found - loaded),
            "a block is loaded that was not found": loaded <= found,
            "what failed to load is offered again": offered == loaded,
            "a new store does not make everything good again": healed,
            "a file of no use is not counted as discarded": stats["discarded_segments_total"] == int(case.is_discarded),
            f"{len(loaded)} blocks are left, and not {len(case.left)}": loaded == case.left,
            f"{len(found - loaded)} were claimed, and not {len(case.claimed)}": found - loaded == case.claimed,
        }
        return "; ".join(why for why, holds in checks.items() if not holds)

    def report(self, figures: Figures, note: str) -> None:
        """Add the cases to the table of figures, and fail if one did not hold."""
        figures.add(ROW, self.tried, self.tried - len(self.failures), note)
        assert not self.failures, "\n".join(
            f"{self.codec}: {name}: {why}" for name, why in list(self.failures.items())[:20]
        )


def cost(found: SegmentMap, hit: Stretch, *, clean: bool) -> tuple[frozenset[OffloadKey], frozenset[OffloadKey]]:
    """Return the blocks that are left when one byte of a stretch is another, and those that are claimed and lost."""
    everything = frozenset(KEYS)
    if hit.part is Part.HEADER:
        return frozenset(), frozenset()
    if hit.part is Part.PAYLOAD and clean:  # the summary answers for the batch, so nobody looks before it is loaded
        return everything - {hit.key}, frozenset({hit.key})
    if hit.part in (Part.PAYLOAD, Part.BATCH_HEADER) and not clean:  # a batch that is not whole ends its segment
        before = found.batches[: hit.batch]
        return frozenset(key for batch in before for key, _, _ in batch.entries), frozenset()
    return everything, frozenset()
