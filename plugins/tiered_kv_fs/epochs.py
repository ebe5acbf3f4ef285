"""The epoch of a namespace: the directory that its blocks are in now.

A reset of the cache is a new directory with a random name. Who opens the namespace joins the epoch that its file
names. Who has it open stays in its own until it is reset or opened again: after the weights of a model have changed,
other servers may go on storing blocks of the old ones for a while, and nobody who was reset may find those.
"""

from __future__ import annotations

import secrets

from tiered_kv_fs.layout import EPOCH, EPOCH_NAME
from tiered_kv_fs.posix import read_file, replace_file


def new_epoch() -> str:
    """Return the name of an epoch that has never been."""
    return secrets.token_hex(8)


def read_epoch(namespace_fd: int) -> str | None:
    """Return the epoch that the file in a namespace's open directory names, None if it is missing or damaged."""
    text = (read_file(EPOCH_NAME, 64, namespace_fd) or b"").decode("ascii", "replace").strip()
    return text if EPOCH.fullmatch(text) else None


def write_epoch(namespace_fd: int, epoch: str) -> None:
    """Make `epoch` the one that is joined from now on. Call it while the ledger is locked."""
    replace_file(namespace_fd, EPOCH_NAME, f"{epoch}\n".encode())
