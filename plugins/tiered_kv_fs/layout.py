"""The names in a shared directory.

    tiered-kv-fs.json                 format version: whose directory this is
    ledger                            what is in use, see ledger.py; flock(2) around every change
    sweep                             flock(2) by the one process that looks for room
    owners/<owner>                    one a process and tier, flock(2) as long as it lives; see owner.py
    <namespace>/namespace.json        the namespace in readable form
    <namespace>/epoch                 the epoch that who opens it joins; see epochs.py
    <namespace>/<epoch>/<shard>/<block>                     a block record
    <namespace>/<epoch>/<shard>/.<block>.<owner>.<n>.tmp    a block record being written, or removed
    .<namespace>.<n>.purged           a namespace's directory while it is being purged; see administration.py

<namespace> is the namespace's digest, <block> a digest of the key, <shard> its first byte: nothing that comes
from outside is ever part of a path. Whatever else lies there is foreign: never touched, but counted in the capacity.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from typing import Final

from tiered_kv.base import OffloadKey

FORMAT_VERSION: Final = 1

MARKER_NAME: Final = "tiered-kv-fs.json"
LEDGER_NAME: Final = "ledger"
SWEEP_NAME: Final = "sweep"
OWNERS_NAME: Final = "owners"
NAMESPACE_NAME: Final = "namespace.json"
EPOCH_NAME: Final = "epoch"

SHARD_HEX: Final = 2
_OWNER_HEX: Final = 16

OWNER: Final = re.compile(rf"[0-9a-f]{{{_OWNER_HEX}}}")
NAMESPACE: Final = re.compile(r"[0-9a-f]{32}")
EPOCH: Final = re.compile(r"[0-9a-f]{16}")
SHARD: Final = re.compile(rf"[0-9a-f]{{{SHARD_HEX}}}")
BLOCK: Final = re.compile(r"[0-9a-f]{32}")
TEMPORARY_BLOCK: Final = re.compile(r"\.[0-9a-f]{32}\.(?P<owner>[0-9a-f]{16})\.[0-9a-f]+\.tmp")
TEMPORARY: Final = re.compile(r"\.[a-z.-]+\.[0-9a-f]{16}\.tmp")
"""A small file on its way into place; see `posix.replace_file`."""

PURGED: Final = re.compile(r"\.(?P<namespace>[0-9a-f]{32})\.[0-9a-f]{16}\.purged")


_numbers = itertools.count()


def temporary_name(block: str, owner: str) -> str:
    """Return a name for a block's file before it is in place, or while it is removed; another one each time.

    If its owner ends meanwhile, it is swept as what the owner has left.
    """
    return f".{block}.{owner}.{next(_numbers):x}.tmp"


def block_name(key: OffloadKey, namespace_digest: bytes) -> str:
    """Return the file name of a block.

    BLAKE2b, where the record inside has an XXH3 of the same key: who can choose keys that collide in one does not
    find any that collide in both.
    """
    return hashlib.blake2b(key, digest_size=16, key=namespace_digest).hexdigest()
