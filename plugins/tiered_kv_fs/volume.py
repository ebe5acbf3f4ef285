"""A shared directory, claimed for one namespace by one owner."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tiered_kv.errors import FormatError, TierUnavailableError
from tiered_kv.permissions import NotPrivateError, check_directory, check_file, open_directory
from tiered_kv_fs.epochs import new_epoch, read_epoch, write_epoch
from tiered_kv_fs.layout import (
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
from tiered_kv_fs.owner import Owner, OwnerNote, read_owners
from tiered_kv_fs.posix import make_directory, opened, read_file, remove, replace_file

OPENING_BYTES: Final = 64 << 10
"""Counted for each opening: its owner's file, and the small files and directories that it may make."""

_LOCK_TIMEOUT_S: Final = 5.0
_SMALL_FILE_BYTES_MAX: Final = 1 << 20
_OURS: Final = frozenset((MARKER_NAME, LEDGER_NAME, SWEEP_NAME, OWNERS_NAME, "lost+found"))


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
        try:
            self._device = self._check_access(private)
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
        make_directory(self.path)
        if os.stat(self.path).st_dev != self._device:
            raise OSError(errno.ENODEV, "another file system is mounted there now", self.path)
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
            if note.has_lost_reset and os.path.isdir(f"{self.path}/{note.namespace}"):
                write_epoch(f"{self.path}/{note.namespace}", new_epoch())
            remove(f"{self.owners_path}/{note.name}")
            self.ended_owners += 1
        names = {note.name for note in alive}
        for name in state.grants.keys() - names:
            del state.grants[name]
        return alive

    def count_owners(self) -> int | None:
        """Return how many tiers share the directory, those that ended without a word included; any thread."""
        try:
            return len(os.listdir(self.owners_path))
        except OSError:
            return None

    def close(self, *, gives_up: bool) -> None:
        """Close the owner's file; with `gives_up` False it stays, since it has to tell of a reset."""
        self.owner.close(remove_file=gives_up)

    def _check_access(self, private: bool) -> int:
        """Make the directory if it is missing; refuse it if others can get at it; return its device."""
        fd = open_directory(self.path)
        try:
            self._refuse_foreign()
            if private:
                check_directory(fd, self.path, may_tighten=MARKER_NAME not in os.listdir(fd))
            for name in (LEDGER_NAME, SWEEP_NAME):
                try:
                    with opened(name, os.O_RDWR, fd) as file_fd:
                        check_file(file_fd, f"{self.path}/{name}", any_owner=not private)
                except FileNotFoundError:
                    continue
            return os.fstat(fd).st_dev
        finally:
            os.close(fd)

    def _claim(self, epoch: str | None, owner: Owner | None) -> tuple[Owner, str]:
        """Check whose directory it is, and make what is missing; return the owner and its epoch."""
        self._refuse_foreign()
        make_directory(self.owners_path)
        if os.path.islink(self.owners_path):
            raise self._format_error(f"{self.owners_path} is a symbolic link; remove it")
        with self.ledger.locked() as state:
            self._check_marker()
            self._check_namespace()
            self.reap(state)
            found = read_epoch(self.namespace_path)
            joined = epoch or found or new_epoch()
            if joined != found:
                write_epoch(self.namespace_path, joined)
            if owner is None or not owner.is_present:
                owner = Owner(self.owners_path, self.namespace)
                owner.note_epoch(joined, 0)
                state.grants[owner.name] = 0
            if state.total_bytes is not None:
                state.add(OPENING_BYTES, self.namespace)
        return owner, joined

    def _refuse_foreign(self) -> None:
        """Refuse a directory that holds files and no marker, before anything is written into it."""
        names = set(os.listdir(self.path))
        ours = (NAMESPACE, TEMPORARY, PURGED)
        strangers = sorted(name for name in names - _OURS if not any(each.fullmatch(name) for each in ours))
        if MARKER_NAME not in names and strangers:
            raise self._format_error(
                f"{self.path} is not empty and not a directory of this tier (it holds {strangers[0]!r}); "
                "give an empty or a new directory"
            )

    def _check_marker(self) -> None:
        if read_version(self.path, self._tier) is None:
            self._refuse_foreign()
            marker = {"format": FORMAT_VERSION, "tier": "fs"}
            # Flushed: a directory with an empty marker, which a power failure may leave, is nobody's any more.
            replace_file(self.path, MARKER_NAME, _as_text(marker), flush=True)

    def _check_namespace(self) -> None:
        """Note beside the blocks whose they are. Different digests have different directories already."""
        make_directory(self.namespace_path)
        if os.path.islink(self.namespace_path):
            raise self._format_error(f"{self.namespace_path} is a symbolic link; remove it")
        text = _read(self.namespace_path, NAMESPACE_NAME)
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
            replace_file(self.namespace_path, NAMESPACE_NAME, _as_text(described))

    def _format_error(self, message: str) -> FormatError:
        return FormatError(message, tier=self._tier, operation="open")


def read_version(path: str, tier: str) -> int | None:
    """Return the format version of the directory at `path`, None if it has no marker.

    Raises:
        FormatError: It is not this release's, or cannot be read.
    """
    text = _read(path, MARKER_NAME)
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


def _read(directory: str, name: str) -> bytes | None:
    """Return a small file's text; None if there is no such name."""
    text = read_file(f"{directory}/{name}", _SMALL_FILE_BYTES_MAX)
    if text is None and os.path.lexists(f"{directory}/{name}"):
        return b""  # no regular file, or a very large one
    return text


def _as_text(fields: Mapping[str, object]) -> bytes:
    return (json.dumps(fields, indent=2, sort_keys=True, default=str) + "\n").encode()
