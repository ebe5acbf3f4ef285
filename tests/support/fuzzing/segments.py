"""Fuzzing of an nvme directory: it opens or is refused, and all blocks in its index are valid."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from pathlib import Path

from tests.support.fuzzing import Target
from tests.support.segment_map import PAGE_BYTES, seal, seal_summary
from tiered_kv.base import OffloadKey
from tiered_kv.errors import TierError
from tiered_kv.metrics.counters import count_of
from tiered_kv.testing.rig import Content, block_content, compressible_content, make_keys
from tiered_kv.toolkit.claimed import Identity
from tiered_kv.toolkit.codecs import CodecSet
from tiered_kv.toolkit.epoch import EpochMark
from tiered_kv_nvme.disk import Disk
from tiered_kv_nvme.sizing import Sizing
from tiered_kv_nvme.store import SegmentStore, StoreOptions

BLOCK_BYTES = 512
SEGMENT_BYTES = 32 << 10
NAMESPACE = bytes(range(16))
KEYS = make_keys(8, "fuzz")
_NAME = f"segment-{NAMESPACE[:4].hex()}-000000.kv"
_MARKER = "tiered-kv-nvme.json"
_EPOCH = EpochMark(0, "0" * 16).encode().ljust(PAGE_BYTES, b"\0")

_SEAL_HEADER, _SEAL_BATCHES, _SEAL_SUMMARY = 1, 2, 4
_SEGMENT, _FUZZ_MARKER, _FUZZ_EPOCH = 0, 8, 16


def make() -> Target:
    """Return the target: a byte for the file and the checksums that are made right, then the file."""
    seeds = []
    for codec in ("raw", "zstd"):
        segment = _made(codec)[_NAME]
        seeds += [bytes([mode]) + segment for mode in (0, _SEAL_HEADER, _SEAL_BATCHES, _SEAL_SUMMARY)]
        seeds.append(bytes([_SEAL_BATCHES]) + segment[:-PAGE_BYTES] + bytes(PAGE_BYTES))
    seeds.append(bytes([_FUZZ_MARKER]) + _made("raw")[_MARKER])
    seeds.append(bytes([_FUZZ_EPOCH]) + _EPOCH[:96])
    words = (b"TKVNSEG1", b"TKVNBAT1", b"TKVNSUM1", bytes(8), b"\xff" * 8, b"[" * 2000, b'"format": 2', b"null")
    return Target("fuzz/segment", tuple(seeds), _run, words)


@cache
def _made(codec: str) -> dict[str, bytes]:
    """Return the files of a directory with two batches of blocks, the same in each run."""
    with tempfile.TemporaryDirectory(prefix="tiered-kv-fuzz-") as name:
        path = Path(name) / "kv"
        path.mkdir(mode=0o700)
        _write(path / "epoch", _EPOCH)
        content = compressible_content if codec == "zstd" else block_content
        store = _opened(path, codec)
        for keys in (KEYS[:5], KEYS[5:]):
            _store(store, keys, content)
        store.close()
        return {each.name: each.read_bytes() for each in path.iterdir() if each.name in (_NAME, _MARKER)}


class _BoundedDisk(Disk):
    """A disk that refuses to read into much more memory than the file has bytes."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        wanted = sum(map(len, buffers))
        assert wanted <= os.fstat(fd).st_size + 2 * PAGE_BYTES, f"{wanted} bytes are made room for"
        return super().preadv(fd, buffers, offset)

    def datasync(self, fd: int) -> None:
        """Wait for no device: nothing here survives the input."""


def _opened(path: Path, codec: str = "raw") -> SegmentStore:
    sizing = Sizing.of(8 * SEGMENT_BYTES + (128 << 10), BLOCK_BYTES, SEGMENT_BYTES)
    options = StoreOptions(sizing, want_direct=False, codecs=CodecSet(codec), threads=1)
    identity = Identity(NAMESPACE, {"model": "fuzz"}, BLOCK_BYTES)
    return SegmentStore(str(path), identity, options, disk=_BoundedDisk())


def _run(data: bytes) -> None:
    mode, content = (data[0], data[1:]) if data else (0, b"")
    kind = mode & (_FUZZ_MARKER | _FUZZ_EPOCH)
    with tempfile.TemporaryDirectory(prefix="tiered-kv-fuzz-") as name:
        path = Path(name) / "kv"
        path.mkdir(mode=0o700)
        files = {"epoch": _EPOCH, **_made("raw")}
        if kind == _SEGMENT:
            files[_NAME] = _sealed(content, mode)
        else:
            files[_MARKER if kind == _FUZZ_MARKER else "epoch"] = content
        for file, text in files.items():
            _write(path / file, text)
        try:
            store = _opened(path)
        except TierError:
            assert kind != _SEGMENT, "a damaged segment refuses the directory"
            assert (path / _NAME).read_bytes() == files[_NAME], "a refused directory is changed"
            return
        with closing(store):
            _check(store, is_sealed=bool(mode & (_SEAL_BATCHES | _SEAL_SUMMARY)))


def _sealed(content: bytes, mode: int) -> bytes:
    """Return a segment with valid checksums where the mode asks for them."""
    if mode & _SEAL_HEADER and len(content) >= PAGE_BYTES:
        content = seal(content, 0, PAGE_BYTES)
    if mode & _SEAL_BATCHES:
        for at in range(PAGE_BYTES, len(content) - PAGE_BYTES + 1, PAGE_BYTES):
            if content[at : at + 8] == b"TKVNBAT1":
                size = int.from_bytes(content[at + 24 : at + 28], "little")
                content = seal(content, at, at + size if at + size <= len(content) else at + PAGE_BYTES)
    if mode & _SEAL_SUMMARY and len(content) >= PAGE_BYTES:
        content = seal_summary(content)
    return content


def _check(store: SegmentStore, *, is_sealed: bool) -> None:
    """Load all indexed blocks: each is verified, or counted as corrupt and removed from the index."""
    claimed = [OffloadKey(key) for key, _ in store.pool.index.places.items()]
    blocks = _memory(max(1, len(claimed)))[: len(claimed)]
    outcome = store.load(claimed, blocks)
    loaded = set(claimed) if outcome.successful_keys is None else set(outcome.successful_keys)
    for key, block in zip(claimed, blocks, strict=True):
        # A table with a valid checksum decides which key a block has: then it may be any stored block.
        allowed = _CONTENTS if is_sealed else {block_content(key, BLOCK_BYTES), compressible_content(key, BLOCK_BYTES)}
        assert key not in loaded or bytes(block) in allowed, f"wrong bytes for {key.hex()}"
    corrupt = count_of(store.stats(), "corrupt_blocks_total")
    assert corrupt == len(claimed) - len(loaded), f"{corrupt} are counted, {len(claimed) - len(loaded)} did not load"
    assert {key for key, _ in store.pool.index.places.items()} <= loaded, "what does not load is claimed"
    _store(store, KEYS, block_content)


def _store(store: SegmentStore, keys: Sequence[OffloadKey], content: Content) -> None:
    blocks = _memory(len(keys))
    for key, block in zip(keys, blocks, strict=True):
        block[:] = content(key, BLOCK_BYTES, 0)
    assert store.store(keys, blocks).successful_keys is None, "the directory takes no blocks"


_CONTENTS = {content(key, BLOCK_BYTES) for key in KEYS for content in (block_content, compressible_content)}


def _memory(count: int) -> list[memoryview]:
    flat = memoryview(mmap.mmap(-1, count * BLOCK_BYTES))
    return [flat[at : at + BLOCK_BYTES] for at in range(0, count * BLOCK_BYTES, BLOCK_BYTES)]


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o600)
