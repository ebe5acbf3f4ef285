"""The YAML entry of an fs tier."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tiered_kv.settings import TierSettings
from tiered_kv.units import Bytes, Count


class FsSettings(TierSettings):
    """Settings of the tier that keeps one file a block in a directory that may be shared."""

    type: str = "fs"
    path: str = Field(
        min_length=1, description="The directory; made if it is missing. Processes and hosts may share it."
    )
    capacity: Bytes = Field(
        description="What the directory may occupy, everything in it counted, whoever wrote it. "
        "Give all processes that share it the same."
    )
    threads: Count = Field(
        default=16, ge=2, le=256, description="How many transfers run at once; stores leave one to loads."
    )
    codec: Literal["raw", "zstd"] = Field(
        default="raw", description="How blocks are stored: as they are, or compressed (extra `zstd`)."
    )
