"""The generations of a server's rows: a number for each row, by which an engine sees that the row has another block.

The server makes the file, and hands its descriptor over its socket. It has no name, and a fixed size, as the file of
the rows (`memory`). Engines only read it: the kernel refuses any new mapping that could write to it.

A served stack owns the numbers, on the server's thread. Engines read them on any thread.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable
from typing import Final

import numpy as np

from tiered_kv.errors import needing_resources
from tiered_kv.server.memory import SIZE_SEALS, create_sealable

_F_SEAL_FUTURE_WRITE: Final = 0x10  # Linux 5.1; not in Python 3.11's fcntl


class Generations:
    """A number of 32 bits for each row. Only the server changes it: a row that is freed gets its next number.

    One thread calls: the server's, after the opening.

    Attributes:
        fd: The file, to hand over a socket; `close` closes it.
        values: The numbers.

    Raises:
        ResourceError: The system gives no descriptor, maps no more memory, or is older than Linux 5.1.
    """

    def __init__(self, rows: int) -> None:
        self.fd = create_sealable("tiered-kv-generations")
        try:
            with needing_resources("the rows' generations cannot be mapped"):
                os.ftruncate(self.fd, rows * 4)
                os.posix_fallocate(self.fd, 0, rows * 4)  # else the first reader of a page pays for it
                self.values = memoryview(mmap.mmap(self.fd, rows * 4)).cast("I")
                seals = SIZE_SEALS | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        except BaseException:
            os.close(self.fd)
            raise

    def bump(self, rows: Iterable[int]) -> None:
        """Give each of these rows its next generation; after the last comes 0."""
        values = self.values
        for row in rows:
            values[row] = values[row] + 1 & 0xFFFFFFFF

    def bump_all(self) -> None:
        """Give every row its next generation: no engine takes a block from before a reset for stored."""
        current = np.frombuffer(self.values, np.uint32)
        current += np.uint32(1)

    def close(self) -> None:
        """Close and unmap the file. Engines keep their mappings. A second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.values.release()


def map_generations(fd: int, rows: int) -> memoryview:
    """Map the generations of a server's rows, read-only. The memory is unmapped with the last view of it.

    Args:
        fd: The file that has come over the socket; the caller closes it.
        rows: How many rows there are.

    Raises:
        ResourceError: See `map_host_region`.
    """
    with needing_resources("the generations of the host's cache cannot be mapped"):
        return memoryview(mmap.mmap(fd, rows * 4, prot=mmap.PROT_READ)).cast("I")
