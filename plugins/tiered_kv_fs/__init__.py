"""The fs tier: one file a block, in a directory that several processes and machines may share.

Who calls it, and on which thread. The stack finds the tier by `tiered_kv_register_tiers` below. `tier.FsTier` is an
`AsyncTier` (`tiered_kv/toolkit/aio.py`): its coroutines run on the tier's event loop, which has a thread of its own.
Jobs and lookups call the file system on the tier's other threads (`FsTier._call`), since each call may wait. The
scheduler's thread only queues jobs and lookups, and notes uses.

What must stay true.

- A block's file is complete: it is written under a temporary name, and then gets its own
  (`blocks.BlockFiles._store_one`).
- A load verifies the whole record. A damaged file is deleted.
- A process fills only bytes that the ledger has granted to it. The ledger keeps all grants, and all files, within the
  capacity (`ledger`).
- Foreign files count in the capacity. The tier never changes them.

What is kept where. `directory` shows the tree. A block's path has the namespace's digest, the epoch and a digest of the
key (`names.block_path`). The file `ledger` has the bytes in use and the grants of all processes; a lock guards it
(`locks`). No process keeps an index: a lookup asks the file system (`BlockFiles.contains`).

A store (`FsTier.store_blocks`) takes bytes of the grant, and waits a limited time for more (`GrantClient.take`). A
thread writes the missing blocks, the last one of a prefix first (`BlockFiles.store`). The bytes that were not filled go
back to the grant (`GrantClient.settle`).

A load (`FsTier.load_blocks`): a thread reads each record and verifies it (`BlockFiles.load`). A file's modification
time is the time of its block's last use. Loads, and stores of a block that exists, renew it, at most once a minute.
Uses in a tier above renew it too (`FsTier.touch`), more often if files are removed young.

How room is made. `GrantClient` renews the grant every few seconds. It asks for a sweep if a survey is due, or the
capacity has no room for another grant. One process at a time holds the lock `sweep`. That process counts the
directory (a survey), and removes the least recently used files (`sweeper.DirectorySweeper.make_room`). On a full
disk, the oldest of a sample of blocks are deleted at once (`full_disk.free`).

What a restart does. The tier reads the marker, the namespace and the epoch's mark (`epoch.EpochFile`), and no block.
Lookups find all blocks of that epoch. A reset draws another epoch (`FsTier.reset_cache`). Sweeps remove the older files
with time, as files that nobody uses.
"""

from __future__ import annotations

from collections.abc import Iterable

from tiered_kv.config.hooks import TierType, hookimpl, imported
from tiered_kv_fs.metrics import METRICS
from tiered_kv_fs.settings import FsSettings


@hookimpl
def tiered_kv_register_tiers() -> Iterable[TierType]:
    return [
        TierType(
            "fs",
            FsSettings,
            imported("tiered_kv_fs.tier:FsTier", library="aiofiles", extra="fs"),
            "One file a block, in a directory that hosts may share.",
            imported("tiered_kv_fs.administration:FsAdministration"),
            is_shared=True,
            key_store=imported("tiered_kv_fs.simulation:FsKeys"),
            metrics=METRICS,
        )
    ]
