"""The nvme tier: blocks in large segment files, in a directory on a local disk.

Who calls it, and on which thread. The stack finds the tier by `tiered_kv_register_tiers` below, which imports the
settings only. `tier.NvmeTier` adapts the store (`store.SegmentStore`) to the contract of secondary tiers. The
scheduler's thread calls `lookup`, `touch`, `submit_store`, `submit_load` and `reset_cache`: none of them does I/O, and
`lookup` takes no lock. The toolkit's worker threads (`tiered_kv/toolkit/blocking.py`) call `store_blocks` and
`load_blocks`. The reclaimer (`reclaimer.Reclaimer`) has one thread. A background task of the store writes resets.

What must stay true.

- One process owns the directory: `directory.SegmentDirectory` holds its lock, and refuses another namespace.
- The index names a block only after its bytes have been written.
- A load verifies the checksum of each block, or the tag of an encrypted one. A damaged block leaves the index, and is a
  miss.
- The tier adds no segment beyond the capacity, which counts every file in the directory
  (`segment.SegmentFiles.create`).
- `SegmentPool.changed` guards the segments and the index. No thread holds it across I/O.

What is kept where. On disk: `lock`, the marker `tiered-kv-nvme.json`, the file `epoch`, and `segment-*.kv`; while no
process has the directory open, also `index`, the saved index. A segment
is preallocated. It begins with a header page. Batches follow: each has a header with keys, offsets and checksums, and
the payloads of its blocks. A full segment ends with a summary of all its blocks. `layout` encodes them, and
docs/reference/formats-nvme.md describes them byte by byte. In memory: `pool.SegmentPool` has the segments and the
index, a `KeyTable` from key to place (a segment and an entry in it). A segment has its entries as they are encoded on
the disk, and the uses of its blocks in an array (`layout.EntryTable`). It has keys only until its summary is written:
from then on, the index finds a key by its hash and place. So a block takes no Python object, and less than 120 bytes.
`worth.Worth` learns from the uses. With `limits`, a table also has a number of its tenant for each block, 2 bytes, and
`tenants.SegmentShares` counts what each tenant has in each segment.

A store (`writer.BatchWriter.store`, a worker):

1. It leaves out the keys that the index has, and forms batches of at most 256 blocks.
2. `SegmentPool.reserve` gives the batch a place in the segment that stores fill, and waits a limited time for a free
   segment.
3. One vectored write puts header and payloads there. No store waits for a flush.
4. `SegmentPool.commit` enters the blocks into the index, unless the cache was reset meanwhile.

If the disk refuses this place but takes writes elsewhere (`probe.DiskProbe`), the batch goes to another segment.

A load (`reader.BlockReader.load`, a worker) looks the blocks up and pins their segments, under one lock. It reads
neighbouring blocks by one call, where possible straight into their rows. It verifies each, and unpins the segments.

How room is made. The reclaimer keeps two segments free. A segment from before a reset goes first. Otherwise the
reclaimer adds a segment while the capacity has room (`Reclaimer._make_room`). Then it takes a damaged segment, or the
segment whose loss costs least (`Worth.least`). It moves the best blocks, up to a quarter of the segment
(`reclaimer.survivors`), removes the others from the index, and writes a new header. With `limits`, tenants' shares
narrow the choice of the segment, and what they protect moves first (`tenants`). The same thread writes the
summaries of full segments (`SegmentFiles.seal`), and replaces files that somebody has deleted.

What a restart does. `recovery.recover` reads each segment's header and summary, on several threads, and then the
batches that no summary lists. It verifies every byte of such batches. It takes the index that a clean end has saved
(`saved_index`), if the segments are as they were then. Otherwise it builds the index from blocks of the current epoch,
all keys together, as arrays. It deletes files that it cannot use, or that exceed the capacity. The uses of
blocks are lost: the oldest blocks go first. Summaries say whose each block is; those of segments that were being filled
at a crash are nobody's.

What a reset does. `SegmentStore.reset` begins a new epoch with an empty index, at once. The background task writes the
epoch to its file (`epoch.DirectoryEpoch.sync`), and gives the memory of the old index back in slices. A batch of
another epoch holds no valid block.
"""

from __future__ import annotations

from collections.abc import Iterable

from tiered_kv.config.hooks import TierType, hookimpl, imported
from tiered_kv_nvme.metrics import METRICS, OF_TENANTS
from tiered_kv_nvme.settings import NvmeSettings


@hookimpl
def tiered_kv_register_tiers() -> Iterable[TierType]:
    return [
        TierType(
            "nvme",
            NvmeSettings,
            imported("tiered_kv_nvme.tier:NvmeTier"),
            "Segment files in a directory on a local disk.",
            imported("tiered_kv_nvme.administration:NvmeAdministration"),
            key_store=imported("tiered_kv_nvme.simulation:NvmeKeys"),
            metrics=(*METRICS, *OF_TENANTS),
        )
    ]
