"""A shared directory, claimed for one namespace by one owner."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from tiered_kv.errors import FormatError, TierUnavailableError
from tiered_kv.permissions import (
    NotPrivateError,
    check_directory,
    check_file,
    check_inner_directory,
    open_directory,
)
from tiered_kv_fs.epochs import new_epoch, read_epoch, write_epoch
from tiered_kv_fs.layout import (
    EPOCH_NAME,
    FORMAT_VERSION,
    LEDGER_NAME,
    MARKER_NAME,
    NAMESPACE,
    NAMESPACE_NAME,
    OWNERS_NAME,
    PURGED,
    SWEEP_NAME,
    TEMPORARY,
)
from tiered_kv_fs.ledger import Ledger, LedgerState
from tiered_kv_fs.owner import Owner, OwnerNote, read_owners, remove_owner
from tiered_kv_fs.posix import make_directory, opened, opened_directory, read_file, replace_file

OPENING_BYTES: Final = 64 << 10
"""Counted for each opening: its owner's file, and the small files and directories that it may make."""

_LOCK_TIMEOUT_S: Final = 5.0
_SMALL_FILE_BYTES_MAX: Final = 1 << 20
_LOST_AND_FOUND: Final = "lost+found"
"""Made by mkfs(8), and root's, whoever's the file system is."""
_OURS: Final = frozenset((MARKER_NAME, LEDGER_NAME, SWEEP_NAME, OWNERS_NAME))


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose blocks an owner stores.

    Args:
        digest: The namespace's digest, 16 bytes.
        namespace: The namespace in readable form.
        block_bytes: Size of a block.
    """

    digest: bytes
    namespace: Mapping[str, object]
    block_bytes: int


class Volume:
    """The directory as one owner has it open. It is made if it is missing, and refused if it is someone else's.

    The constructor and `claim` may wait for the file system. One thread.

    Args:
        path: Where it is.
        identity: Whose blocks this owner stores.
        tier: The tier's name, for messages.
        private: Refuse a directory that others can get at; see `tiered_kv.permissions`.

    Raises:
        ConfigError: It is a symbolic link, another user's, or open to others.
        FormatError: It is of another format version, or holds files and is not this tier's at all.
        TierUnavailableError: The file system does not let us, or has no locks.
    """

    def __init__(self, path: str, identity: Identity, *, tier: str = "", private: bool = True) -> None:
        self.path = os.path.abspath(os.path.expanduser(path))
        self.namespace = identity.digest.hex()
        self.namespace_path = f"{self.path}/{self.namespace}"
        self.owners_path = f"{self.path}/{OWNERS_NAME}"
        self.sweep_path = f"{self.path}/{SWEEP_NAME}"
        self.ledger = Ledger(f"{self.path}/{LEDGER_NAME}", _LOCK_TIMEOUT_S)
        self.ended_owners = 0
        """Owners that had ended without saying so, as found by this one."""
        self._identity = identity
        self._tier = tier
        self._is_private = private
        self._device: int | None = None
        try:
            self._device = self._check_access()
            self.owner, self.found_epoch = self._claim(None, None)
        except OSError as error:
            detail = "it has no working flock(2)" if error.errno in (errno.ENOLCK, errno.ENOTSUP) else str(error)
            if isinstance(error, NotPrivateError):
                detail = str(error.strerror)
            raise TierUnavailableError(
                f"the directory {self.path} cannot be used: {detail}", tier=tier, operation="open"
            ) from error

    def claim_again(self, epoch: str) -> None:
        """Make anew what somebody has removed while the directory was in use.

        If that was this owner's file, there is a new owner, without any grant.

        Raises:
            FormatError, OSError: As the constructor, unwrapped.
        """
        make_directory(self.path)  # not what is above it: another file system may have been mounted there
        self._check_access()
        former = self.owner
        self.owner, _ = self._claim(epoch, former)
        if self.owner is not former:
            former.close(remove_file=True)

    def reap(self, state: LedgerState) -> list[OwnerNote]:
        """Forget owners that have ended, do the resets that they left undone, and return those that live.

        Their grants leave the ledger's list and stay in its total, until the next count finds what became of them.
        """
        alive = []
        for note in read_owners(self.owners_path):
            if note.is_alive:
                alive.append(note)
                continue
            if note.has_lost_reset and not self._reset(note.namespace):
                continue  # somebody has to do it
            remove_owner(self.owners_path, note.name)
            self.ended_owners += 1
        names = {note.name for note in alive}
        for name in state.grants.keys() - names:
            del state.grants[name]
        return alive

    @contextmanager
    def opened_namespace(self, namespace: str = "") -> Iterator[int]:
        """Yield a descriptor of the directory of a namespace, by default the owner's, for calls relative to it.

        Raises:
            OSError: It is missing, a symbolic link, or somebody else's; or the file system does not let us.
        """
        path = f"{self.path}/{namespace}" if namespace else self.namespace_path
        with opened_directory(path) as fd:
            if self._is_private:
                check_inner_directory(fd, path)
            yield fd

    def has_namespace(self) -> bool:
        """Return whether the owner's namespace has its directory, and not a symbolic link in its place."""
        try:
            return stat.S_ISDIR(os.lstat(self.namespace_path).st_mode)
        except FileNotFoundError:
            return False

    def owner_names(self) -> set[str]:
        """Return the owners that have a file, those that ended without a word included; any thread."""
        return set(os.listdir(self.owners_path))

    def count_owners(self) -> int | None:
        """Return how many tiers share the directory, those that ended without a word included; any thread."""
        try:
            return len(os.listdir(self.owners_path))
        except OSError:
            return None

    def close(self, *, gives_up: bool) -> None:
        """Close the owner's file; with `gives_up` False it stays, since it has to tell of a reset."""
        self.owner.close(remove_file=gives_up)

    def _check_access(self) -> int:
        """Make the directory if it is missing; refuse it if others can get at it; return its device."""
        fd = open_directory(self.path)
        try:
            device = os.fstat(fd).st_dev
            if self._device not in (None, device):
                raise OSError(errno.ENODEV, "another file system is mounted there now", self.path)
            self._refuse_foreign(fd)
            if self._is_private:
                # Not of one that holds anything, be it what this tier's names are: others may have put it there.
                check_directory(fd, self.path, may_tighten=not set(os.listdir(fd)) - {_LOST_AND_FOUND})
            for name in (LEDGER_NAME, SWEEP_NAME):
                self._check_file(name, fd, self.path)
            if self._is_private:
                self._check_file(MARKER_NAME, fd, self.path)
            return device
        finally:
            os.close(fd)

    def _check_file(self, name: str, fd: int, path: str) -> None:
        """Refuse a file in the directory that is open at `fd` if it may be somebody else's; it may be missing."""
        with suppress(FileNotFoundError), opened(name, os.O_RDONLY, fd) as file_fd:
            check_file(file_fd, f"{path}/{name}", any_owner=not self._is_private)

    def _claim(self, epoch: str | None, owner: Owner | None) -> tuple[Owner, str]:
        """Check whose directory it is, and make what is missing; return the owner and its epoch."""
        with self._made(self.owners_path):
            pass
        made: Owner | None = None
        try:
            with self.ledger.locked() as state:
                self._check_marker()
                with self._made(self.namespace_path) as namespace_fd:
                    self._check_namespace(namespace_fd)
                    self.reap(state)
                    found = read_epoch(namespace_fd)
                    joined = epoch or found or new_epoch()
                    if found is None:  # else it is at least as new: another may have reset meanwhile
                        write_epoch(namespace_fd, joined)
                if self._is_private:
                    self._check_epoch(joined)
                if owner is None or not owner.is_present:
                    owner = made = Owner(self.owners_path, self.namespace)
                    made.note_epoch(joined, 0)
                    state.grants[made.name] = 0
                if state.total_bytes is not None:
                    state.add(OPENING_BYTES, self.namespace)
        except BaseException:
            if made is not None:
                made.close(remove_file=True)
            raise
        return owner, joined

    @contextmanager
    def _made(self, path: str) -> Iterator[int]:
        """Make a directory in this one if it is missing, and yield a descriptor of it, if it may be believed."""
        make_directory(path)
        if os.path.islink(path):
            raise self._format_error(f"{path} is a symbolic link; remove it")
        with opened_directory(path) as fd:
            if self._is_private:
                check_inner_directory(fd, path)
            yield fd

    def _check_epoch(self, epoch: str) -> None:
        """Refuse an epoch's directory that is not ours alone. The first block makes it; a stranger is found then."""
        with (
            suppress(FileNotFoundError, NotADirectoryError),
            self.opened_namespace() as namespace_fd,
            opened_directory(epoch, namespace_fd) as fd,
        ):
            check_inner_directory(fd, f"{self.namespace_path}/{epoch}")

    def _reset(self, namespace: str) -> bool:
        """Do a reset that an owner has left undone; return False where that is still to be done."""
        try:
            with self.opened_namespace(namespace) as namespace_fd:
                write_epoch(namespace_fd, new_epoch())
        except (FileNotFoundError, NotADirectoryError):
            return True  # with all of its blocks
        except NotPrivateError:
            return False  # nobody opens it, until its mode has been mended
        return True

    def _refuse_foreign(self, fd: int) -> None:
        """Refuse a directory that holds files and no marker, before anything is written into it.

        What a process makes before the marker may be left there: it may have been killed. That is its user's.
        """
        names = set(os.listdir(fd))
        if MARKER_NAME in names:
            return
        for name in sorted(names - {_LOST_AND_FOUND}):
            if name not in _OURS and not any(each.fullmatch(name) for each in (NAMESPACE, TEMPORARY, PURGED)):
                raise self._format_error(
                    f"{self.path} is not empty and not a directory of this tier (it holds {name!r}); "
                    "give an empty or a new directory"
                )
            if self._is_private:
                with suppress(FileNotFoundError):
                    self._refuse_planted(name, os.stat(name, dir_fd=fd, follow_symlinks=False).st_uid)

    def _refuse_planted(self, name: str, uid: int) -> None:
        if uid != os.geteuid():
            raise self._format_error(
                f"{self.path} has not been used yet, and holds {name!r} of another user (uid {uid}), who may have put "
                "anything into it; give an empty or a new directory"
            )

    def _check_marker(self) -> None:
        if read_version(self.path, self._tier) is None:
            fd = open_directory(self.path, make=False)
            try:
                self._refuse_foreign(fd)  # again: others may have put something there until the mode was set
                marker = {"format": FORMAT_VERSION, "tier": "fs"}
                # Flushed: a directory with an empty marker, which a power failure may leave, is nobody's any more.
                replace_file(fd, MARKER_NAME, _as_text(marker), flush=True)
            finally:
                os.close(fd)

    def _check_namespace(self, namespace_fd: int) -> None:
        """Note beside the blocks whose they are. Different digests have different directories already."""
        if self._is_private:
            for name in (NAMESPACE_NAME, EPOCH_NAME):
                self._check_file(name, namespace_fd, self.namespace_path)
        text = _read(NAMESPACE_NAME, namespace_fd)
        found = None if text is None else fields_of(text).get("block_bytes")
        if found is not None and found != self._identity.block_bytes:
            raise self._format_error(
                f"{self.namespace_path} holds blocks of {found} bytes, and these have {self._identity.block_bytes}; "
                "give blocks of another size another namespace or another directory"
            )
        if found is None:
            described = {
                "block_bytes": self._identity.block_bytes,
                "namespace_digest": self.namespace,
                "namespace": dict(self._identity.namespace),
            }
            replace_file(namespace_fd, NAMESPACE_NAME, _as_text(described))

    def _format_error(self, message: str) -> FormatError:
        return FormatError(message, tier=self._tier, operation="open")


def read_version(path: str, tier: str) -> int | None:
    """Return the format version of the directory at `path`, None if it has no marker.

    Raises:
        FormatError: It is not this release's, or cannot be read.
    """
    with opened_directory(path) as fd:
        text = _read(MARKER_NAME, fd)
    if text is None:
        return None
    version = fields_of(text).get("format")
    message = ""
    if version is None:
        message = f"{path}/{MARKER_NAME} cannot be read; if the blocks may go, delete the directory"
    elif version != FORMAT_VERSION:
        shown = version if isinstance(version, int) else "unknown"
        message = (
            f"{path} has format version {shown}, and this release reads version {FORMAT_VERSION}; "
            "use the release that wrote it, give another directory, or delete this one"
        )
    if message:
        raise FormatError(message, tier=tier, operation="open")
    return FORMAT_VERSION


def fields_of(text: bytes) -> dict[str, object]:
    """Return the fields of a small file, none if it cannot be read."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _read(name: str, dir_fd: int) -> bytes | None:
    """Return a small file's text; None if there is no such name."""
    text = read_file(name, _SMALL_FILE_BYTES_MAX, dir_fd)
    if text is None:
        with suppress(FileNotFoundError):
            os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
            return b""  # no regular file, or a very large one
    return text


def _as_text(fields: Mapping[str, object]) -> bytes:
    return (json.dumps(fields, indent=2, sort_keys=True, default=str) + "\n").encode()
