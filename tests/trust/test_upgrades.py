"""Blocks of earlier releases load; storage of other format versions is refused, and not changed.

`golden/make_golden.py` made the golden files, and says when to make others.
"""

from __future__ import annotations

import base64
import json
import logging
import zlib
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.damage import RECORD_FIELDS, RECORD_HEADER_BYTES, seal_record
from tests.support.places import RECORD_MAGIC, STORED, Place, PlaceOf
from tests.support.segment_map import PAGE_BYTES, SEGMENT_FIELDS, seal
from tests.trust.golden.make_golden import FORMS, SMALL, SPEC
from tiered_kv.errors import FormatError
from tiered_kv.metrics.counters import count_of
from tiered_kv.testing.rig import TierRig, make_keys
from tiered_kv.toolkit.codecs import AES_ID, RAW_ID, ZSTD_AES_ID, ZSTD_ID

pytestmark = [pytest.mark.trust("upgrades"), pytest.mark.slow, pytest.mark.usefixtures("patient_nvme")]

GOLDEN = Path(__file__).parent / "golden"
OTHER_VERSIONS = (0, 2)


def opened(place: Place, codec: str = "raw", form: str = "", **settings: object) -> TierRig:
    """Open a tier as `make_golden` did."""
    content = FORMS[form].codecs[codec]
    more = {**SMALL.get(place.kind, {}), "codec": codec, **FORMS[form].settings, **settings}
    return place.open(SPEC, content, num_blocks=32, **more)


def golden(tier: str, form: str = "", version: int = 1) -> dict[str, bytes]:
    """Return what a tier of a format version stored; `form` is "encrypted" or empty."""
    name = f"{tier}-{form}" if form else tier
    texts: dict[str, str] = json.loads((GOLDEN / f"{name}-v{version}.json").read_text())
    return {name: zlib.decompress(base64.b64decode(text)) for name, text in texts.items()}


# Of this version.


@pytest.mark.trust(note="golden files of version 1, in all codecs")
@pytest.mark.parametrize(
    ("form", "codec"), [(form, codec) for form in ("", "encrypted") for codec in FORMS[form].codecs]
)
@pytest.mark.parametrize("tier", STORED)
def test_what_version_1_stored_loads_byte_for_byte(place_of: PlaceOf, tier: str, form: str, codec: str) -> None:
    """And what it encrypted with another key, under the same number, does not."""
    place, stored, keys = place_of(tier), golden(tier, form), make_keys(4, f"golden {codec}")
    place.restore(stored)
    rig = opened(place, codec, form)
    found = [rig.lookup_all(keys), rig.load(keys)]  # which compares the bytes
    if form == "encrypted":
        rig.tier.shutdown()
        place.restore(stored)
        found.append(opened(place, codec, form, encryption={"keys": {7: "b8" * 32}, "write_key": 7}).load(keys))
    assert found == [[True] * 4, set(keys), set()][: len(found)]


@pytest.mark.parametrize("form", ["", "encrypted"])
@pytest.mark.parametrize("tier", ["fs", "redis", "s3"])
def test_what_is_stored_today_has_the_names_and_bytes_of_version_1(place_of: PlaceOf, tier: str, form: str) -> None:
    """So that version 1's releases, of which some may run beside this one, read it too."""
    stored, place = golden(tier, form), place_of(tier)
    expected = comparable(stored)
    assert len(expected) == 4 * len(FORMS[form].codecs)
    place.restore({name: data for name, data in stored.items() if not data.startswith(RECORD_MAGIC)})
    for codec in FORMS[form].codecs:
        rig = opened(place, codec, form)
        assert rig.store(make_keys(4, f"golden {codec}")).success
        rig.tier.shutdown()
    assert comparable(place.stored()) == expected


def comparable(stored: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return of each record what is the same in every release.

    Compressors may differ from release to release in the frames they write, never in those they read. What is in an
    envelope is new each time; what is before it, its key's id and key check are not.
    """
    found: dict[str, bytes] = {}
    for name, data in stored.items():
        if data.startswith(RECORD_MAGIC):
            codec_id = int.from_bytes(data[10:12], "little")
            envelope = data[RECORD_HEADER_BYTES : RECORD_HEADER_BYTES + 12]
            heads = {RAW_ID: data, ZSTD_ID: data[:24], AES_ID: data[:12] + envelope, ZSTD_AES_ID: data[:12] + envelope}
            found[name] = heads[codec_id]
    return found


def test_the_head_of_a_segment_is_that_of_version_1(place_of: PlaceOf) -> None:
    """Generation and epoch are of the directory; all else of page 0 is the format's."""
    place = place_of("nvme")
    rig = opened(place)
    assert rig.store(make_keys(4, "golden raw")).success
    rig.tier.shutdown()
    (name,) = (each for each in golden("nvme") if each.startswith("segment-"))
    generation = next(field for field in SEGMENT_FIELDS if field.name == "generation")
    pages = [stored[name][:PAGE_BYTES] for stored in (place.stored(), golden("nvme"))]
    today, old = (seal(generation.written(page, 1), 0, PAGE_BYTES) for page in pages)
    assert today == old


# Of other versions.


@pytest.mark.trust(note="directories, records, servers and buckets of versions 0 and 2")
@pytest.mark.parametrize("version", OTHER_VERSIONS)
@pytest.mark.parametrize("tier", ["nvme", "fs"])
def test_a_directory_of_another_version_is_refused_and_left_alone(place_of: PlaceOf, tier: str, version: int) -> None:
    """Also where the marker has nothing else that this release knows: then its version says why."""
    name = f"tiered-kv-{tier}.json"
    place = place_of(tier)
    place.restore({**golden(tier), name: json.dumps({"format": version, "made": ["by", "others"]}).encode()})
    before = {path: path.read_bytes() for path in place.path.rglob("*") if path.is_file()}
    with pytest.raises(FormatError) as refused:
        opened(place)
    advice = ("use the release that wrote it", "give another directory", "delete this one", str(place.path))
    said = (f"format version {version}", "reads version 1", *advice)
    assert [each for each in said if each not in str(refused.value)] == []
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("version", OTHER_VERSIONS)
def test_a_segment_of_another_version_holds_nothing(place_of: PlaceOf, version: int) -> None:
    """In a directory whose marker says version 1 no release writes any other: it is damage, and its room is used."""
    stored = golden("nvme")
    (name,) = (each for each in stored if each.startswith("segment-"))
    field = next(field for field in SEGMENT_FIELDS if field.name == "format version")
    place = place_of("nvme")
    place.restore({**stored, name: seal(field.written(stored[name], version), 0, PAGE_BYTES)})
    rig = opened(place)
    assert rig.tier.stats()["discarded_segments_total"] == 1
    assert rig.lookup_all(make_keys(4, "golden raw")) == [False] * 4


@pytest.mark.parametrize("version", OTHER_VERSIONS)
@pytest.mark.parametrize("tier", ["memory", "fs", "redis", "s3"])
def test_a_record_of_another_version_is_a_counted_miss(place_of: PlaceOf, tier: str, version: int) -> None:
    """It stays in a bucket, which has no mark of a version; elsewhere the mark says version 1, so it is damage."""
    place = place_of(tier)
    rig = opened(place)
    keys = make_keys(3, "of another version")
    assert rig.store(keys).success
    door = place.door(rig)
    field = next(field for field in RECORD_FIELDS if field.name == "version")
    record = door.read(keys[0])
    assert record is not None
    foreign = seal_record(field.written(record, version))
    door.write(keys[0], foreign)
    assert rig.load(keys) == set(keys[1:])
    assert count_of(rig.tier.stats(), "corrupt_blocks_total") == 1
    assert rig.lookup_all(keys) == [False, True, True]
    assert door.read(keys[0]) == (foreign if tier == "s3" else None)
    assert rig.store(keys[:1]).success
    assert rig.load(keys) == set(keys)


@pytest.mark.parametrize("version", OTHER_VERSIONS)
def test_names_of_another_version_in_a_server_are_left_alone(place_of: PlaceOf, version: int) -> None:
    ours, keys = golden("redis"), make_keys(4, "golden raw")
    theirs = {bytes.fromhex(name).replace(b"tkv1:", b"tkv%d:" % version, 1).hex(): data for name, data in ours.items()}
    place = place_of("redis")
    place.restore(theirs)
    rig = opened(place)
    assert (rig.lookup_all(keys), rig.load(keys)) == ([False] * 4, set())
    assert rig.store(keys).success
    assert rig.tier.reset_cache()
    assert rig.store(keys).success
    rig.tier.shutdown()
    now = place.stored()
    assert {name: now.get(name) for name in theirs} == theirs


@pytest.mark.parametrize("version", OTHER_VERSIONS)
def test_a_bucket_of_another_version_is_refused_and_left_alone(
    place_of: PlaceOf, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The epoch is a bucket's mark: where it is another version's, nothing is stored, loaded, offered, or reset."""
    stored = golden("s3")
    (name,) = (each for each in stored if each.endswith("/epoch"))
    theirs = {**stored, name: stored[name].replace(b" epoch 1 ", b" epoch %d " % version) + b"and more\n"}
    assert theirs[name] != stored[name]
    place = place_of("s3")
    place.restore(theirs)
    rig = opened(place)
    with pytest.raises(FormatError) as refused:
        rig.tier.describe()
    keys = make_keys(4, "golden raw")
    with caplog.at_level(logging.CRITICAL):
        results = rig.wait([rig.submit_load(keys), rig.submit_store(make_keys(2, "new"))])
        offered = rig.lookup_all(keys)
        rig.tier.reset_cache()
        results += rig.wait([rig.submit_store(make_keys(2, "new"))])
        rig.tier.shutdown()
    assert {each: data for each, data in place.stored().items() if each in theirs} == theirs
    assert [(result.success, result.reason) for result in results] == [(False, "format")] * 3
    assert offered == [False] * 4
    advice = (f"version {version}", "reads version 1", "use the release that wrote it")
    assert [each for each in advice if each not in str(refused.value)] == []
