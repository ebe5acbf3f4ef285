"""The header of a region's file: how its bytes are divided into rows.

Two processes that divide one file differently would copy bytes of other blocks, and every copy would succeed. So the
process that makes a region in shared memory writes the geometry into the file. Every other process compares it. The
header is one page of JSON; the rows begin at `ROWS_OFFSET`. The hole between the two takes no memory.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from tiered_kv.errors import ConfigError

HEADER_BYTES = 4096
ROWS_OFFSET = 2 << 20
"""Where the rows begin: the file's first huge page is the header's, and the rows lie in whole ones."""

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Geometry:
    """What all processes that map a region must agree on: its rows, their bytes, the workers with a part of every row,
    and the device blocks in a row (`block_size_factor`).

    Raises:
        ConfigError: A number is less than 1.
    """

    rows: int
    row_bytes: int
    workers: int = 1
    block_size_factor: int = 1

    def __post_init__(self) -> None:
        if self.rows < 1 or self.row_bytes < 1:
            raise ConfigError(f"a region needs at least one block and one byte, not {self.rows} x {self.row_bytes}")
        if self.workers < 1 or self.block_size_factor < 1:
            raise ConfigError(
                f"expected at least one worker and one device block, found {self.workers} and {self.block_size_factor}"
            )

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row_bytes

    @property
    def part_bytes(self) -> int:
        """Bytes of a worker's part of a row; worker 0's stands first."""
        return self.row_bytes // self.workers

    def described(self) -> dict[str, int]:
        """Return the content of the header."""
        return {"format": _FORMAT, **dataclasses.asdict(self), "part_bytes": self.part_bytes}


def write_header(fd: int, geometry: Geometry) -> None:
    """Write the header of a file whose rows are already allocated."""
    os.pwrite(fd, json.dumps(geometry.described()).encode().ljust(HEADER_BYTES, b"\0"), 0)


def has_header(fd: int) -> bool:
    """Return whether the header has been written."""
    return any(os.pread(fd, HEADER_BYTES, 0))


def check_header(fd: int, path: str | os.PathLike[str], wanted: Geometry) -> None:
    """Compare a file's header with the geometry that this process expects.

    Raises:
        ConfigError: There is no header, or it has another geometry.
    """
    try:
        found = json.loads(os.pread(fd, HEADER_BYTES, 0).rstrip(b"\0"))
    except ValueError:
        found = {}
    described = wanted.described()
    differing = [name for name in described if found.get(name) != described[name]]
    if differing:
        raise ConfigError(
            f"expected {', '.join(f'{name} {described[name]}' for name in differing)} in the region {Path(path)}, "
            f"found {', '.join(f'{name} {found.get(name)}' for name in differing)}; every process that maps it must be "
            "configured alike"
        )
