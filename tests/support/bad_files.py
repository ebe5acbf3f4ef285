"""Files of this process with places that refuse transfers: patches `os.preadv` and `os.pwritev`."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class BadPlace(NamedTuple):
    """Bytes of one file, or of all below a directory, or on the disk as a whole."""

    path: Path
    begin: int = 0
    end: int = 1 << 62


@dataclass(eq=False)
class BadFiles:
    """Refuses transfers that touch a bad place. Any thread may call; the test changes the places."""

    code: int = errno.EIO
    reads: list[BadPlace] = field(default_factory=list)
    writes: list[BadPlace] = field(default_factory=list)
    refused: int = 0
    transfers_before: int = 0
    """How many further transfers the bad places take."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "preadv", self._checking(os.preadv, self.reads))
        monkeypatch.setattr(os, "pwritev", self._checking(os.pwritev, self.writes))
        monkeypatch.setattr(os, "pread", self._checking(os.pread, self.reads))

    def _checking(self, real: Callable[..., Any], places: list[BadPlace]) -> Callable[..., Any]:
        def transfer(fd: int, what: Sequence[memoryview] | int, offset: int, *flags: int) -> Any:  # Any: as `real`
            if places:
                size = what if isinstance(what, int) else sum(map(len, what))
                path = Path(os.readlink(f"/proc/self/fd/{fd}"))
                for place in places:
                    if (path == place.path or place.path in path.parents) and (
                        offset < place.end and place.begin < offset + size
                    ):
                        self.transfers_before -= 1
                        if self.transfers_before >= 0:
                            continue
                        self.refused += 1
                        raise OSError(self.code, os.strerror(self.code))
            return real(fd, what, offset, *flags)

        return transfer


@pytest.fixture
def bad_files(monkeypatch: pytest.MonkeyPatch) -> BadFiles:
    bad_files = BadFiles()
    bad_files.install(monkeypatch)
    return bad_files
