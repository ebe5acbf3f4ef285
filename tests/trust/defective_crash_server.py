"""Programs that are each a `crash_server` over code with a defect."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence, Set
from unittest import mock

import tiered_kv_fs.blocks
import tiered_kv_nvme.recovery
from tests.support import crash_server
from tiered_kv_nvme.epoch import DirectoryEpoch
from tiered_kv_nvme.segment import NoSegment, Segment, SegmentFiles


def serving(defect: Callable[[], None]) -> Callable[[], None]:
    """Return the program that plants a defect and then is a `crash_server`."""

    @functools.wraps(defect)
    def serve() -> None:
        defect()
        crash_server.main()

    return serve


def plant(owner: object, name: str, instead: Callable[..., object]) -> None:
    """Have this process run a function with the defect."""
    mock.patch.object(owner, name, instead).start()


@serving
def fs_publishes_before_it_writes() -> None:
    """A block's file has its name before it has its content."""
    plant(tiered_kv_fs.blocks, "temporary_path", lambda path, owner: path)


@serving
def fs_takes_a_short_write_for_a_whole_one() -> None:
    """The result of `writev` is ignored."""

    def write_once(fd: int, parts: Sequence[memoryview]) -> None:
        os.writev(fd, parts)

    plant(tiered_kv_fs.blocks, "write_all", write_once)


@serving
def nvme_takes_torn_batches_for_whole() -> None:
    """Opening checks the header of a batch only."""
    plant(tiered_kv_nvme.recovery, "_all_sound", lambda *_: True)


@serving
def nvme_makes_a_segment_too_many() -> None:
    """While one is reclaimed another is made, over the capacity."""
    create = SegmentFiles.create

    def create_over(files: SegmentFiles, taken: Set[int], generation: int, deleted_bytes: int) -> Segment | NoSegment:
        larger = dataclasses.replace(files, capacity_bytes=files.capacity_bytes + 2 * files.segment_bytes)
        return create(larger, taken, generation, deleted_bytes)

    plant(SegmentFiles, "create", create_over)


@serving
def nvme_does_not_flush_its_marker() -> None:
    """The marker is not on the device when the first block may be stored."""
    plant(os, "fsync", lambda *_: None)


@serving
def nvme_does_not_flush_a_reset() -> None:
    """A reset is not on the device when it counts as held; the epoch that the directory began with is."""
    plant(DirectoryEpoch, "sync", lambda epoch: None)
