"""One region for several processes: a scheduler, and the workers of one engine.

The first process to map it sizes the file and writes its header. The others compare the header and map it. An engine
may make its workers' handlers before its manager (vLLM does) or after. The last process to map it removes its name.
From then on the kernel frees the memory with the last mapping, even if the processes are killed.
"""

from __future__ import annotations

import os
from typing import Self

from tiered_kv.cpu.geometry import ROWS_OFFSET, Geometry, check_header, has_header, write_header
from tiered_kv.cpu.region import PrimaryRegion, size_shared
from tiered_kv.worker.shared_file import SharedFile


class SharedRegion(PrimaryRegion):
    """A region that several processes map. Made by `join`; one thread calls."""

    _file: SharedFile | None = None
    """None until it is mapped."""

    @classmethod
    def join(
        cls, file: SharedFile, geometry: Geometry, *, huge_pages: bool = True, numa_node: int | None = None
    ) -> Self:
        """Map the rows of `file`. The region owns the file from now on, even if this raises.

        Args:
            file: The file, in which this process has a place.
            geometry: The rows, the same in every party.
            huge_pages: As for `PrimaryRegion`.
            numa_node: Likewise.

        Raises:
            ConfigError: The memory cannot be allocated, or another party expects another geometry.
        """
        region: Self | None = None
        try:
            with file.exclusive():
                is_first = not has_header(file.fd)
                if is_first:
                    os.ftruncate(file.fd, ROWS_OFFSET + geometry.size_bytes)
                else:
                    check_header(file.fd, file.path, geometry)
                region = cls.map_file(
                    file.fd,
                    file.path,
                    geometry.rows,
                    geometry.row_bytes,
                    offset=ROWS_OFFSET,
                    huge_pages=huge_pages,
                    numa_node=numa_node,
                )
                region._file = file
                if is_first:
                    size_shared(file.fd, file.path, geometry.size_bytes)  # its pages are where the mapping was bound
                    write_header(file.fd, geometry)
                file.complete()
        except BaseException:
            file.leave()
            if region is not None:
                region.close()
            raise
        return region

    def is_complete(self) -> bool:
        """Return whether all parties have joined; they may have left since."""
        return self._file is None or self._file.is_complete()

    def missing_parties(self) -> list[str]:
        """Return the parties that have not joined yet."""
        return [] if self._file is None else self._file.missing_parties()

    def unlink(self) -> None:
        """Leave, if not all have joined yet. The last one to leave removes the name. Otherwise do nothing."""
        if self._file is not None:
            self._file.leave()
