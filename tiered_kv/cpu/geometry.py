"""The header of a shared region's file: how its bytes are divided into rows.

Two processes that divide the file differently would copy bytes of other blocks without an error. So the process that
creates the file writes the geometry into it, and every other process compares it. The header is one page of JSON. The
rows begin at `ROWS_OFFSET`; the hole between them takes no memory.
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
"""Byte offset of the first row: the header takes one huge page, so that the rows are aligned to huge pages."""

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Geometry:
    """What all processes that map a region must agree on.

    Args:
        rows: Number of rows.
        row_bytes: Bytes of a row.
        workers: Workers that have a part of every row.
        block_size_factor: Device blocks in a row.

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
        """Bytes of a worker's part of a row; the part of worker 0 is the first."""
        return self.row_bytes // self.workers

    def header(self) -> dict[str, int]:
        return {"format": _FORMAT, **dataclasses.asdict(self), "part_bytes": self.part_bytes}


def write_header(fd: int, geometry: Geometry) -> None:
    """Write the header of a file whose rows are already allocated."""
    os.pwrite(fd, json.dumps(geometry.header()).encode().ljust(HEADER_BYTES, b"\0"), 0)


def has_header(fd: int) -> bool:
    """Return whether a header has been written."""
    return any(os.pread(fd, HEADER_BYTES, 0))


def check_header(fd: int, path: str | os.PathLike[str], wanted: Geometry) -> None:
    """Compare a file's header with the geometry that this process expects.

    Raises:
        ConfigError: The header is missing, or has another geometry.
    """
    try:
        found = json.loads(os.pread(fd, HEADER_BYTES, 0).rstrip(b"\0"))
    except ValueError:
        found = {}
    expected = wanted.header()
    differing = [name for name in expected if found.get(name) != expected[name]]
    if differing:
        raise ConfigError(
            f"expected {', '.join(f'{name} {expected[name]}' for name in differing)} in the region {Path(path)}, "
            f"found {', '.join(f'{name} {found.get(name)}' for name in differing)}; every process that maps it must be "
            "configured alike"
        )
