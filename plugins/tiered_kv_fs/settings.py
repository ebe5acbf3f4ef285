"""The YAML entry of an fs tier, and its needs of the process and the machine.

`config.stack_config` reads it on the thread that opens a stack. Importing it loads nothing else of the tier.
`takes` must agree with the threads that `FsTier` makes.
"""

from __future__ import annotations

from pydantic import Field

from tiered_kv.config.units import Bytes, Count, FilePath
from tiered_kv.system.limits import Take
from tiered_kv.toolkit.claimed import DirectorySettings


class FsSettings(DirectorySettings):
    """Settings of the tier that keeps one file a block in a directory that may be shared."""

    type: str = "fs"
    path: FilePath = Field(description="The directory; made if it is missing. Processes and hosts may share it.")
    capacity: Bytes = Field(
        description="Bytes that the directory may occupy, with all files in it, whoever wrote them. "
        "Give all processes that share it the same."
    )
    threads: Count = Field(
        default=16, ge=2, le=256, description="How many transfers run at once; stores leave one to loads."
    )
    private: bool = Field(
        default=True,
        description="Refuse the directory if it is another user's or all users can write to it. Turn it off where the "
        "file system keeps neither owners nor modes (CIFS, FUSE), or maps all users to one (NFS with all_squash).",
    )

    def takes(self, block_bytes: int) -> tuple[Take, ...]:
        # Each transfer has a thread and an open file. The 11 others: 8 for lookups, 2 for grants, and the event loop.
        return (Take("descriptors", self.threads, "threads"), Take("threads", self.threads + 11, "threads"))
