"""The interface by which a manager allocates blocks in a medium. `tiered_kv.cpu.backend` implements it.

The manager calls it on its own thread. What must stay true: each allocated block is freed once.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from tiered_kv.base import LoadStoreSpec, OffloadKey


class BlockStatus(ctypes.Structure):
    """The state of one block: -1 while it is being written, else the number of transfers that read it.

    A ctypes structure, so that native code can share it. Owned by the manager's thread.
    """

    _fields_ = (("ref_cnt", ctypes.c_int32),)
    ref_cnt: int

    def __init__(self) -> None:
        super().__init__()
        self.ref_cnt = -1

    @property
    def is_ready(self) -> bool:
        """Whether the block may be read."""
        return self.ref_cnt >= 0


class Backend(ABC):
    """Allocates blocks of one size in one medium.

    Args:
        block_size: Bytes of one block.
        medium: The medium's name, as in `LoadStoreSpec.medium`.
    """

    def __init__(self, block_size: int, medium: str) -> None:
        self.block_size = block_size
        self.medium = medium

    @abstractmethod
    def get_num_free_blocks(self) -> int:
        """Return how many blocks can be allocated now."""

    @abstractmethod
    def allocate_blocks(self, block_hashes: Sequence[OffloadKey]) -> Sequence[BlockStatus]:
        """Allocate one block for each key, each with `ref_cnt` -1; the caller has checked that there is room."""

    @abstractmethod
    def free(self, block: BlockStatus) -> None:
        """Free a block of `allocate_blocks`; called once for each."""

    def get_load_store_spec(self, block_hashes: Iterable[OffloadKey], blocks: Iterable[BlockStatus]) -> LoadStoreSpec:
        """Return the spec by which a worker reads or writes `blocks`, in their order."""
        raise NotImplementedError(f"{type(self).__name__} gives no specs to workers")
