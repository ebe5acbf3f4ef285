"""Who can get at a directory or a file: checked when it is opened, on the open descriptor, whatever the umask.

What a tier stores are the prompts of its users, as good as in clear text. So its directory is its owner's alone, mode
0700: nobody else can read what is in it, or put anything into it. What somebody has put there before is found by its
owner and its mode. Who can write to a directory above it can put another in its place; that one is taken only if it is
empty and owned by this process's user.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from tiered_kv.errors import ConfigError

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
OTHERS = 0o077
"""What group and others may do."""
OTHERS_WRITE = 0o022
"""What lets group and others put something into a directory."""


class NotPrivateError(OSError):
    """An entry is not what it should be; the message is for people."""


def open_directory(path: str, *, make: bool = True) -> int:
    """Return a descriptor of the directory at an absolute `path`, which must not be a symbolic link.

    With `make`, it is made with mode 0700 if it is missing, and so are the directories above it.

    Raises:
        ConfigError: It is a symbolic link.
        OSError: It is no directory, is missing, or the file system does not let us.
    """
    if make:
        for each in (*reversed(Path(path).parents), Path(path)):
            each.mkdir(DIRECTORY_MODE, exist_ok=True)
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and os.path.islink(path):
            raise ConfigError(
                f"expected a directory, found the symbolic link {path}; give the path that it leads to", location="path"
            ) from error
        raise


def check_directory(fd: int, path: str, *, may_tighten: bool) -> None:
    """Refuse an open directory that is not this process's user's alone, root being a user like any other.

    With `may_tighten` it holds nothing yet, so its mode is set to 0700 if it is another one. `path` is for messages.

    Raises:
        ConfigError: It is another user's, or others can get at it; the message says what to do.
        OSError: Its mode cannot be set.
    """
    status, uid = os.fstat(fd), os.geteuid()
    if status.st_uid != uid:
        raise ConfigError(
            f"expected a directory that belongs to this process's user (uid {uid}), found {path} of uid "
            f"{status.st_uid}; give another, or make sure that nobody has put anything into it, and run: "
            f"chown -R {uid} {path}",
            location="path",
        )
    if may_tighten and stat.S_IMODE(status.st_mode) & OTHERS:
        os.fchmod(fd, DIRECTORY_MODE)
        status = os.fstat(fd)
    if stat.S_IMODE(status.st_mode) & OTHERS:
        raise ConfigError(
            f"expected a directory that only its owner can get at, found {path} with mode "
            f"{stat.S_IMODE(status.st_mode):04o}; make sure that nobody has put anything into it, and run: "
            f"chmod 700 {path}",
            location="path",
        )


def check_inner_directory(fd: int, name: str) -> None:
    """Refuse a directory inside a private one, into which others may have put something before that was private.

    The caller has opened it without following a symbolic link. `name` is for messages.

    Raises:
        NotPrivateError: It is another user's, or others can write to it.
    """
    status = os.fstat(fd)
    if status.st_uid != os.geteuid():
        raise NotPrivateError(
            errno.EPERM,
            f"{name} belongs to another user (uid {status.st_uid}), who may have put anything into it; remove it",
        )
    if status.st_mode & OTHERS_WRITE:
        raise NotPrivateError(
            errno.EPERM,
            f"{name} can be written to by others (mode {stat.S_IMODE(status.st_mode):04o}); remove it, or make sure "
            f"that nobody has put anything into it, and run: chmod -R go-w {name}",
        )


def check_file(fd: int, name: str, *, any_owner: bool = False) -> os.stat_result:
    """Refuse a file that may be somebody else's too, before it is written to, or believed, and set its mode to 0600.

    A hard link is refused, since who may make entries in a directory could have made one to a file that only this
    process may write to. The caller has opened it without following a symbolic link. `name` is for messages.
    With `any_owner`, owner and mode are not looked at, which the file system does not keep. Return its status.

    Raises:
        NotPrivateError: It is no regular file, another user's, or has further names.
        OSError: Its mode cannot be set.
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
    if not any_owner and stat.S_IMODE(status.st_mode) & OTHERS:
        os.fchmod(fd, FILE_MODE)
    return status
