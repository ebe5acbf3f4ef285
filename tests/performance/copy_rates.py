"""Rates of copies beside those of the two tiers themselves: one JSON object.

    python tests/performance/copy_rates.py SOURCES TARGETS --block-bytes 1048576 --blocks 1024 --rounds 5

SOURCES and TARGETS are directories, on two disks: on one, reads and writes take each other's time. The directories of
the tiers below them are made and deleted. A redis-server is started on loopback. In each round, the target is emptied,
and stores all blocks from memory; the source loads all blocks into memory; the target is emptied again, and a copy
fills it from the source. The tiers are driven as the tiering manager drives them, all jobs at once, and a loaded block
is compared. A ratio of rates is the copy's over that of the slower of the two, in one round; one of CPU times compares
the copy with the store and the load together. GB = 1e9 bytes; CPU time is that of this process.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from tests.performance.bench import BlockRows, Sample, Taken, block_key, command_line, summary, timed
from tests.support.redis_servers import RedisServer
from tiered_kv.config.entries import tier_settings, tier_type_of
from tiered_kv.copying.copier import Copier
from tiered_kv.copying.source import BlocksToCopy, Selection
from tiered_kv.copying.target import TierTarget
from tiered_kv.tiering.base import TierSpec
from tiered_kv.tiering.factory import SecondaryTierFactory
from tiered_kv.toolkit.administration import TierAdministration

PAIRS = (("nvme", "nvme"), ("nvme", "fs"), ("fs", "redis"))
DIGEST = bytes(range(16))
BATCH = 32
WARM_ROUNDS = 1


class Ends:
    """The storages, each for a source and for a target."""

    def __init__(self, folders: Mapping[str, Path], server: RedisServer, block_bytes: int, blocks: int) -> None:
        self._folders, self._server = folders, server
        self._block_bytes, self._blocks = block_bytes, blocks
        self._rows = BlockRows(block_bytes, blocks)
        self._spec = TierSpec("copies", block_bytes, DIGEST, {"model": "copies"})

    def close(self) -> None:
        self._rows.region.close()
        for folder in self._folders.values():
            for path in folder.glob("copy-rates-*"):
                shutil.rmtree(path)

    def entry(self, kind: str, end: str) -> Mapping[str, object]:
        if kind == "redis":
            return {"type": kind, "url": self._server.url}
        capacity = 4 * self._blocks * self._block_bytes + (1 << 30)
        return {"type": kind, "path": str(self._folders[end] / f"copy-rates-{kind}-{end}"), "capacity": capacity}

    def empty(self, kind: str, end: str) -> None:
        if kind == "redis":
            self._server.empty()
        else:
            shutil.rmtree(str(self.entry(kind, end)["path"]), ignore_errors=True)

    def move(self, kind: str, end: str, *, is_store: bool) -> Taken:
        """Store all blocks from memory, or load them."""
        tier = SecondaryTierFactory.create(self._spec, self._rows.region.kv_view, self.entry(kind, end))
        try:
            move = self._rows.store if is_store else self._rows.load
            return move(tier, 0, self._blocks, BATCH)
        finally:
            tier.shutdown()

    def copy(self, source: str, target: str) -> Taken:
        """Copy all blocks; the opening and the end of the target do not count."""
        settings = tier_settings(self.entry(source, "source"))
        load = tier_type_of(settings).administration
        assert load is not None
        administration: TierAdministration = load()(settings)
        with closing(administration):
            keys = [block_key(number) for number in range(self._blocks)] if administration.needs_keys else None
            blocks = BlocksToCopy(administration, DIGEST.hex(), self._block_bytes, Selection(keys))
            opened = TierTarget(
                tier_settings(self.entry(target, "target")), DIGEST, self._spec.namespace, self._block_bytes
            )
            try:
                copier = Copier(blocks, opened, None)
                taken = timed(lambda: copier.run(blocks.plan()))
            finally:
                opened.close()
        assert copier.counts.copied == self._blocks, copier.counts
        return taken


def measure(ends: Ends, rounds: int, gigabytes: float) -> dict[str, object]:
    samples: defaultdict[str, list[Sample]] = defaultdict(list)
    for kind in {source for source, _ in PAIRS}:
        ends.move(kind, "source", is_store=True)
    for number in range(rounds + WARM_ROUNDS):
        for source, target in PAIRS:
            ends.empty(target, "target")
            stored = ends.move(target, "target", is_store=True)
            loaded = ends.move(source, "source", is_store=False)
            ends.empty(target, "target")
            copied = ends.copy(source, target)
            if number >= WARM_ROUNDS:
                name, slower_s = f"{source}_to_{target}", max(stored.wall_s, loaded.wall_s)
                samples[name].append(rates(gigabytes, copied.wall_s, copied.cpu_s))
                samples[f"{name}_by_hand"].append(rates(gigabytes, slower_s, stored.cpu_s + loaded.cpu_s))
    pairs = [(f"{source}_to_{target}", f"{source}_to_{target}_by_hand") for source, target in PAIRS]
    return summary(samples, pairs)


def rates(gigabytes: float, wall_s: float, cpu_s: float) -> Sample:
    return {"gb_per_s": gigabytes / wall_s, "cpu_s_per_gb": cpu_s / gigabytes}


def main() -> None:
    parser = command_line(__doc__, "sources", "targets", block_bytes=1 << 20, blocks=1024, rounds=5)
    arguments = parser.parse_args()
    folders = {"source": arguments.sources, "target": arguments.targets}
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        RedisServer(Path(folder)) as server,
        closing(Ends(folders, server, arguments.block_bytes, arguments.blocks)) as ends,
    ):
        measured = measure(ends, arguments.rounds, arguments.blocks * arguments.block_bytes / 1e9)
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
