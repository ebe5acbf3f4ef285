"""The YAML entry of a memory tier."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tiered_kv.settings import TierSettings
from tiered_kv.units import Bytes


class MemorySettings(TierSettings):
    """Settings of the tier that keeps blocks in this process's memory."""

    type: str = "memory"
    capacity: Bytes = Field(ge=1, description="Bytes of all records, headers and stores in flight counted.")
    codec: Literal["raw", "zstd"] = Field(
        default="raw", description="How blocks are kept: as they are, or compressed (extra `zstd`)."
    )
