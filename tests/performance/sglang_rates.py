"""Throughput of our nvme tier as the storage of SGLang's HiCache, beside SGLang's own `file` backend.

    export PYTHONPATH=tests/support/sglang_cpu:.:plugins
    ENVIRONMENT/sglang/bin/python tests/performance/sglang_rates.py DIRECTORY --rounds 9 >table.md

DIRECTORY is on the disk to measure; `.ci/engines` builds the ENVIRONMENT. A host pool for keys and values has the
pages. Both sides are called as SGLang's threads call them, 128 pages at a time: ours by places in the pool, its own by
tensors that are copied out of the pool and back into it. Loads are measured from the disk, with nothing of it in the
page cache, and from the page cache, where our tier has `direct: false`. Stores are measured twice: one call, which the
page cache takes from `file`, and 32 of them without a pause, more than the kernel lets wait to be written. Our tier is
full then; what `file` stored is deleted after each round. The sides take turns within a round. A row has the median of
the rounds with the lowest and the highest, and the same of the ratio within a round. GB = 1e9 bytes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# The parts have set the variables that SGLang reads.
from sglang.srt.mem_cache.hicache_storage import HiCacheFile

from tests.performance.bench import command_line, heading, in_turn, ratios, row, shown
from tests.plugins.sglang.sglang_engine_program import save_model
from tests.plugins.sglang.sglang_program_parts import (
    PAGE,
    extra_config,
    fill,
    mha_pool,
    open_backend,
    pages_of,
    publish_engine,
    slots,
    storage_config,
)

PAGES = 128
LAYOUTS = ("page_first", "layer_first")
CALLS = 32
"""Stores without a pause, 256 MiB each."""
CAPACITY = "4GiB"
ROWS = {
    "store, one call": "ours",
    "store without a pause": "ours",
    "load from the disk": "ours",
    "load from the page cache": "ours, buffered",
}


class Own:
    """SGLang's `file` backend, as SGLang's threads use it: by whole pages that are copied."""

    def __init__(self, pool: Any, directory: Path) -> None:
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(directory)
        self.pool, self.backend = pool, HiCacheFile(storage_config({}))

    def store(self, keys: list[str], pages: Sequence[int]) -> bool:
        return bool(self.backend.batch_set(keys, [self.pool.get_data_page(page * PAGE) for page in pages]))

    def load(self, keys: list[str], pages: Sequence[int]) -> bool:
        found = self.backend.batch_get(keys, [self.pool.get_dummy_flat_data_page() for _ in keys])
        for page, content in zip(pages, found, strict=True):
            self.pool.set_from_flat_data_page(page * PAGE, content)
        return None not in found

    def close(self) -> None:
        return


class Ours:
    """Our backend with one nvme tier."""

    def __init__(self, pool: Any, directory: Path, direct: bool) -> None:
        tier = {"type": "nvme", "path": str(directory), "capacity": CAPACITY, "direct": direct}
        self.pool, self.backend = pool, open_backend(storage_config(extra_config([tier])), pool)

    def store(self, keys: list[str], pages: Sequence[int]) -> bool:
        return all(self.backend.batch_set_v1(keys, slots(self.pool, pages)))

    def load(self, keys: list[str], pages: Sequence[int]) -> bool:
        return all(self.backend.batch_get_v1(keys, slots(self.pool, pages)))

    def close(self) -> None:
        self.backend.close()


def measure(directory: Path, layout: str, rounds: int) -> dict[tuple[str, str], list[float]]:
    """Return GB/s by direction and side, one value a round; all pages that come back are compared."""
    pool = mha_pool(layout, layers=8, heads=8, width=128, pages=2 * PAGES + 1)
    fill(pool)
    first, second = range(PAGES), range(PAGES, 2 * PAGES)
    expected = pages_of(pool, first)
    gigabytes = sum(len(part) for page in expected for part in page) / 1e9
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    sides: dict[str, Ours | Own] = {
        "ours": Ours(pool, directory / "ours", True),
        "ours, buffered": Ours(pool, directory / "buffered", False),
        "file": Own(pool, directory / "file"),
    }
    for number in range(rounds + 1):
        keys = [f"{number * PAGES + page:064x}" for page in range(PAGES)]
        for name in in_turn(number, sides):
            stored_s = _timed(sides[name].store, keys, first)
            _leave_page_cache(directory)
            from_disk_s = _timed(sides[name].load, keys, second)
            assert pages_of(pool, second) == expected, name
            again_s = _timed(sides[name].load, keys, second)
            if number:  # the first makes files, memory and compiled code
                rates["store, one call", name].append(gigabytes / stored_s)
                rates["load from the disk", name].append(gigabytes / from_disk_s)
                rates["load from the page cache", name].append(gigabytes / again_s)
        for name in in_turn(number, ("file", "ours")):
            began_s = time.perf_counter()
            for call in range(1, CALLS + 1):
                assert sides[name].store([f"{call:032x}{key[32:]}" for key in keys], first)
            if number:
                rates["store without a pause", name].append(CALLS * gigabytes / (time.perf_counter() - began_s))
            _leave_page_cache(directory)
        shutil.rmtree(directory / "file")
        (directory / "file").mkdir()
    for side in sides.values():
        side.close()
    return rates


def _leave_page_cache(directory: Path) -> None:
    """Write back all files, and let the kernel forget them."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _timed(move: Callable[[list[str], Sequence[int]], bool], keys: list[str], pages: Sequence[int]) -> float:
    began_s = time.perf_counter()
    assert move(keys, pages)
    return time.perf_counter() - began_s


def main() -> None:
    arguments = command_line(__doc__, "directory", rounds=9).parse_args()
    print(heading("pages of 2 MiB", "ours", "SGLang's `file`", "ratio"))
    for layout in LAYOUTS:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as path:
            save_model(Path(path) / "model")
            publish_engine(Path(path) / "model")
            rates = measure(Path(path), layout, arguments.rounds)
        for what, name in ROWS.items():
            ours, own = rates[what, name], rates[what, "file"]
            print(row(f"{layout}, {what} (GB/s)", shown(ours), shown(own), shown(ratios(ours, own))), flush=True)


if __name__ == "__main__":
    main()
