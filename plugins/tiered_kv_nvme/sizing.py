"""The sizing of a directory: how a capacity is divided into segments.

The settings ask for it before a stack opens, the tier when it opens. No thread calls it later. The number of segments
stays within half of the process's limit of descriptors. Sizes that do not fit are refused, with sizes that do.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial

from tiered_kv.config.units import BYTES_MAX, format_bytes
from tiered_kv.errors import ConfigError, ResourceError
from tiered_kv.system.limits import DESCRIPTORS_SHARE, Limits, disk_need
from tiered_kv.system.threads import call_within
from tiered_kv_nvme.directory import DIRECTORY_RESERVE_BYTES, SEGMENT_RESERVE_BYTES
from tiered_kv_nvme.layout import KEY_BYTES_MAX, PAGE_BYTES, pages
from tiered_kv_nvme.segment import segment_bytes_min

SEGMENTS_MIN = 4  # one for stores, two free ones, one with blocks
SEGMENTS_MAX = 512  # each is an open file; a process often may have 1024
INDEX_BYTES = 120  # memory of a block, with its key; see `tiered_kv_nvme.pool`

_ROOM_S = 2.0  # how long a file system may take to report its room
_SEGMENTS_WANTED = 64  # how many segments a capacity has by default
_SEGMENTS_COMFORTABLE = 8  # the least number, where the blocks allow it
_SEGMENT_BYTES_FLOOR = 8 << 20
_SEGMENT_BYTES_CEILING = 256 << 20
_BLOCKS_COMFORTABLE = 8  # how many blocks a segment holds at least, where the capacity allows it


@dataclass(frozen=True, slots=True)
class Sizing:
    """A capacity, divided into segments."""

    capacity_bytes: int  # the limit of the directory, with everything in it
    segment_bytes: int
    descriptors_max: int = SEGMENTS_MAX  # how many segments may be open

    @property
    def segments_wanted(self) -> int:
        """How many segments fill the capacity."""
        return (self.capacity_bytes - DIRECTORY_RESERVE_BYTES) // (self.segment_bytes + SEGMENT_RESERVE_BYTES)

    @property
    def segments_max(self) -> int:
        return min(self.segments_wanted, self.descriptors_max)

    @classmethod
    def of(
        cls,
        capacity_bytes: int,
        block_bytes: int,
        segment_bytes: int | None = None,
        *,
        overhead_bytes: int = 0,
        room_bytes: int = BYTES_MAX,
        descriptors_max: int = SEGMENTS_MAX,
    ) -> Sizing:
        """Return the sizing for blocks of `block_bytes`, stored with at most `overhead_bytes` more.

        The directory can occupy `room_bytes` on its disk. If that is less than the capacity, and enough for the least
        capacity, it determines the default size of a segment.
        `descriptors_max` segments can be open. Raises `ConfigError`: the sizes do not fit; the message has valid ones.
        """
        stored_bytes = block_bytes + overhead_bytes
        least_bytes = segment_bytes_min(stored_bytes, KEY_BYTES_MAX, 1)
        if segment_bytes is not None:
            if segment_bytes < least_bytes or segment_bytes % PAGE_BYTES:
                raise ConfigError(
                    f"a segment of {format_bytes(segment_bytes)} cannot be used with blocks of "
                    f"{format_bytes(block_bytes)}: it takes a multiple of {format_bytes(PAGE_BYTES)}, "
                    f"at least {format_bytes(least_bytes)}",
                    location="segment",
                )
            if cls(capacity_bytes, segment_bytes).segments_wanted > SEGMENTS_MAX:
                raise ConfigError(
                    f"a capacity of {format_bytes(capacity_bytes)} in segments of {format_bytes(segment_bytes)} "
                    f"makes more than {SEGMENTS_MAX} open files: it takes at least "
                    f"{format_bytes(pages(capacity_bytes // SEGMENTS_MAX))}",
                    location="segment",
                )
            least_bytes = segment_bytes
        capacity_min = DIRECTORY_RESERVE_BYTES + SEGMENTS_MIN * (least_bytes + SEGMENT_RESERVE_BYTES)
        if capacity_bytes < capacity_min:
            raise ConfigError(
                f"a capacity of {format_bytes(capacity_bytes)} is too small for blocks of {format_bytes(block_bytes)}"
                + (f" and segments of {format_bytes(segment_bytes)}" if segment_bytes else "")
                + f": it takes at least {format_bytes(capacity_min)}",
                location="capacity",
            )
        comfortable_bytes = segment_bytes_min(stored_bytes, KEY_BYTES_MAX, _BLOCKS_COMFORTABLE)
        if segment_bytes is None:
            usable_bytes = capacity_bytes
            # On a full disk, segments are chosen for the time when it has space.
            if capacity_min <= room_bytes < capacity_bytes:  # rounded, so that the next opening chooses the same
                usable_bytes = max(capacity_min, 1 << room_bytes.bit_length() - 1)
            segment_bytes = _choose(usable_bytes, least_bytes, comfortable_bytes, descriptors_max)
        return cls(capacity_bytes, segment_bytes, descriptors_max)


def descriptors_left(others: int = 0) -> int:
    """Return how many segments may be open. Other stores of the process have, or may open, `others` segments.

    Each segment takes a descriptor, and half of the process's descriptors are not for segments.
    """
    return max(SEGMENTS_MIN, min(SEGMENTS_MAX, Limits().descriptors().amount // DESCRIPTORS_SHARE - others))


def room_bytes_of(path: str) -> int:
    """Return the bytes that a directory may occupy: its files, and its disk's free space. A missing one will be made.

    A file system that does not answer counts as unlimited: the opening reports it.
    """
    try:
        return call_within(_ROOM_S, partial(_room_bytes_of, path), "tiered-kv-nvme-room")
    except (OSError, ResourceError):
        return BYTES_MAX


def _room_bytes_of(path: str) -> int:
    used_bytes = 0
    if os.path.isdir(path):
        with os.scandir(path) as entries:
            used_bytes = sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in entries)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return disk_need(path, 0, used_bytes).available


def _choose(capacity_bytes: int, least_bytes: int, comfortable_bytes: int, descriptors_max: int) -> int:
    """Return a segment size: several blocks, and a small part of the capacity, so that little is evicted at once."""
    wanted = min(max(capacity_bytes // _SEGMENTS_WANTED, _SEGMENT_BYTES_FLOOR), _SEGMENT_BYTES_CEILING)
    wanted = max(pages(max(wanted, capacity_bytes // descriptors_max)), comfortable_bytes)
    share = (capacity_bytes - DIRECTORY_RESERVE_BYTES) // _SEGMENTS_COMFORTABLE - SEGMENT_RESERVE_BYTES
    return max(least_bytes, min(wanted, share // PAGE_BYTES * PAGE_BYTES))
