"""The names in the shared directory, and the patterns of paths below it. `directory.py` shows the tree.

All files of this plugin use them, on any thread. A name that matches no pattern is foreign: it is never deleted.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from typing import Final

from tiered_kv.base import OffloadKey
from tiered_kv.toolkit.claimed import LOST_AND_FOUND, TEMPORARY

MARKER_NAME: Final = "tiered-kv-fs.json"
LOCK_NAME: Final = "lock"
LEDGER_NAME: Final = "ledger"
SWEEP_NAME: Final = "sweep"
NAMESPACE_NAME: Final = "namespace.json"
EPOCH_NAME: Final = "epoch"

BLOCK: Final = re.compile(r"[0-9a-f]{32}")
TEMPORARY_BLOCK: Final = re.compile(r"\.[0-9a-f]{32}\.(?P<owner>[0-9a-f]{16})\.[0-9a-f]+\.tmp")

# Paths below the shared directory.
NAMESPACE: Final = re.compile(r"[0-9a-f]{32}")
SHARED_PATH: Final = re.compile(
    "|".join((*map(re.escape, (MARKER_NAME, LOCK_NAME, LEDGER_NAME, SWEEP_NAME, LOST_AND_FOUND)), TEMPORARY.pattern))
)
"""The tier's files beside the namespaces' directories, and the file system's own."""

# Paths below a namespace's directory.
EPOCH: Final = re.compile(r"[0-9a-f]{16}")
SHARD: Final = re.compile(r"[0-9a-f]{2}")
_SHARD: Final = f"{EPOCH.pattern}/{SHARD.pattern}"
BLOCK_PATH: Final = re.compile(f"{_SHARD}/{BLOCK.pattern}")
TEMPORARY_PATH: Final = re.compile(f"{_SHARD}/{TEMPORARY_BLOCK.pattern}")
NAMESPACE_PATH: Final = re.compile(
    rf"namespace\.json|epoch|{TEMPORARY.pattern}|{EPOCH.pattern}|{_SHARD}|{BLOCK_PATH.pattern}|{TEMPORARY_PATH.pattern}"
)
"""Every path that the tier makes in a namespace's directory."""

_numbers = itertools.count()


def block_path(key: OffloadKey, namespace_digest: bytes) -> str:
    """Return a block's path in its epoch's directory.

    The name is a BLAKE2b of the key, and the record has an XXH3 of it. No two keys collide in both hashes.
    """
    name = hashlib.blake2b(key, digest_size=16, key=namespace_digest).hexdigest()
    return f"{name[:2]}/{name}"


def temporary_path(path: str, owner: str) -> str:
    """Return the path of a temporary file, in which `owner` writes a block first. Each call returns another path."""
    shard, _, name = path.rpartition("/")
    return f"{shard}/.{name}.{owner}.{next(_numbers):x}.tmp"
