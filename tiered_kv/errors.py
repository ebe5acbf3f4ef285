"""Every exception that this project raises on purpose.

    TieredKVError
    ├── ConfigError                 the stack's file, or a setting in it, cannot be used
    │   └── MissingExtraError       a tier's client library is not installed, or too old
    ├── TierError                   one tier, or its data, cannot be used
    │   ├── TierBusyError           another process owns the tier's storage
    │   ├── FormatError             data of another format version, another namespace, or not ours at all
    │   └── TierUnavailableError    the tier's server, disk or directory does not answer
    ├── ResourceError               the system gives no thread, descriptor or memory
    └── ShutdownError               the stack was used after it was closed

A block that cannot be read is never an exception: it is a miss, and it is counted.
"""

from __future__ import annotations

import errno
import importlib.metadata
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self


class TieredKVError(Exception):
    """Base of this project's errors."""


class ConfigError(TieredKVError):
    """A configuration cannot be used.

    Args:
        message: The wanted value, the found value, and the remedy.
        location: Path of the setting, such as "secondary.0.capacity"; empty for the whole file.
        file: The file of the setting; empty if it is in no file.
    """

    def __init__(self, message: str, *, location: str = "", file: str = "") -> None:
        self.message = message
        self.location = location
        self.file = file
        super().__init__(": ".join(part for part in (file, location, message) if part))


class MissingExtraError(ConfigError):
    """A library that a tier or codec needs is not installed, or too old.

    Args:
        feature: The feature that needs the library, such as "tier 'redis'".
        extra: The extra of this distribution that has the library; empty for a library of another distribution.
        install: The remedy for a library that no extra has, such as "pip install other-client".
        found: The library that lacks something, with its version. By default the installed versions of the extra's
            libraries are compared with the versions that the extra requires.
    """

    def __init__(
        self, feature: str, extra: str = "", *, install: str = "", location: str = "", found: str = ""
    ) -> None:
        self.extra = extra
        libraries = _libraries_of(extra)
        old = [f"{each}, and {found or version} is installed" for each, version in libraries if found or version]
        lack = " and ".join(old) or "a library that is not installed"
        of_extra = "" if install else f" (the extra '{extra}')"
        advice = install or _install_command([each for each, _ in libraries])
        super().__init__(f"{feature} needs {lack}" + (f"{of_extra}: {advice}" if advice else ""), location=location)


def _libraries_of(extra: str) -> list[tuple[str, str]]:
    """Return each requirement of an extra, from this distribution's metadata, and the installed version of its library
    if that version is too old, else ""."""
    try:
        needed = importlib.metadata.requires("tiered-kv") or []
    except importlib.metadata.PackageNotFoundError:  # the package's files are there, without the distribution
        return [("", "")]
    of_extra = re.compile(rf"\bextra *== *['\"]{re.escape(extra)}['\"]")
    libraries = [each.partition(";")[0].strip() for each in needed if of_extra.search(each.partition(";")[2])]
    return [(each, _too_old(each)) for each in libraries]


def is_too_old(extra: str) -> bool:
    """Return whether a library of an extra is installed, and older than this distribution wants."""
    return any(version for _, version in _libraries_of(extra))


def _too_old(library: str) -> str:
    """Return the installed version of a library such as "redis>=5.3" if that version is older; else ""."""
    name, _, least = library.partition(">=")
    try:
        found = importlib.metadata.version(name.strip())
    except importlib.metadata.PackageNotFoundError:
        return ""
    return found if _numbers(found) < _numbers(least) else ""


def _numbers(version: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", re.match(r"[\d.]*", version.strip())[0])]  # type: ignore[index]


def _install_command(libraries: list[str]) -> str:
    """Return the command that installs the libraries of an extra of this distribution; "" if there are none.

    The command names the libraries. With the extra's name, pip would look for this distribution in an index, which may
    have none of this name, or another one.
    """
    if libraries == [""]:
        return "install what the pyproject.toml of tiered-kv lists there"
    return f"pip install {' '.join(map(shlex.quote, libraries))}" if libraries else ""


class TierError(TieredKVError):
    """A tier cannot be opened or used.

    Args:
        message: What was expected, what was found, and what to do; a whole sentence, with the path or address, and
            without secrets: it is logged.
        tier: The tier's name in the stack.
        operation: The operation that failed, such as "open" or "store". The message names only "open".
    """

    def __init__(self, message: str, *, tier: str = "", operation: str = "") -> None:
        self.message = message
        self.tier = tier
        self.operation = operation
        what = "cannot be opened" if operation == "open" else ""
        where = " ".join(part for part in (tier and f"tier '{tier}'", what) if part)
        super().__init__(f"{where}: {message}" if where else message)


class TierBusyError(TierError):
    """Another process owns the tier's storage."""


class FormatError(TierError):
    """Data of another format version, of another namespace, or not this project's at all."""


class TierUnavailableError(TierError):
    """The tier's server, disk or directory does not answer."""


class ResourceError(TieredKVError):
    """The system gives no thread, descriptor or memory."""

    @classmethod
    def of(cls, what: str, error: BaseException) -> Self:
        """Return the error for `error`, which Python raised; `what` says what could not be done."""
        reason = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
        return cls(f"{what}: {reason}{remedy_of(error)}")


def remedy_of(error: BaseException) -> str:
    """Return the remedy if Python raised an exception for want of a thread, a descriptor or memory; "" for others."""
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return "; raise the limit of processes (ulimit -u, or pids.max of the container)"
    if isinstance(error, MemoryError):
        return _REMEDIES[errno.ENOMEM]
    return _REMEDIES.get(error.errno or 0, "") if isinstance(error, OSError) else ""


_REMEDIES = {
    errno.EMFILE: "; raise the limit of open files (ulimit -n)",
    errno.ENFILE: "; raise the system's limit of open files (sysctl fs.file-max)",
    errno.ENOMEM: "; free memory, or raise the limit of this process or its container",
}


@contextmanager
def needing_resources(what: str) -> Iterator[None]:
    """Raise a `ResourceError` in place of Python's exception if the system refuses a resource. `what` begins it."""
    try:
        yield
    except (OSError, MemoryError, RuntimeError) as error:
        raise ResourceError.of(what, error) from error


class ShutdownError(TieredKVError):
    """The object was used after it was shut down."""
