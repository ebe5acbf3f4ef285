"""The probe of a mount: tries, once at the opening, which needs of the tier the mount does not meet.

`Directory` calls it on the thread that opens the tier. It makes some twenty calls on two empty files, and removes them.
"""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from tiered_kv.system.file_systems import mount_of
from tiered_kv.toolkit.small_files import opened, remove
from tiered_kv_fs.locks import try_lock


@dataclass(frozen=True, slots=True)
class Found:
    shortcomings: tuple[str, ...] = ()
    """Sentences for people: each names a need that the mount does not meet, and the remedy."""
    has_links: bool = True  # whether the mount has hard links


def probe(directory_fd: int, root: str) -> Found:
    """Try locks, a rename and a link in the directory `root`; on a full or read-only disk only look at the mount.

    The probe ignores an error that the tier's own calls will meet too.
    """
    mount = mount_of(directory_fd)
    said = [mount.lock_problem] if mount is not None and mount.lock_problem else []
    has_links = True
    with suppress(OSError), ExitStack() as undo:
        names = [f"{root}/.probe.{secrets.token_hex(8)}.tmp" for _ in range(3)]
        for name in names:
            undo.callback(remove, name)
        first = undo.enter_context(opened(names[0], os.O_RDWR | os.O_CREAT | os.O_EXCL))
        second = undo.enter_context(opened(names[0], os.O_RDWR))
        with opened(names[1], os.O_RDWR | os.O_CREAT | os.O_EXCL):
            pass
        with suppress(OSError):  # the mount has no locks: opening the ledger reports that
            if try_lock(first) and try_lock(second):
                said.append(
                    "flock(2) does not exclude here: two descriptors hold one lock, so the capacity may be exceeded; "
                    "mount the file system with locks, or give another directory"
                )
        try:
            os.link(names[1], names[2])
        except OSError:
            has_links = False
        try:
            os.replace(names[1], names[0])
            os.lstat(names[0])
        except OSError as error:
            said.append(
                f"a file that is open cannot be replaced here ({errno.errorcode.get(error.errno or 0, error)}), as on "
                "SMB: a store may fail while others read the block, and the older block is lost; rather share the "
                "directory over NFS"
            )
    return Found(tuple(said), has_links)
