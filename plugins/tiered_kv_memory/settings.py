"""The YAML entry of a memory tier. The thread that opens a stack reads it."""

from __future__ import annotations

from pydantic import Field

from tiered_kv.config.limits import Limits
from tiered_kv.config.units import Bytes
from tiered_kv.system.limits import Take
from tiered_kv.toolkit.codecs import CodecSettings


class MemorySettings(CodecSettings):
    """Settings of the tier that keeps blocks in this process's memory."""

    type: str = "memory"
    capacity: Bytes = Field(ge=1, description="Bytes of all records, headers and stores in flight counted.")

    limits: Limits | None = Field(
        default=None, description="The tenants' shares of the capacity, such as 25%; 'default' is for all others."
    )

    def takes(self, block_bytes: int) -> tuple[Take, ...]:
        return (Take("memory", self.capacity, "capacity"),)
