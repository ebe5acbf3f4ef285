"""A backend that notices when somebody writes into a block that has been given back.

The quarantine of an expired job keeps its blocks out of use until its worker lets go of them. If a block is released
too early, the late worker writes into memory that is free, or that is somebody else's by then. The backend here fills
every block with a pattern at the moment it becomes free, and looks for the pattern when the block is given out again,
so the first kind shows at once. The second kind shows by content: give every key bytes of its own, and compare what is
loaded. A store that reads a block too late stores the pattern, or another key's bytes, and shows in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tiered_kv.backend import BlockStatus
from tiered_kv.base import OffloadKey
from tiered_kv.cpu.backend import CPUBackend, CPUBlock
from tiered_kv.cpu.region import PrimaryRegion

_PATTERN = b"\xfe\xedreleased\xde\xad block"
_VIOLATIONS_SHOWN = 20


class GuardedBackend(CPUBackend):
    """Hands out the rows of a region, and watches those that are free. Pass it to `Stack(config, backend=...)`.

    Owned by the manager's thread, like its base. Violations are noted and not raised; a test asserts that there are
    none.
    """

    def __init__(self, region: PrimaryRegion) -> None:
        super().__init__(region)
        self.released_blocks = 0
        self.violations: list[str] = []
        repeats = -(-region.block_bytes // len(_PATTERN))
        self.pattern: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(
            (_PATTERN * repeats)[: region.block_bytes], dtype=np.uint8
        )
        """What a free block holds."""
        self._rows = region.array  # also when the region is closed: late workers may still write
        self._rows[:] = self.pattern

    def allocate_blocks(self, block_hashes: Sequence[OffloadKey]) -> list[CPUBlock]:
        blocks = super().allocate_blocks(block_hashes)
        self._check([block.block_id for block in blocks])
        return blocks

    def free(self, block: BlockStatus) -> None:
        super().free(block)
        assert isinstance(block, CPUBlock)
        self._rows[block.block_id] = self.pattern
        self.released_blocks += 1

    def check(self) -> None:
        """Look at every block that is free now, or was when the stack was closed."""
        self._check([*(block.block_id for block in self._free), *range(self._num_made, self.num_blocks)])

    def _check(self, rows: Sequence[int]) -> None:
        if not rows or len(self.violations) >= _VIOLATIONS_SHOWN:
            return
        changed = (self._rows[rows] != self.pattern).any(axis=1)
        for position in np.flatnonzero(changed).tolist():
            self.violations.append(f"block {rows[position]} was written to after it had been released")
