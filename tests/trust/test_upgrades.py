"""What earlier releases stored loads today; what other versions of the format left is refused, and left alone.

`golden/make_golden.py` made the golden files, and says when to make others.
"""

from __future__ import annotations

import base64
import json
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.doors import Door, FsDoor, MemoryDoor, RedisDoor, S3Door
from tests.support.figures import Figures
from tests.support.patient_nvme import patient_nvme
from tests.support.segment_map import PAGE_BYTES, SEGMENT_FIELDS, seal
from tiered_kv.counters import count_of
from tiered_kv.errors import FormatError
from tiered_kv.testing.damage import RECORD_FIELDS, RECORD_HEADER_BYTES, seal_record
from tiered_kv.testing.redis_servers import PATIENT as REDIS_PATIENT
from tiered_kv.testing.redis_servers import redis_server
from tiered_kv.testing.rig import OpenTier, TierRig, block_content, compressible_content, make_keys
from tiered_kv.testing.s3_servers import missing_for_moto, moto_server
from tiered_kv.tiering.base import TierSpec
from tiered_kv.tiering.keyed_names import with_keyed_names
from tiered_kv.toolkit.codecs import AES_ID

__all__ = ["moto_server", "patient_nvme", "redis_server"]

pytestmark = [pytest.mark.trust, pytest.mark.slow, pytest.mark.usefixtures("patient_nvme")]

GOLDEN = Path(__file__).parent / "golden"
PATIENT = {"lookup_timeout": "60s"}
"""A lookup that is a miss because the machine is busy would look like a block that is not found any more."""
ROW = "upgrades"
OTHER_VERSIONS = (0, 2, 65535)
BLOCK_BYTES = 512
SPEC = TierSpec("golden", BLOCK_BYTES, bytes(range(16)), {"model": "golden", "tenant": "ä"})
CONTENTS = {"raw": block_content, "zstd": compressible_content}
ENCRYPTED = {"aes-256-gcm": block_content, "zstd+aes-256-gcm": compressible_content}
ENCRYPTION = {"keys": {7: "a7" * 32}, "write_key": 7}
NAME_KEY = bytes(range(32))
"""What `golden/make_golden.py` encrypted and named with."""
RECORD_TIERS = ("memory", "fs", "redis", "s3")
STORED_TIERS = ("nvme", "fs", "redis", "s3")
RECORD_MAGIC = b"\x89TKVREC\n"


@pytest.fixture(scope="module", autouse=True)
def _moto_first(request: pytest.FixtureRequest) -> None:
    """Start what lasts for the session before a test begins, which would be taken for what it left behind."""
    if not missing_for_moto():
        request.getfixturevalue("moto_server")


class Bench:
    """A storage, and tiers on it.

    Args:
        kind: Which tier.
        tmp_path, request: The test's.
        closing: Ends what was opened.
    """

    def __init__(self, kind: str, tmp_path: Path, request: pytest.FixtureRequest, closing: ExitStack) -> None:
        self.kind = kind
        self.path = tmp_path / "kv"
        self._closing = closing
        self._more: dict[str, object] = {}
        if kind == "redis":
            pytest.importorskip("redis", reason="redis-py is not installed")
            self.redis = request.getfixturevalue("redis_server")
        if kind == "s3":
            pytest.importorskip("boto3", reason="boto3 is not installed")
            self.s3 = request.getfixturevalue("moto_server")
            self.bucket = self.s3.make_bucket()
            self.client = self.s3.client()
            closing.callback(self.client.close)

    def restore(self, stored: Mapping[str, bytes]) -> None:
        """Make the storage what it was."""
        for name, data in stored.items():
            if self.kind == "redis":
                self.redis.set(bytes.fromhex(name), data)
            elif self.kind == "s3":
                self.client.put_object(Bucket=self.bucket, Key=name, Body=data)
            else:
                path = self.path / name
                for parent in reversed(path.relative_to(self.path.parent).parents[:-1]):
                    (self.path.parent / parent).mkdir(mode=0o700, exist_ok=True)
                path.write_bytes(data)
                path.chmod(0o600)

    def stored(self) -> dict[str, bytes]:
        """Return what the storage holds, but for what belongs to processes."""
        if self.kind in ("redis", "s3"):
            return dict(self.door().snapshot())
        own = {"lock", "sweep", "ledger"}
        files = [path for path in self.path.rglob("*") if path.is_file()]
        return {str(path.relative_to(self.path)): path.read_bytes() for path in files if path.name not in own}

    def door(self, rig: TierRig | None = None) -> Door:
        digest = SPEC.namespace_digest
        if self.kind == "memory":
            assert rig is not None
            return MemoryDoor(rig)
        if self.kind == "fs":
            return FsDoor(self.path, digest)
        if self.kind == "redis":
            return RedisDoor(self.redis, digest)
        door = S3Door(self.s3, self.bucket, "kv", digest)
        self._closing.callback(door.close)
        return door

    def open(
        self,
        codec: str = "raw",
        content: str | None = None,
        *,
        encryption: Mapping[str, object] = ENCRYPTION,
        name_key: bytes | None = None,
    ) -> TierRig:
        self._more = {"encryption": encryption} if codec in ENCRYPTED else {}
        open_tier = self._opener(codec)
        rig = TierRig(
            open_tier if name_key is None else lambda spec, view: with_keyed_names(open_tier(spec, view), name_key),
            num_blocks=32,
            block_bytes=BLOCK_BYTES,
            wait_s=60.0,
            spec=SPEC,
            content=(CONTENTS | ENCRYPTED)[content or codec],
        )
        self._closing.callback(rig.close)
        return rig

    def _opener(self, codec: str) -> OpenTier:
        """Return what opens the tier; a method of its own for each, for what is imported."""
        opener: Callable[[str], OpenTier] = getattr(self, f"_open_{self.kind}")
        return opener(codec)

    def _open_nvme(self, codec: str) -> OpenTier:
        from tiered_kv_nvme.settings import NvmeSettings
        from tiered_kv_nvme.tier import NvmeTier

        entry = {"path": str(self.path), "capacity": "1MiB", "segment": "32KiB", "codec": codec, **self._more}
        return lambda spec, view: NvmeTier(spec, view, "nvme", NvmeSettings.model_validate(entry))

    def _open_fs(self, codec: str) -> OpenTier:
        from tiered_kv_fs.settings import FsSettings
        from tiered_kv_fs.tier import FsTier

        entry = {"path": str(self.path), "capacity": "8MiB", "codec": codec, **PATIENT, **self._more}
        return lambda spec, view: FsTier(spec, view, "fs", FsSettings.model_validate(entry))

    def _open_redis(self, codec: str) -> OpenTier:
        from tiered_kv_redis.settings import RedisSettings
        from tiered_kv_redis.tier import RedisTier

        entry = {"url": self.redis.url, "codec": codec, **REDIS_PATIENT}
        settings = RedisSettings.model_validate({**entry, **self._more})
        return lambda spec, view: RedisTier(spec, view, "redis", settings)

    def _open_s3(self, codec: str) -> OpenTier:
        from tiered_kv_s3.settings import S3Settings
        from tiered_kv_s3.tier import S3Tier

        entry = self.s3.settings(self.bucket, codec=codec, prefix="kv", request_timeout="30s", **PATIENT)
        settings = S3Settings.model_validate({**entry, **self._more})
        return lambda spec, view: S3Tier(spec, view, "s3", settings)

    def _open_memory(self, codec: str) -> OpenTier:
        from tiered_kv_memory.settings import MemorySettings
        from tiered_kv_memory.tier import MemoryTier

        settings = MemorySettings.model_validate({"capacity": "1MiB", "codec": codec})
        return lambda spec, view: MemoryTier(spec, view, "memory", settings)


Opened = Callable[[str], Bench]


@pytest.fixture
def opened(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Opened]:
    with ExitStack() as closing:
        yield lambda kind: Bench(kind, tmp_path, request, closing)


def golden(tier: str, form: str = "", version: int = 1) -> dict[str, bytes]:
    """Return what a tier of a format version stored; `form` is "encrypted", "keyed", or neither."""
    name = f"{tier}-{form}" if form else tier
    texts: dict[str, str] = json.loads((GOLDEN / f"{name}-v{version}.json").read_text())
    return {name: zlib.decompress(base64.b64decode(text)) for name, text in texts.items()}


def count(figures: Figures, passed: bool, note: str = "") -> None:
    figures.add(ROW, 1, int(passed), note)


# Of this version.


@pytest.mark.parametrize("codec", CONTENTS)
@pytest.mark.parametrize("tier", STORED_TIERS)
def test_what_version_1_stored_loads_byte_for_byte(opened: Opened, tier: str, codec: str, figures: Figures) -> None:
    bench = opened(tier)
    bench.restore(golden(tier))
    keys = make_keys(4, f"golden {codec}")
    loaded = set()
    offered = [False]
    try:
        rig = bench.open(codec)
        offered = rig.lookup_all(keys)
        loaded = rig.load(keys)  # compares the bytes
    finally:
        count(figures, loaded == set(keys) and all(offered), "golden files of version 1, raw and zstd")
    assert offered == [True] * 4
    assert loaded == set(keys)


@pytest.mark.parametrize("codec", ENCRYPTED)
@pytest.mark.parametrize("tier", STORED_TIERS)
def test_what_version_1_encrypted_is_decrypted_with_its_key_and_no_other(
    opened: Opened, tier: str, codec: str, figures: Figures
) -> None:
    bench = opened(tier)
    stored = golden(tier, "encrypted")
    bench.restore(stored)
    keys = make_keys(4, f"golden {codec}")
    plain = [ENCRYPTED[codec](key, BLOCK_BYTES) for key in keys]
    assert not any(block[:32] in data for block in plain for data in stored.values()), "it is not encrypted"
    rig = bench.open(codec)
    offered = rig.lookup_all(keys)
    loaded = rig.load(keys)  # compares the bytes
    rig.tier.shutdown()
    bench.restore(stored)
    rig = bench.open(codec, encryption={"keys": {7: "b8" * 32}, "write_key": 7})
    without = rig.load(keys)
    passed = loaded == set(keys) and all(offered) and not without
    count(figures, passed, "encrypted golden files, with their key and with another")
    assert offered == [True] * 4
    assert loaded == set(keys)
    assert without == set()


@pytest.mark.parametrize("tier", [tier for tier in STORED_TIERS if tier != "nvme"])
def test_what_is_encrypted_today_has_the_names_and_sizes_of_version_1(
    opened: Opened, tier: str, figures: Figures
) -> None:
    """What is in an envelope is new each time; what is before it, its key's id and key check are not."""
    stored = golden(tier, "encrypted")
    records = {name: data for name, data in stored.items() if data.startswith(RECORD_MAGIC)}
    assert len(records) == 8
    bench = opened(tier)
    bench.restore({name: data for name, data in stored.items() if name not in records})
    for codec in ENCRYPTED:
        rig = bench.open(codec)
        assert rig.store(make_keys(4, f"golden {codec}")).success
        rig.tier.shutdown()
    today = {name: data for name, data in bench.stored().items() if data.startswith(RECORD_MAGIC)}
    envelope = RECORD_HEADER_BYTES
    heads = {name: data[:12] + data[envelope : envelope + 12] for name, data in records.items()}
    heads_today = {name: data[:12] + data[envelope : envelope + 12] for name, data in today.items()}
    # Compressors may differ from release to release in what they make of a block.
    sizes = {name: len(data) for name, data in records.items() if data[10:12] == AES_ID.to_bytes(2, "little")}
    sizes_today = {name: len(today.get(name, b"")) for name in sizes}
    count(figures, heads == heads_today and sizes == sizes_today)
    assert {head[12:16] for head in heads.values()} == {(7).to_bytes(4, "little")}
    assert heads_today == heads
    assert len(sizes) == 4
    assert sizes_today == sizes


@pytest.mark.parametrize("tier", ["nvme", "fs"])
def test_what_version_1_stored_under_names_is_found_with_their_key_alone(
    opened: Opened, tier: str, figures: Figures
) -> None:
    stored = golden(tier, "keyed")
    bench = opened(tier)
    bench.restore(stored)
    keys = make_keys(4, "golden raw")
    rig = bench.open(name_key=NAME_KEY)
    offered, loaded = rig.lookup_all(keys), rig.load(keys)
    rig.tier.shutdown()
    others = []
    for name_key in (None, bytes(32)):
        rig = bench.open(name_key=name_key)
        others += rig.lookup_all(keys)
        rig.tier.shutdown()
    passed = loaded == set(keys) and all(offered) and not any(others)
    count(figures, passed, "golden directories with keyed names")
    assert offered == [True] * 4
    assert loaded == set(keys)
    assert not any(others)


def test_names_by_a_key_are_today_those_of_version_1(opened: Opened, figures: Figures) -> None:
    stored = golden("fs", "keyed")
    records = {name: data for name, data in stored.items() if data.startswith(RECORD_MAGIC)}
    bench = opened("fs")
    bench.restore({name: data for name, data in stored.items() if name not in records})
    rig = bench.open(name_key=NAME_KEY)
    assert rig.store(make_keys(4, "golden raw")).success
    rig.tier.shutdown()
    today = {name: data for name, data in bench.stored().items() if data.startswith(RECORD_MAGIC)}
    count(figures, today == records)
    assert len(records) == 4
    assert today == records


@pytest.mark.parametrize("tier", [tier for tier in STORED_TIERS if tier != "nvme"])
def test_what_is_stored_today_has_the_names_and_bytes_of_version_1(opened: Opened, tier: str, figures: Figures) -> None:
    """So that version 1's releases, of which some may run beside this one, read it too."""
    stored = golden(tier)
    records = {name: data for name, data in stored.items() if data.startswith(RECORD_MAGIC)}
    raw = {name for name, data in records.items() if data[10:12] == b"\0\0"}
    assert (len(records), len(raw)) == (8, 4)
    bench = opened(tier)
    bench.restore({name: data for name, data in stored.items() if name not in records})
    for codec in CONTENTS:
        rig = bench.open(codec)
        assert rig.store(make_keys(4, f"golden {codec}")).success
        rig.tier.shutdown()
    today = {name: data for name, data in bench.stored().items() if data.startswith(RECORD_MAGIC)}
    # Compressors may differ from release to release in the frames they write, never in those they read.
    same = {name: today.get(name) for name in raw} == {name: records[name] for name in raw}
    count(figures, same and today.keys() == records.keys())
    assert today.keys() == records.keys()
    for name, data in records.items():
        compared = len(data) if name in raw else 24
        assert today[name][:compared] == data[:compared], name


def test_the_head_of_a_segment_is_that_of_version_1(opened: Opened, figures: Figures) -> None:
    """Generation and epoch are of the directory; all else of page 0 is the format's."""
    bench = opened("nvme")
    rig = bench.open()
    assert rig.store(make_keys(4, "golden raw")).success
    rig.tier.shutdown()
    (name,) = (each for each in golden("nvme") if each.startswith("segment-"))
    page, old = bench.stored()[name][:PAGE_BYTES], golden("nvme")[name][:PAGE_BYTES]
    generation = next(field for field in SEGMENT_FIELDS if field.name == "generation")
    same = seal(generation.written(page, 1), 0, PAGE_BYTES) == seal(generation.written(old, 1), 0, PAGE_BYTES)
    count(figures, same)
    assert same


# Of other versions.


@pytest.mark.parametrize("version", OTHER_VERSIONS)
@pytest.mark.parametrize("tier", ["nvme", "fs"])
def test_a_directory_of_another_version_is_refused_and_left_alone(
    opened: Opened, tier: str, version: int, figures: Figures
) -> None:
    """Also where the marker has nothing else that this release knows: then its version says why."""
    name = f"tiered-kv-{tier}.json"
    for fields in (
        {**json.loads(golden(tier)[name]), "format": version},
        {"format": version, "made": ["by", "others"]},
    ):
        bench = opened(tier)
        bench.restore({**golden(tier), name: json.dumps(fields).encode()})
        before = bench.stored()
        with pytest.raises(FormatError) as refused:
            bench.open()
        said = str(refused.value)
        advice = ("use the release that wrote it", "give another directory", "delete this one", str(bench.path))
        versions = f"format version {version}" in said and "reads version 1" in said
        passed = bench.stored() == before and versions and all(word in said for word in advice)
        count(figures, passed, "directories, records, servers and buckets of versions 0, 2 and 65535")
        assert bench.stored() == before, "something in it has changed"
        assert versions, said
        assert all(word in said for word in advice), said


@pytest.mark.parametrize("version", OTHER_VERSIONS)
def test_a_segment_of_another_version_holds_nothing(opened: Opened, version: int, figures: Figures) -> None:
    """In a directory whose marker says version 1 no release writes any other: it is damage, and its room is used."""
    stored = golden("nvme")
    (name,) = (each for each in stored if each.startswith("segment-"))
    field = next(field for field in SEGMENT_FIELDS if field.name == "format version")
    bench = opened("nvme")
    bench.restore({**stored, name: seal(field.written(stored[name], version), 0, PAGE_BYTES)})
    rig = bench.open()
    keys = make_keys(4, "golden raw")
    discarded, offered = rig.tier.stats()["discarded_segments_total"], rig.lookup_all(keys)
    count(figures, discarded == 1 and not any(offered))
    assert discarded == 1
    assert not any(offered)


@pytest.mark.parametrize("version", OTHER_VERSIONS)
@pytest.mark.parametrize("tier", RECORD_TIERS)
def test_a_record_of_another_version_is_a_counted_miss(
    opened: Opened, tier: str, version: int, figures: Figures
) -> None:
    """It stays in a bucket, which nothing marks as one version's; elsewhere such a mark says that it is damage."""
    bench = opened(tier)
    rig = bench.open()
    keys = make_keys(3, "of another version")
    assert rig.store(keys).success
    door = bench.door(rig)
    field = next(field for field in RECORD_FIELDS if field.name == "version")
    record = door.read(keys[0])
    assert record is not None
    foreign = seal_record(field.written(record, version))
    door.write(keys[0], foreign)
    loaded = rig.load(keys)
    counted = count_of(rig.tier.stats(), "corrupt_blocks_total")
    offered = rig.lookup_all(keys)
    left = door.read(keys[0])
    healed = rig.store(keys[:1]).success and rig.load(keys) == set(keys)
    stays = left == (foreign if tier == "s3" else None)
    passed = (loaded, counted, offered) == (set(keys[1:]), 1, [False, True, True]) and stays and healed
    count(figures, passed)
    assert loaded == set(keys[1:])
    assert counted == 1
    assert offered == [False, True, True]
    assert stays, f"it is {'gone' if left is None else 'there'}"
    assert healed


@pytest.mark.parametrize("version", OTHER_VERSIONS)
def test_names_of_another_version_in_a_server_are_left_alone(opened: Opened, version: int, figures: Figures) -> None:
    bench = opened("redis")
    ours = golden("redis")
    theirs = {bytes.fromhex(name).replace(b"tkv1:", b"tkv%d:" % version, 1).hex(): data for name, data in ours.items()}
    bench.restore(theirs)
    rig = bench.open()
    keys = make_keys(4, "golden raw")
    offered, loaded = rig.lookup_all(keys), rig.load(keys)
    assert rig.store(keys).success
    assert rig.tier.reset_cache()
    assert rig.store(keys).success
    rig.tier.shutdown()
    now = bench.door().snapshot()
    untouched = {name: now.get(name) for name in theirs} == theirs
    count(figures, untouched and not any(offered) and not loaded)
    assert not any(offered)
    assert not loaded
    assert untouched


@pytest.mark.parametrize("version", OTHER_VERSIONS)
def test_a_bucket_of_another_version_is_refused_and_left_alone(
    opened: Opened, version: int, figures: Figures, caplog: pytest.LogCaptureFixture
) -> None:
    """The epoch is a bucket's mark: where it is another version's, nothing is stored, loaded, offered, or reset."""
    stored = golden("s3")
    (name,) = (each for each in stored if each.endswith("/epoch"))
    theirs = {**stored, name: stored[name].replace(b" epoch 1 ", b" epoch %d " % version) + b"and more\n"}
    assert theirs[name] != stored[name]
    bench = opened("s3")
    bench.restore(theirs)
    rig = bench.open()
    with pytest.raises(FormatError) as refused:
        rig.tier.describe()
    keys = make_keys(4, "golden raw")
    with caplog.at_level(logging.CRITICAL):
        results = rig.wait([rig.submit_load(keys), rig.submit_store(make_keys(2, "new"))])
        offered = rig.lookup_all(keys)
        rig.tier.reset_cache()
        results += rig.wait([rig.submit_store(make_keys(2, "new"))])
        rig.tier.shutdown()
    reasons = [(result.success, result.reason) for result in results]
    now = {each: data for each, data in bench.stored().items() if each in theirs}
    said = str(refused.value)
    told = all(word in said for word in (f"version {version}", "reads version 1", "use the release that wrote it"))
    passed = now == theirs and reasons == [(False, "format")] * 3 and not any(offered) and told
    count(figures, passed)
    assert now == theirs, "something in it has changed"
    assert reasons == [(False, "format")] * 3
    assert not any(offered)
    assert told, said
