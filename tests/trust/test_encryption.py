"""Encrypted blocks in each tier, attacked from below: a damaged, moved, foreign or plain block is a counted miss.

Whoever attacks here can write into the storage and knows the formats: every checksum is right, so that only encryption
stands against it. The keys are the one thing that is not known.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import xxhash

from tests.support.doors import Door, FsDoor, MemoryDoor, RedisDoor, S3Door
from tests.support.figures import Figures, Profile
from tests.support.patient_nvme import patient_nvme
from tests.support.segment_map import BATCH_FIXED_BYTES, ENTRY_BYTES, PAGE_BYTES, SegmentMap, seal
from tiered_kv.base import OffloadKey
from tiered_kv.counters import count_of
from tiered_kv.testing.damage import RECORD_FIELDS, RECORD_HEADER_BYTES, seal_record
from tiered_kv.testing.redis_servers import redis_server
from tiered_kv.testing.rig import TierRig, block_content, compressible_content, make_keys
from tiered_kv.testing.s3_servers import missing_for_moto, moto_server
from tiered_kv.tiering.base import TierSpec
from tiered_kv.tiering.factory import SecondaryTierFactory
from tiered_kv.toolkit.codec_set import encrypting_codecs
from tiered_kv.toolkit.codecs import AES_ID, RAW_ID, ZSTD_AES_ID, ZSTD_ID, ZstdCodec, binding_of
from tiered_kv.toolkit.encryption import Cipher
from tiered_kv.toolkit.status import RecordStatus

__all__ = ["moto_server", "patient_nvme", "redis_server"]

pytestmark = [pytest.mark.trust, pytest.mark.slow, pytest.mark.usefixtures("patient_nvme")]

BLOCK_BYTES = 4096
SPEC = TierSpec("encryption", BLOCK_BYTES, bytes(range(16)), {"model": "encryption"})
OTHER_NAMESPACE = bytes(range(1, 17))
KEY_1, KEY_2, WRONG = "11" * 32, "22" * 32, "33" * 32
CODECS = {"aes-256-gcm": block_content, "zstd+aes-256-gcm": compressible_content}
HEAD_BYTES, TAG_BYTES = 40, 16
_ENTRY = struct.Struct("<QIHH16s")


@dataclass(frozen=True)
class Planted:
    """What an attacker puts into a block's place.

    Args:
        codec_id: As the record or entry says.
        payload: The payload.
    """

    codec_id: int
    payload: bytes


@dataclass
class Bench:
    """A tier that is opened again with other keys, and the attacker's way to its storage.

    Args:
        kind: The tier's type.
        entry: Its entry, without codec and keys.
        rig: The tier on its rig.
        door: Its storage; none for nvme, whose segment files are written while it is closed.
        settings: Codec and keys, as the next opening reads them.
    """

    kind: str
    entry: Mapping[str, object]
    settings: dict[str, object]
    rig: TierRig = field(init=False)
    door: Door | None = None

    def open(self, closing: ExitStack, content: Callable[[OffloadKey, int, int], bytes]) -> None:
        self.rig = TierRig(
            lambda spec, view: SecondaryTierFactory.create(
                spec, view, {"type": self.kind, **self.entry, **self.settings}
            ),
            num_blocks=512,
            block_bytes=BLOCK_BYTES,
            wait_s=60.0,
            spec=SPEC,
            content=content,
        )
        closing.callback(self.rig.close)

    def reopen(self, codec: str, **encryption: object) -> None:
        self.settings = {"codec": codec, "encryption": encryption}
        self.rig.reopen()

    def refused(self) -> int:
        """Return how many blocks were counted as unreadable, whatever the reason."""
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
        for key, (codec_id, payload) in ((key, (each.codec_id, each.payload)) for key, each in planted.items()):
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
        return sorted(Path(str(self.entry["path"])).glob("segment-*.kv"))


def _planted_segment(data: bytes, planted: Mapping[OffloadKey, Planted]) -> bytes:
    """Return a segment with other payloads, as one that a crash has left without its summary."""
    batches = SegmentMap(data).batches
    data = data[:-PAGE_BYTES] + bytes(PAGE_BYTES)
    for batch in batches:
        for number, (key, offset, stored_bytes) in enumerate(batch.entries):
            if key not in planted:
                continue
            codec_id, payload = planted[key].codec_id, planted[key].payload
            assert len(payload) <= stored_bytes, "there is no room for more here"
            data = data[:offset] + payload + data[offset + len(payload) :]
            at = batch.offset + BATCH_FIXED_BYTES + number * ENTRY_BYTES
            digest = xxhash.xxh3_128_digest(payload)
            entry = _ENTRY.pack(offset, len(payload), len(key), codec_id, digest)
            data = data[:at] + entry + data[at + ENTRY_BYTES :]
        data = seal(data, batch.offset, batch.offset + batch.header_bytes)
    return data


@pytest.fixture(scope="module", autouse=True)
def _moto_first(request: pytest.FixtureRequest) -> None:
    """Start what lasts for the session before a test begins, which would be taken for what it left behind."""
    if not missing_for_moto():
        request.getfixturevalue("moto_server")


Opened = Callable[[str, str], Bench]
"""Opens a tier of a type with a codec, on new storage, key 1 its only one."""


@pytest.fixture
def opened(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Opened]:
    with ExitStack() as closing:

        def open_bench(kind: str, codec: str) -> Bench:
            bench = Bench(kind, {}, {"codec": codec, "encryption": {"keys": {1: KEY_1}}})
            _place(bench, tmp_path / kind, request, closing)
            bench.open(closing, CODECS[codec])
            if kind == "memory":
                bench.door = MemoryDoor(bench.rig)
            return bench

        yield open_bench


def _place(bench: Bench, path: Path, request: pytest.FixtureRequest, closing: ExitStack) -> None:
    """Give a bench its storage."""
    bench.entry = {"path": str(path), "capacity": "64MiB"}
    if bench.kind == "memory":
        bench.entry = {"capacity": "64MiB"}
    elif bench.kind == "nvme":
        bench.entry = {**bench.entry, "segment": "1MiB"}
    elif bench.kind == "fs":
        bench.door = FsDoor(path, SPEC.namespace_digest)
    elif bench.kind == "redis":
        pytest.importorskip("redis", reason="redis-py is not installed")
        server = request.getfixturevalue("redis_server")
        bench.entry = {"url": server.url, "connect_timeout": "30s", "timeout": "60s"}
        bench.door = RedisDoor(server, SPEC.namespace_digest)
    else:
        pytest.importorskip("boto3", reason="boto3 is not installed")
        moto = request.getfixturevalue("moto_server")
        bucket = moto.make_bucket()
        bench.entry = {**moto.settings(bucket, prefix="kv", presence_ttl=0), "connections": 8, "request_timeout": "30s"}
        door = S3Door(moto, bucket, "kv", SPEC.namespace_digest)
        closing.callback(door.close)
        bench.door = door


TIERS = ("memory", "nvme", "fs", "redis", "s3")
SHARED = ("fs", "redis", "s3")


def attacks_on(key: OffloadKey, other: bytes, codec_id: int) -> list[Callable[[bytes], Planted]]:
    """Return what an attacker may make of an encrypted payload of `key`, given that of another block."""

    def flipped(at: int) -> Callable[[bytes], Planted]:
        return lambda own: Planted(codec_id, own[:at] + bytes([own[at] ^ 0x01]) + own[at:][1:])

    def flipped_from_the_end(at: int) -> Callable[[bytes], Planted]:
        return lambda own: Planted(codec_id, own[: len(own) - at] + bytes([own[-at] ^ 0x80]) + own[len(own) - at + 1 :])

    attacks = [flipped(at) for at in range(HEAD_BYTES)]
    attacks += [flipped_from_the_end(at) for at in range(1, TAG_BYTES + 1)]
    attacks += [flipped(HEAD_BYTES + step * (BLOCK_BYTES // 4 - 2 * HEAD_BYTES) // 8) for step in range(8)]
    attacks += [
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
        lambda own: Planted(codec_id, _sealed(key, OTHER_NAMESPACE, codec_id, KEY_1, 1)[: len(own)]),
        lambda own: Planted(codec_id, _sealed(key, SPEC.namespace_digest, codec_id, WRONG, 1)[: len(own)]),
        lambda own: Planted(codec_id, _sealed(key, SPEC.namespace_digest, codec_id, KEY_2, 2)[: len(own)]),
        lambda own: Planted(RAW_ID, bytes(BLOCK_BYTES)) if codec_id == AES_ID else Planted(ZSTD_ID, _zstd()),
    ]
    return attacks


def _sealed(key: OffloadKey, namespace_digest: bytes, codec_id: int, secret: str, key_id: int) -> bytes:
    """Return a block of zeros, encrypted for a namespace with a secret; with random bytes where they get compressed."""
    codec = encrypting_codecs(Cipher({key_id: bytes.fromhex(secret)}, key_id))[codec_id]
    assert not isinstance(codec, RecordStatus)
    content = CODECS[codec.name](key, BLOCK_BYTES, 0)
    draft = codec.draft(memoryview(content))
    target = bytearray(draft.payload_bytes)
    draft.write_into(memoryview(target), binding_of(namespace_digest, key))
    return bytes(target)


def _zstd() -> bytes:
    payload = ZstdCodec().encode(memoryview(bytes(BLOCK_BYTES)))
    assert payload is not None
    return bytes(payload)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("tier", TIERS)
def test_whoever_writes_into_the_storage_cannot_make_a_block(
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
    assert bench.rig.load(neighbours) == set(neighbours), "what nobody touched is there"


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
    with ExitStack() as closing:
        encryption = {"keys": {1: KEY_1, 2: KEY_2}, "write_key": 2}
        other = Bench(bench.kind, bench.entry, {"codec": codec, "encryption": encryption})
        other.open(closing, CODECS[codec])
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


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("tier", TIERS)
def test_the_thread_that_calls_a_tier_neither_encrypts_nor_decrypts(
    opened: Opened, tier: str, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tier whose methods return at once is called by the scheduler's thread."""
    worked: dict[str, set[int]] = {"encrypt_into": set(), "decrypt_into": set()}

    def note(name: str) -> None:
        original = getattr(Cipher, name)

        def noted(*arguments: Any) -> Any:  # Any: as the method that it stands for
            worked[name].add(threading.get_ident())
            return original(*arguments)

        monkeypatch.setattr(Cipher, name, noted)

    for name in worked:
        note(name)
    bench = opened(tier, codec)
    assert bench.rig.tier.is_nonblocking
    keys = make_keys(3)
    assert bench.rig.store(keys).success
    assert bench.rig.load(keys) == set(keys)
    assert all(worked.values()), "blocks were encrypted, and decrypted"
    assert threading.get_ident() not in worked["encrypt_into"] | worked["decrypt_into"]


@pytest.mark.parametrize("tier", SHARED)
def test_without_a_key_at_all_encrypted_blocks_are_misses_that_stay(
    opened: Opened, tier: str, figures: Figures
) -> None:
    bench = opened(tier, "aes-256-gcm")
    keys = make_keys(2)
    assert bench.rig.store(keys).success
    for codec in ("raw", "zstd"):
        bench.settings = {"codec": codec}
        bench.rig.reopen()
        before = bench.refused()
        loaded = bench.rig.load(keys)
        figures.add("encryption", len(keys), len(keys) - len(loaded), "no keys")
        assert loaded == set()
        assert bench.refused() - before == len(keys)
    bench.reopen("aes-256-gcm", keys={1: KEY_1})
    assert bench.rig.load(keys) == set(keys)
