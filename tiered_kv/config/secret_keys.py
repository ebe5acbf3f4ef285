"""Secret keys of 32 bytes, as `openssl rand -hex 32` makes them: read from a text or a file, and never shown."""

from __future__ import annotations

import os
import re
import stat

from tiered_kv.config.units import format_bytes
from tiered_kv.errors import ConfigError
from tiered_kv.permissions import OTHERS

KEY_BYTES = 32
KEY_FILE_BYTES_MAX = 1024

_KEY = re.compile(r"\s*([0-9A-Fa-f]{64})\s*")
_WANTED = f"expected a key: {KEY_BYTES} bytes as 64 hexadecimal digits, as `openssl rand -hex {KEY_BYTES}` prints them"


def parse_key(text: str) -> bytes:
    """Return the bytes of a key; raises `ConfigError` if it is none, without showing the text or its length."""
    if problem := problem_of_key(text):
        raise ConfigError(problem)
    return bytes.fromhex(text.strip())  # `fromhex` takes ASCII white space only, `_KEY` and `strip` any


def problem_of_key(text: str) -> str:
    """Return why `text` is no key, without showing it; empty if it is one."""
    return "" if _KEY.fullmatch(text) else _WANTED


def read_key_file(path: str | os.PathLike[str], *, location: str = "") -> bytes:
    """Return the key in a file of this user that is closed to all others, or of root for a group to read.

    `location` is its setting.

    Raises:
        ConfigError: The file cannot be read, is open to others, is larger than `KEY_FILE_BYTES_MAX`, or holds no key.
            The message shows neither the content nor the path: a user may have put a key in place of the path.
    """
    text = ""
    try:
        # Without blocking, so that a pipe is refused and not waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            problem = _refusal(os.fstat(descriptor))  # not of the path: the file may have been replaced
            if not problem:
                text = os.read(descriptor, KEY_FILE_BYTES_MAX).decode("ascii", "replace")
                problem = problem_of_key(text) and f"holds no key: {problem_of_key(text)}"
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:  # a path with a null character is a ValueError
        problem = f"cannot be opened: {getattr(error, 'strerror', None) or 'this is no path'}"
    if problem:
        raise ConfigError(f"the key file {problem}", location=location)
    return parse_key(text)


def _refusal(status: os.stat_result) -> str:
    """Return why a file must not hold a secret; empty if it may."""
    if not stat.S_ISREG(status.st_mode):
        return "is no regular file"
    # Kubernetes mounts a secret as root's, for the pod's group to read.
    is_mounted = status.st_uid == 0 and not status.st_mode & (OTHERS & ~stat.S_IRGRP)
    if status.st_uid != os.geteuid() and not is_mounted:
        return f"belongs to user {status.st_uid}, and this process is user {os.geteuid()}: it must be the process's own"
    if status.st_mode & OTHERS and not is_mounted:
        return f"has mode {stat.S_IMODE(status.st_mode):04o}: expected one that is closed to others, as by chmod 600"
    if status.st_size > KEY_FILE_BYTES_MAX:
        return f"is larger than {format_bytes(KEY_FILE_BYTES_MAX)}: expected a key and nothing else"
    return ""
