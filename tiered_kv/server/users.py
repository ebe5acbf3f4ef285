"""The users that may connect to a server: its own user, root, and allowed ones, by the numbers that the kernel shows.

The command and the server make one, on the server's thread. If the map of a user namespace leaves users out, the kernel
shows all of them as one number, the overflow user (user_namespaces(7)). That number stands for no certain user, so it
is never allowed.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

from tiered_kv.errors import ConfigError

_ALL_USERS: Final = (1 << 32) - 1
_OVERFLOW: Final = 65534
_UID_MAP: Final = Path("/proc/self/uid_map")
_OVERFLOW_UID: Final = Path("/proc/sys/kernel/overflowuid")
_TO_DO: Final = (
    "Run the server and its engines in one user namespace, or give the engine's user a number in the server's (a wider "
    "uid map), and allow that number"
)


class Users:
    """The users that may connect.

    Args:
        allowed: Numbers of users that may connect, besides root and this process's user.

    Raises:
        ConfigError: One of `allowed` stands for all users that this user namespace leaves out.
    """

    def __init__(self, allowed: Collection[int] = ()) -> None:
        self._nobody = unmapped_user()
        if self._nobody in allowed:
            raise ConfigError(
                f"expected a user, found {self._nobody}: in the server's user namespace (/proc/self/uid_map) that is "
                f"each user without a number in it. {_TO_DO}",
                location="--allow-user",
            )
        self.numbers = {0, os.geteuid(), *allowed} - {self._nobody}

    def refusal(self, uid: int) -> str | None:
        """Return why a process of a user may not connect, and the remedy; None if it may."""
        if uid in self.numbers:
            return None
        if uid == self._nobody:
            return (
                "the server cannot tell who this process is: its user has no number in the server's user namespace "
                f"(/proc/self/uid_map), and is shown as {uid} there, as all others without one. {_TO_DO}"
            )
        return f"user {uid} may not use this cache; start the server with --allow-user {uid}"


def unmapped_user() -> int | None:
    """Return the number by which the kernel shows users that this user namespace leaves out; None if it has all."""
    try:
        mapped = sum(int(line.split()[2]) for line in _UID_MAP.read_text().splitlines())
    except (OSError, ValueError, IndexError):  # a kernel without user namespaces
        return None
    if mapped >= _ALL_USERS:
        return None
    try:
        return int(_OVERFLOW_UID.read_text())
    except (OSError, ValueError):
        return _OVERFLOW
