"""The YAML entry of an nvme tier, and its needs of the process and the machine.

`config.stack_config` reads it on the thread that opens a stack. Importing it loads nothing else of the tier.
"""

from __future__ import annotations

from contextlib import suppress

from pydantic import Field

from tiered_kv.config.limits import Limits
from tiered_kv.config.units import Bytes, Count, FilePath
from tiered_kv.errors import ConfigError
from tiered_kv.system.limits import Take
from tiered_kv.toolkit.claimed import DirectorySettings, absolute


class NvmeSettings(DirectorySettings):
    """Settings of the tier that keeps blocks in a local directory."""

    type: str = "nvme"
    path: FilePath = Field(description="The directory; made if it is missing. One process owns it.")
    capacity: Bytes = Field(description="Bytes that the directory with all its files may occupy.")
    segment: Bytes | None = Field(
        default=None,
        description="Size of a segment file, a multiple of 4KiB. By default it is a 64th of the capacity, from 8MiB to "
        "256MiB, and larger for capacities from 128GiB on. Space is reclaimed a segment at a time.",
    )
    limits: Limits | None = Field(
        default=None, description="The tenants' shares of the capacity, such as 25%; 'default' is for all others."
    )
    threads: Count = Field(default=8, ge=1, le=256, description="How many transfers run at once.")
    direct: bool = Field(
        default=True, description="Use O_DIRECT where the file system takes it; otherwise the page cache."
    )
    private: bool = Field(
        default=True,
        description="Refuse the directory if it is another user's or all users can write to it. Turn it off where the "
        "file system keeps neither owners nor modes, or where a volume belongs to another user.",
    )

    def takes(self, block_bytes: int) -> tuple[Take, ...]:
        from tiered_kv_nvme.sizing import INDEX_BYTES, Sizing, descriptors_left, room_bytes_of

        stored_bytes = min(self.capacity, room_bytes_of(absolute(self.path)))
        takes = [
            Take("memory", stored_bytes // block_bytes * INDEX_BYTES, "capacity", is_estimate=True),
            Take("threads", self.threads + 2, "threads"),  # the reclaimer, and the writer of resets
        ]
        with suppress(ConfigError):  # the sizes do not fit: the opening says so
            most = Sizing.of(self.capacity, block_bytes, self.segment).segments_wanted
            sizing = Sizing.of(self.capacity, block_bytes, self.segment, descriptors_max=descriptors_left())
            takes.append(Take("descriptors", sizing.segments_wanted, "segment", amount_max=most))
        return tuple(takes)
