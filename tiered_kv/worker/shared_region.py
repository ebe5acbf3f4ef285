"""One region for several processes: a scheduler, and the workers of one engine.

Whoever maps it first sizes the file and writes its header, and the others compare and map it; an engine may make its
workers' handlers before its manager (vLLM does) or after. The last to map it removes its name, so from then on the
memory lives as long as those who map it, however they end.
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
    """None while it is made."""

    @classmethod
    def join(
        cls, file: SharedFile, geometry: Geometry, *, huge_pages: bool = True, numa_node: int | None = None
    ) -> Self:
        """Map the rows of `file`, which belongs to the region from now on, also where this fails.

        Args:
            file: The file, in which this process has a place.
            geometry: The rows, the same in every party.
            huge_pages: As for `PrimaryRegion`.
            numa_node: Likewise.

        Raises:
            ConfigError: The memory cannot be had, or another party expects another geometry.
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
                    size_shared(file.fd, file.path, geometry.size_bytes)  # pages go where the mapping was bound to
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
        """Return who has not joined yet."""
        return [] if self._file is None else self._file.missing_parties()

    def unlink(self) -> None:
        """Leave, if not all have joined yet; the name goes with the last who leaves. Otherwise do nothing."""
        if self._file is not None:
            self._file.leave()
