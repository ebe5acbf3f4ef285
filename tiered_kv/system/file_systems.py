"""The kernel's facts about files and their file systems, by calls that `os` lacks.

The tiers with directories call it, and the primary tier's region. Any thread but the scheduler's: every call may wait
for the file system. Where the kernel or the file system lacks a call, the answer is "unknown" and no error.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

_libc: Any = ctypes.CDLL(None, use_errno=True)  # Any: its functions are found by name
_NOT_ALLOCATED: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV})
_OF_PLACE: Final = frozenset({errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EBADMSG, errno.EUCLEAN, errno.EREMOTEIO})
_INTERRUPTIONS_MAX: Final = 1000
"""How often one allocation is begun again after a signal. On a signal, a file system may undo its allocation."""

# <linux/stat.h>, <linux/fcntl.h>: statx(2) writes 256 bytes.
_AT_EMPTY_PATH: Final = 0x1000
_STATX_DIOALIGN: Final = 0x2000
_STATX: Final = struct.Struct("=I148xII96x")  # the mask, and the two alignments at byte 152

# <linux/fs.h>: FS_IOC_GETFLAGS and FS_IOC_SETFLAGS, whose numbers have the size of a long and which use 4 bytes.
_GET_FLAGS: Final = 0x80006601 | ctypes.sizeof(ctypes.c_long) << 16
_SET_FLAGS: Final = 0x40006602 | ctypes.sizeof(ctypes.c_long) << 16
_COMPRESSED: Final = 0x4
_NO_COPY_ON_WRITE: Final = 0x800000

OWN_NAME: Final = (
    "on NFS two hosts of one name take each other's locks: give each host and container a name of its own, or another "
    "nfs.nfs4_unique_id (a parameter of the kernel's module nfs), and mount again"
)
_LOCAL_LOCKS: Final = frozenset({"nolock", "local_lock=flock", "local_lock=all", "nobrl", "localflock"})
"""Mount options of NFS, SMB and Lustre with which flock(2) reaches no other host."""
_NFS_4_0: Final = frozenset({"vers=4", "vers=4.0", "minorversion=0"})
_NFS_NAMES: Final = ("/sys/module/nfs/parameters/nfs4_unique_id", "/sys/fs/nfs/net/nfs_client/identifier")
"""Files that make an NFS client's name unique, unless they are empty."""
_CONTAINER_ID: Final = re.compile(r"[0-9a-f]{12}|[0-9a-f]{64}")
_ANY_HOST: Final = re.compile(r"|\(none\)|localhost(\..*)?")

_COPYING: Final = frozenset({"btrfs", "bcachefs"})
"""File systems on which an overwrite takes new space, and the old space is lost until its whole extent is free."""


def is_full(error: OSError) -> bool:
    """Return whether a call failed because the disk, or a quota on it, has no space."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_held(error: OSError) -> bool:
    """Return whether others hold the lock that a call asked for without waiting: SMB says EACCES, and not EAGAIN."""
    return error.errno in (errno.EAGAIN, errno.EACCES)


def is_stuck(error: OSError) -> bool:
    """Return whether one file refuses changes that its directory allows: it is immutable, or the system uses it."""
    return error.errno in (errno.EPERM, errno.EBUSY, errno.ETXTBSY)


def is_of_place(error: OSError) -> bool:
    """Return whether a transfer may have failed only for its place on the disk: a bad sector, or no space for it.

    The kernel's words differ by device and file system: a medium error is EIO or ENODATA, a wrong checksum EILSEQ,
    EBADMSG or EUCLEAN, a fault of a remote target EREMOTEIO. Other errors, such as ENODEV and ESTALE, concern the whole
    file system.
    """
    return error.errno in _OF_PLACE or is_full(error)


def allocate(fd: int, offset: int, size_bytes: int) -> bool:
    """Allocate a part of a file by fallocate(2); return False if its file system lacks this call.

    Not posix_fallocate(3): glibc writes a byte of each block where the call is missing, one call for each.
    Raises `OSError`: there is no space, or the file system failed.
    """
    function = getattr(_libc, "fallocate64", None) or _libc.fallocate  # musl has the second only, with 64 bits
    for _ in range(_INTERRUPTIONS_MAX):
        if not function(fd, 0, ctypes.c_int64(offset), ctypes.c_int64(size_bytes)):
            return True
        code = ctypes.get_errno()
        if code in _NOT_ALLOCATED:
            return False
        if code != errno.EINTR:
            break
    raise OSError(code, os.strerror(code))


class DirectAlignment(NamedTuple):
    """The alignments that direct transfers of a file need; zeros if the file has no direct transfers."""

    memory_bytes: int
    offset_bytes: int


def direct_alignment(fd: int) -> DirectAlignment | None:
    """Return the file system's rules for direct transfers of an open file; None if it says nothing."""
    statx = getattr(_libc, "statx", None)
    answer = ctypes.create_string_buffer(_STATX.size)
    if statx is None or statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer):
        return None
    mask, memory_bytes, offset_bytes = _STATX.unpack(answer.raw)
    return DirectAlignment(memory_bytes, offset_bytes) if mask & _STATX_DIOALIGN else None


def is_cached(fd: int) -> bool:
    """Return whether the first page of a file is known to be in the page cache: mincore(2)."""
    with suppress(OSError, ValueError), mmap.mmap(fd, mmap.PAGESIZE) as page:  # some file systems map no file
        view = (ctypes.c_char * mmap.PAGESIZE).from_buffer(page)
        found = ctypes.create_string_buffer(1)
        failed = _libc.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(mmap.PAGESIZE), found)
        del view
        return not failed and bool(found.raw[0] & 1)
    return False


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system."""

    point: str  # the directory where it is mounted
    source: str
    """What is mounted, for example the device."""
    kind: str
    options: frozenset[str]

    @property
    def copies_on_write(self) -> bool:
        """Whether an overwrite takes new space, unless a file is exempt; see `is_written_in_place`."""
        return self.kind in _COPYING

    @property
    def lock_problem(self) -> str | None:
        """Why locks on this mount may not exclude other hosts, and the remedy; None if no reason is known."""
        if local := sorted(_LOCAL_LOCKS & self.options):
            how = f"{self.point} is mounted with {local[0]}"
            return f"locks reach no other host, as {how}; if others use this directory, mount it without this option"
        if self.kind != "nfs4" or self.options & _NFS_4_0 or any(map(_is_set, _NFS_NAMES)):
            return None
        name = os.uname().nodename
        if _ANY_HOST.fullmatch(name):
            return f"the host's name here is '{name}', which others may have, too; {OWN_NAME}"
        return (
            f"the host's name here is '{name}', the id of a container; {OWN_NAME}"
            if _CONTAINER_ID.fullmatch(name)
            else None
        )

    def __str__(self) -> str:
        return f"{self.kind} at {self.point} ({self.source})"


def _is_set(path: str) -> bool:
    with suppress(OSError), open(path) as file:
        return file.read().strip() not in ("", "(null)")
    return False


def mount_of(fd: int) -> Mount | None:
    """Return the mount that an open file or directory is on; None where /proc does not say.

    It lists no mount that begins above the root directory of this process (chroot), and none of the kernel's own.
    """
    with suppress(OSError, ValueError, IndexError, StopIteration):
        with open(f"/proc/self/fdinfo/{fd}") as file:
            number = next(line.split()[1] for line in file if line.startswith("mnt_id:"))
        with open("/proc/self/mountinfo", errors="surrogateescape") as file:
            line = next(line for line in file if line.startswith(f"{number} "))
        before, _, after = line.partition(" - ")
        fields, (kind, source, options) = before.split(), after.split()[:3]
        names = frozenset(f"{fields[5]},{options}".split(","))
        return Mount(_unescaped(fields[4]), _unescaped(source), kind, names)
    return None


def _unescaped(text: str) -> str:
    """Undo the octal escapes of spaces and the like."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def write_in_place(fd: int) -> bool:
    """Let overwrites of new files in a directory go to their old place, not to new space; return whether they do.

    This is the attribute that `chattr +C` sets. It excludes compression by the file system.
    """
    flags = _flags(fd)
    if flags is None or flags & _NO_COPY_ON_WRITE:
        return flags is not None
    with suppress(OSError):
        fcntl.ioctl(fd, _SET_FLAGS, struct.pack("=II", flags & ~_COMPRESSED | _NO_COPY_ON_WRITE, 0))
    return is_written_in_place(fd)


def is_written_in_place(fd: int) -> bool:
    """Return whether a file, or new files in a directory, have the attribute of `write_in_place`."""
    return bool((_flags(fd) or 0) & _NO_COPY_ON_WRITE)


def _flags(fd: int) -> int | None:
    with suppress(OSError):
        flags: int = struct.unpack_from("=I", fcntl.ioctl(fd, _GET_FLAGS, bytes(8)))[0]
        return flags
    return None
