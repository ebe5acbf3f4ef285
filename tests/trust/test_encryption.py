"""Encrypted blocks in each tier, attacked in the storage: a damaged, moved, foreign or plain block is a counted miss.

The attacker writes into the storage and knows all but the keys: every checksum is right, so only encryption helps.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import xxhash

from tests.support.damage import RECORD_FIELDS, RECORD_HEADER_BYTES, seal_record
from tests.support.figures import Figures, Profile
from tests.support.places import Place, PlaceOf
from tests.support.segment_map import BATCH_FIXED_BYTES, ENTRY_BYTES, PAGE_BYTES, SegmentMap, seal
from tiered_kv.base import OffloadKey
from tiered_kv.metrics.counters import count_of
from tiered_kv.testing.rig import block_content, compressible_content, make_keys
from tiered_kv.tiering.base import TierSpec
from tiered_kv.toolkit.codecs import AES_ID, RAW_ID, ZSTD_AES_ID, ZSTD_ID, CodecSet, binding_of
from tiered_kv.toolkit.encryption import Cipher
from tiered_kv.toolkit.zstd import Zstd

pytestmark = [pytest.mark.trust, pytest.mark.slow, pytest.mark.usefixtures("patient_nvme")]

BLOCK_BYTES = 4096
SPEC = TierSpec("encryption", BLOCK_BYTES, bytes(range(16)), {"model": "encryption"})
OTHER_NAMESPACE = bytes(range(1, 17))
KEY_1, KEY_2, WRONG = "11" * 32, "22" * 32, "33" * 32
CODECS = {"aes-256-gcm": block_content, "zstd+aes-256-gcm": compressible_content}
HEAD_BYTES, TAG_BYTES = 40, 16
_ENTRY = struct.Struct("<QIHH16s")


class Planted(NamedTuple):
    """A block's codec and payload, written by an attacker."""

    codec_id: int
    payload: bytes


class Bench:
    """A tier that is opened again with other keys, and the attacker's way to its storage."""

    def __init__(self, place: Place, codec: str, **encryption: object) -> None:
        self.place = place
        self.kind = place.kind
        place.entry |= {"codec": codec, "encryption": encryption}
        self.rig = place.open(SPEC, CODECS[codec])
        self.door = None if self.kind == "nvme" else place.door(self.rig)

    def reopen(self, codec: str, **encryption: object) -> None:
        self.place.entry |= {"codec": codec, "encryption": encryption}
        self.rig.reopen()

    def refused(self) -> int:
        """Return how many blocks were counted as unreadable, for any reason."""
        counted = self.rig.tier.stats()
        if self.kind == "redis":
            return count_of(counted, "failed_blocks_total", "load")
        return count_of(counted, "corrupt_blocks_total") + count_of(counted, "unreadable_blocks_total")

    def payloads(self, keys: Sequence[OffloadKey]) -> dict[OffloadKey, bytes]:
        """Return what is stored for the keys, without headers."""
        if self.door is None:
            self.rig.tier.shutdown()  # which writes what is missing; `plant` opens the tier again
            found = {}
            for path in self._segments():
                data = path.read_bytes()
                for batch in SegmentMap(data).batches:
                    found.update({key: data[at : at + size] for key, at, size in batch.entries})
            return {key: found[key] for key in keys}
        records = {key: self.door.read(key) for key in keys}
        return {key: record[RECORD_HEADER_BYTES:] for key, record in records.items() if record is not None}

    def plant(self, planted: Mapping[OffloadKey, Planted]) -> None:
        """Put payloads into blocks' places, with every checksum right."""
        if self.door is None:
            for path in self._segments():
                path.write_bytes(_planted_segment(path.read_bytes(), planted))
            self.rig.reopen()
            return
        for key, (codec_id, payload) in planted.items():
            record = self.door.read(key)
            assert record is not None
            header = record[:RECORD_HEADER_BYTES]
            encrypted = codec_id in (AES_ID, ZSTD_AES_ID)
            for name, value in (
                ("codec", codec_id),
                ("key id", int.from_bytes(payload[:4], "little") if encrypted else 0),
                ("payload length", len(payload)),
            ):
                header = next(each for each in RECORD_FIELDS if each.name == name).written(header, value)
            self.door.write(key, seal_record(header + payload))

    def _segments(self) -> list[Path]:
        return sorted(self.place.path.glob("segment-*.kv"))


def _planted_segment(data: bytes, planted: Mapping[OffloadKey, Planted]) -> bytes:
    """Return a segment with other payloads, as one that a crash has left without its summary."""
    batches = SegmentMap(data).batches
    data = data[:-PAGE_BYTES] + bytes(PAGE_BYTES)
    for batch in batches:
        for number, (key, offset, stored_bytes) in enumerate(batch.entries):
            if key not in planted:
                continue
            codec_id, payload = planted[key]
            assert len(payload) <= stored_bytes, "there is no room for more here"
            data = data[:offset] + payload + data[offset + len(payload) :]
            at = batch.offset + BATCH_FIXED_BYTES + number * ENTRY_BYTES
            digest = xxhash.xxh3_128_digest(payload)
            entry = _ENTRY.pack(offset, len(payload), len(key), codec_id, digest)
            data = data[:at] + entry + data[at + ENTRY_BYTES :]
        data = seal(data, batch.offset, batch.offset + batch.header_bytes)
    return data


Opened = Callable[[str, str], Bench]
"""Opens a tier of a type with a codec, on new storage, key 1 its only one."""


@pytest.fixture
def opened(place_of: PlaceOf) -> Opened:
    return lambda kind, codec: Bench(place_of(kind), codec, keys={1: KEY_1})


TIERS = ("memory", "nvme", "fs", "redis", "s3")
SHARED = ("fs", "redis", "s3")


def attacks_on(key: OffloadKey, other: bytes, codec_id: int) -> list[Callable[[bytes], Planted]]:
    """Return what an attacker may make of an encrypted payload of `key`, given that of another block."""

    def flipped(at: int) -> Callable[[bytes], Planted]:
        return lambda own: Planted(codec_id, own[: at % len(own)] + bytes([own[at] ^ 0x81]) + own[at % len(own) :][1:])

    def made_with(secret: str, key_id: int, namespace: bytes = SPEC.namespace_digest) -> Callable[[bytes], Planted]:
        return lambda own: Planted(codec_id, _sealed(key, namespace, codec_id, secret, key_id)[: len(own)])

    zeros = bytes(BLOCK_BYTES)
    plain = Planted(RAW_ID, zeros) if codec_id == AES_ID else Planted(ZSTD_ID, Zstd().compress(memoryview(zeros)))
    return [
        *(flipped(at) for at in range(-TAG_BYTES, HEAD_BYTES)),
        *(flipped(HEAD_BYTES + step * (BLOCK_BYTES // 4 - 2 * HEAD_BYTES) // 8) for step in range(8)),
        lambda own: Planted(codec_id, other[: len(own)]),  # another block's, whole
        lambda own: Planted(codec_id, other[:HEAD_BYTES] + own[HEAD_BYTES:]),  # under another's nonce
        lambda own: Planted(codec_id, own[:HEAD_BYTES] + other[HEAD_BYTES : len(own)]),  # another's text
        lambda own: Planted(codec_id, own[:-TAG_BYTES] + other[-TAG_BYTES:]),  # another's tag
        lambda own: Planted(codec_id, bytes(len(own))),
        lambda own: Planted(codec_id, own[:4] + bytes(len(own) - 4)),
        lambda own: Planted(AES_ID + ZSTD_AES_ID - codec_id, own),  # the other codec's number
        lambda own: Planted(codec_id, own[:-1]),
        lambda own: Planted(codec_id, own[: HEAD_BYTES + TAG_BYTES]),
        lambda own: Planted(codec_id, own[:3]),
        made_with(KEY_1, 1, OTHER_NAMESPACE),
        made_with(WRONG, 1),
        made_with(KEY_2, 2),
        lambda own: plain,
    ]


def _sealed(key: OffloadKey, namespace_digest: bytes, codec_id: int, secret: str, key_id: int) -> bytes:
    """Return a block of zeros, encrypted for a namespace with a secret; with random bytes where they get compressed."""
    name = "aes-256-gcm" if codec_id == AES_ID else "zstd+aes-256-gcm"
    content = CODECS[name](key, BLOCK_BYTES, 0)
    draft = CodecSet(name, Cipher({key_id: bytes.fromhex(secret)}, key_id)).draft(memoryview(content))
    target = bytearray(draft.payload_bytes)
    draft.write_into(memoryview(target), binding_of(namespace_digest, key))
    return bytes(target)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("tier", TIERS)
def test_an_attacker_who_writes_into_the_storage_cannot_make_a_block(
    opened: Opened, tier: str, codec: str, profile: Profile, figures: Figures
) -> None:
    bench = opened(tier, codec)
    codec_id = AES_ID if codec == "aes-256-gcm" else ZSTD_AES_ID
    (other,) = make_keys(1, "other")
    numbers = range(len(attacks_on(other, bytes(BLOCK_BYTES // 4), codec_id)))
    if tier == "s3" and profile is Profile.SHORT:  # half of them with each codec: requests take their time
        numbers = numbers[list(CODECS).index(codec) :: 2]
    keys, neighbours = make_keys(len(numbers), "victim"), make_keys(4, "neighbour")
    assert bench.rig.store([*keys, *neighbours, other]).success
    payloads = bench.payloads([*keys, other])
    planted: dict[OffloadKey, Planted] = {}
    for number, key in zip(numbers, keys, strict=True):
        planted[key] = attacks_on(key, payloads[other], codec_id)[number](payloads[key])
        assert planted[key] != Planted(codec_id, payloads[key]), f"attack {number} did nothing"
    bench.plant(planted)
    before = bench.refused()
    loaded = bench.rig.load(list(planted))
    broken = [number for number, key in zip(numbers, planted, strict=True) if key in loaded]
    figures.add("encryption", len(planted), len(planted) - len(broken), "all five tiers")
    assert not broken, f"{tier}: attacks {broken} of attacks_on gave a block"
    assert bench.refused() - before == len(planted), "each was counted"
    assert bench.rig.load(neighbours) == set(neighbours), "untouched blocks load"


@pytest.mark.parametrize("tier", TIERS[1:])
def test_a_rotation_loses_nothing_until_the_old_key_is_dropped(opened: Opened, tier: str, figures: Figures) -> None:
    codec = "aes-256-gcm"
    bench = opened(tier, codec)
    count = 2 if tier == "s3" else 5  # whose requests take their time
    old, new, plain = make_keys(count, "old"), make_keys(count, "new"), make_keys(count, "plain")
    assert bench.rig.store(old).success
    bench.reopen(codec, keys={1: KEY_1, 2: KEY_2}, write_key=2)
    assert bench.rig.load(old) == set(old), "the old key is there to read with"
    assert bench.rig.store(new).success
    tried, lost = 0, 0
    for keys, readable in (
        ({2: KEY_2}, new),  # the old key dropped
        ({1: WRONG, 2: KEY_2}, new),  # another key under its id
        ({1: KEY_2, 2: KEY_1}, []),  # exchanged
        ({3: KEY_1}, []),  # the right key under another id
    ):
        bench.reopen(codec, keys=keys, write_key=max(keys))
        before = bench.refused()
        loaded = bench.rig.load([*old, *new])
        unreadable = len(old) + len(new) - len(readable)
        tried += unreadable
        lost += unreadable - len({*old, *new} - {*readable} - loaded)
        assert loaded == set(readable)
        assert bench.refused() - before == unreadable, "each was counted"
    figures.add("encryption", tried, tried - lost, "wrong keys")
    # Turned off: what is encrypted is read, and what is stored is plain.
    bench.reopen("raw", keys={1: KEY_1, 2: KEY_2}, write_key=2)
    assert bench.rig.load([*old, *new]) == {*old, *new}, "others could have the keys: it was all left there"
    assert bench.rig.store(plain).success
    assert bench.rig.load(plain) == set(plain)
    # On again: plain blocks are read only where that is asked for.
    bench.reopen(codec, keys={1: KEY_1, 2: KEY_2}, write_key=2, accept_plain=True)
    assert bench.rig.load([*old, *new, *plain]) == {*old, *new, *plain}
    bench.reopen(codec, keys={1: KEY_1, 2: KEY_2}, write_key=2)
    before = bench.refused()
    loaded = bench.rig.load([*old, *new, *plain])
    figures.add("encryption", len(plain), len({*plain} - loaded), "plain blocks")
    assert loaded == {*old, *new}
    assert bench.refused() - before == len(plain)
    assert bench.rig.store(plain).success
    assert bench.rig.load(plain) == set(plain), "they have been stored again, encrypted"


@pytest.mark.parametrize("tier", SHARED)
def test_processes_in_the_middle_of_a_rotation_read_each_other_s_blocks(
    opened: Opened, tier: str, figures: Figures
) -> None:
    """One writes with the old key and one with the new, at the same time, some of the same blocks."""
    codec = "aes-256-gcm"
    bench = opened(tier, codec)
    bench.reopen(codec, keys={1: KEY_1, 2: KEY_2}, write_key=1)
    other = Bench(bench.place, codec, keys={1: KEY_1, 2: KEY_2}, write_key=2)
    common, first, second = make_keys(6, "common"), make_keys(4, "first"), make_keys(4, "second")
    jobs = [
        (rig, rig.submit_store([*own, *common[:3]]), rig.submit_store(common[3:]))
        for rig, own in ((bench.rig, first), (other.rig, second))
    ]
    assert all(result.success for rig, *submitted in jobs for result in rig.wait(submitted))
    keys = [*common, *first, *second]
    loaded = [rig.load(keys) for rig in (bench.rig, other.rig)]
    figures.add("encryption", 2 * len(keys), sum(map(len, loaded)), "in the middle of a rotation")
    assert loaded == [set(keys)] * 2
    assert bench.refused() == other.refused() == 0
