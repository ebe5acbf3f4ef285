"""The settings of files that a stack writes for later: what its requests asked for, and what its memory had.

`StackConfig` has them. Reading opens no file.
"""

from __future__ import annotations

from typing import Final

from pydantic import Field

from tiered_kv.config.settings import StrictModel
from tiered_kv.config.units import Bytes, FilePath

RECORDING_BYTES: Final = 1 << 30
RECORDING_BYTES_MIN: Final = 1 << 20
WARM_RATE: Final = 256 << 20
WARM_BLOCKS_S: Final = 500
"""Blocks a second at most without a `rate`: each takes some 50 µs of the manager's thread, whatever its size."""


class RecordSettings(StrictModel):
    """Where to record what requests ask for."""

    path: FilePath = Field(description="The trace; the part before the last rotation has this name with .1 behind it.")
    size_max: Bytes = Field(
        default=RECORDING_BYTES,
        ge=RECORDING_BYTES_MIN,
        description="Limit of both parts together; beyond it the oldest requests go.",
    )


class WarmSettings(StrictModel):
    """How a new stack gets the blocks that an earlier one had in memory."""

    path: FilePath | None = Field(
        default=None, description="The list of the memory's hottest blocks: written at a clean end, read at the start."
    )
    source: str | None = Field(
        default=None,
        min_length=1,
        max_length=4096,
        description="Where the start reads instead: HOST:PORT or the URL of a running stack's `metrics`, or the path "
        "of a list, or of a stack's file with `warm`.",
    )
    rate: Bytes | None = Field(
        default=None,
        ge=0,
        description="Bytes a second at most, 0 to load nothing; by default 256MiB, and no more than 500 blocks.",
    )

    def rate_of(self, block_bytes: int) -> int:
        """Return the bytes a second for blocks of a size."""
        return min(WARM_RATE, WARM_BLOCKS_S * block_bytes) if self.rate is None else self.rate
