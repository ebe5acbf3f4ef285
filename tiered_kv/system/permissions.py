"""Checks of the owner and mode of directories and files, on the open descriptor.

Any thread but the scheduler's may call: each check may wait for the file system. A tier's blocks reveal its users'
prompts. So its directory has mode 0700: no other user can read its contents, or add to them. Entries that another user
added earlier are found by their owner and mode. A user who can write to a parent directory can replace the tier's
directory. The replacement is accepted only if this process's user owns it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from tiered_kv.errors import ConfigError

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
OTHERS = 0o077
"""All permissions of group and others."""
_NOT_OF_THE_MODE = frozenset({errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOSPC, errno.EDQUOT})
_ACCEPT = "or set `private: false`, which accepts any owner and mode"


class NotPrivateError(OSError):
    """A file or directory may be controlled by another user. `strerror` says why, and what to do."""


def open_directory(path: str, *, make: bool = True) -> int:
    """Return a descriptor of the directory at an absolute `path`; raises `ConfigError` for a symbolic link.

    With `make`, missing directories, also above it, are created with mode 0700.
    """
    if make:
        for each in (*reversed(Path(path).parents), Path(path)):
            _make(each)
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and os.path.islink(path):
            raise ConfigError(
                f"expected a directory, found the symbolic link {path}; give the path that it leads to", location="path"
            ) from error
        raise


def _make(path: Path) -> None:
    """Make a directory unless it is there. An error of the file system stays itself, which `Path.is_dir` would hide."""
    try:
        path.mkdir(DIRECTORY_MODE)
    except OSError:
        is_there = False
        with suppress(FileNotFoundError):
            is_there = stat.S_ISDIR(os.stat(path).st_mode)
        if not is_there:
            raise


def check_directory(fd: int, path: str, names: Collection[str]) -> None:
    """Refuse an open directory that another user owns, or may have written to; else remove other users' rights.

    Root counts as another user. A group's rights alone are no reason to refuse: container platforms give them to every
    file of a volume, and an administrator chose the group. `names` are the directory's entries.

    Raises:
        ConfigError: Another user owns it, or an entry of it, or all users can write to it, or its mode cannot be set.
    """
    status, uid = os.fstat(fd), os.geteuid()
    if status.st_uid != uid:
        raise ConfigError(
            f"expected a directory that belongs to this process's user (uid {uid}), found {path} of uid "
            f"{status.st_uid}; give a new directory below it or elsewhere, or make sure that nobody has put anything "
            f"into it, and run: chown -R {uid} {path}; {_ACCEPT}",
            location="path",
        )
    mode = stat.S_IMODE(status.st_mode)
    if not mode & OTHERS:
        return
    if names and mode & stat.S_IWOTH:
        raise ConfigError(
            f"expected a directory that only its owner can get at, found {path} with mode {mode:04o}; "
            f"make sure that nobody has put anything into it, and run: chmod 700 {path}; {_ACCEPT}",
            location="path",
        )
    for name in names:
        with suppress(FileNotFoundError):  # another process has removed it
            owner = os.stat(name, dir_fd=fd, follow_symlinks=False).st_uid
            if owner != uid:
                raise ConfigError(
                    f"expected a directory that only its owner can get at, found {path} with mode {mode:04o} and in "
                    f"it {name!r} of uid {owner}; remove it, or give another directory; {_ACCEPT}",
                    location="path",
                )
    with suppress(OSError):  # some file systems lack modes, and s3fs then says that there is no such file
        os.fchmod(fd, DIRECTORY_MODE)
    mode = stat.S_IMODE(os.fstat(fd).st_mode)
    if mode & OTHERS:
        raise ConfigError(
            f"expected a directory that can be closed to other users, found {path} with mode {mode:04o}, which its "
            f"file system does not change; give a directory on another; {_ACCEPT}",
            location="path",
        )


def check_file(fd: int, name: str, *, any_owner: bool = False) -> os.stat_result:
    """Refuse a file that another user may control, before it is read or written; set its mode to 0600.

    A file with several names is refused: a user with access to the directory could have made a hard link to a file
    that only this process may write to. The caller has opened the file without following a symbolic link. `any_owner`
    ignores owner and mode, on a file system that does not keep them. Returns the file's status.

    Raises:
        NotPrivateError: It is no regular file, another user owns it, it has several names, or its mode cannot be set.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise NotPrivateError(errno.ELOOP, f"{name} is not a regular file; remove it")
    if not any_owner and status.st_uid != os.geteuid():
        raise NotPrivateError(
            errno.EPERM, f"{name} belongs to another user (uid {status.st_uid}); remove it, or give it to this one"
        )
    if status.st_nlink > 1:
        raise NotPrivateError(errno.EMLINK, f"{name} has {status.st_nlink} names (hard links); remove it")
    mode = stat.S_IMODE(status.st_mode)
    if not any_owner and mode & OTHERS:
        try:
            os.fchmod(fd, FILE_MODE)
        except OSError as error:
            raise NotPrivateError(
                errno.EPERM, f"{name} has mode {mode:04o}, which its file system does not change ({error.strerror})"
            ) from error
    return status
