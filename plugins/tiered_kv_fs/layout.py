"""The names in a shared directory.

    tiered-kv-fs.json                 the format version
    lock                              flock(2) while the ledger is read and written
    ledger                            bytes in use, and grants; see ledger.py
    sweep                             flock(2) by the one process that surveys, evicts or purges
    <namespace>/namespace.json        the namespace in readable form
    <namespace>/epoch                 the mark of the epoch; see tiered_kv/toolkit/epoch.py
    <namespace>/<epoch>/<shard>/<block>                     a block record
    <namespace>/<epoch>/<shard>/.<block>.<owner>.<n>.tmp    a block record while it is written
    .<namespace>.<n>.purged           a namespace's directory while it is purged

<namespace> is the namespace's digest, <block> a digest of the key, <shard> its first byte. No part of a key is part of
a path. Other files in the directory are foreign: the tier never changes them, but counts them.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from typing import Final

from tiered_kv.base import OffloadKey

FORMAT_VERSION: Final = 1

MARKER_NAME: Final = "tiered-kv-fs.json"
LOCK_NAME: Final = "lock"
LEDGER_NAME: Final = "ledger"
SWEEP_NAME: Final = "sweep"
NAMESPACE_NAME: Final = "namespace.json"
EPOCH_NAME: Final = "epoch"

NAMESPACE: Final = re.compile(r"[0-9a-f]{32}")
EPOCH: Final = re.compile(r"[0-9a-f]{16}")
SHARD: Final = re.compile(r"[0-9a-f]{2}")
BLOCK: Final = re.compile(r"[0-9a-f]{32}")
TEMPORARY_BLOCK: Final = re.compile(r"\.[0-9a-f]{32}\.(?P<owner>[0-9a-f]{16})\.[0-9a-f]+\.tmp")
_numbers = itertools.count()


def block_path(key: OffloadKey, namespace_digest: bytes) -> str:
    """Return a block's path in its epoch's directory.

    BLAKE2b, while the record inside has an XXH3 of the same key: keys that collide in one do not collide in both.
    """
    name = hashlib.blake2b(key, digest_size=16, key=namespace_digest).hexdigest()
    return f"{name[:2]}/{name}"


def temporary_path(path: str, owner: str) -> str:
    """Return the temporary path of a block while `owner` writes it; another one each time."""
    shard, _, name = path.rpartition("/")
    return f"{shard}/.{name}.{owner}.{next(_numbers):x}.tmp"
