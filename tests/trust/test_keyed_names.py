"""Who reads a tier's storage cannot tell which keys are stored there: looked for in every byte of it."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Callable, Sequence

import pytest
import xxhash

from tests.support.figures import Figures
from tests.support.places import STORED, Place
from tiered_kv.base import OffloadKey, get_offload_block_hash
from tiered_kv.testing.redis_servers import redis_server
from tiered_kv.testing.rig import make_keys
from tiered_kv.testing.s3_servers import moto_server
from tiered_kv.tiering.base import TierSpec
from tiered_kv.tiering.keyed_names import NameMap
from tiered_kv.toolkit.record import digest_of
from tiered_kv_fs.layout import block_name

__all__ = ["moto_server", "redis_server"]

pytestmark = [pytest.mark.trust, pytest.mark.slow]

KEYS = 16
SEEN_BYTES = 8
"""A part of a digest that is so long occurs by chance in none of the few megabytes that are looked at."""
NAME_KEY = bytes(range(32))
SPEC = TierSpec("names", 4096, bytes(range(16)), {"model": "names"})
PlaceOf = Callable[[str], Place]


def traces_of(key: OffloadKey, namespace_digest: bytes) -> dict[str, bytes]:
    """Return what would tell of a key: itself, and digests that need no secret, those of the project among them."""
    traces: dict[str, bytes] = {"the key": key, "the block hash": get_offload_block_hash(key)}
    for what, text in list(traces.items()):
        traces |= {
            f"{digest} of {what}": value
            for digest, value in {
                "xxh3-128": xxhash.xxh3_128_digest(text),
                "xxh3-64": xxhash.xxh3_64_digest(text),
                "xxh64": xxhash.xxh64_digest(text),
                "md5": hashlib.md5(text, usedforsecurity=False).digest(),
                "sha1": hashlib.sha1(text, usedforsecurity=False).digest(),
                "sha256": hashlib.sha256(text).digest(),
                "blake2b-16": hashlib.blake2b(text, digest_size=16).digest(),
                "blake2b-32": hashlib.blake2b(text, digest_size=32).digest(),
                "blake2b-32 with the namespace": hashlib.blake2b(text, digest_size=32, key=namespace_digest).digest(),
                "crc": zlib.crc32(text).to_bytes(4, "big") * 2,
            }.items()
        }
    traces["the record's digest"] = digest_of(key)
    traces["fs's name"] = bytes.fromhex(block_name(key, namespace_digest))
    return traces


def forms_of(trace: bytes) -> dict[str, bytes]:
    """Return how a trace, or the beginning of one that was cut off, may be written."""
    seen = trace[:SEEN_BYTES]
    return {
        "as it is": seen,
        "backwards": seen[::-1],
        "in hexadecimal": seen.hex().encode(),
        "in capitals": seen.hex().upper().encode(),
        "in base64": base64.b64encode(trace)[: SEEN_BYTES * 8 // 6],
        "in base64 for URLs": base64.urlsafe_b64encode(trace)[: SEEN_BYTES * 8 // 6],
    }


def filled(place: Place, name_key: bytes | None) -> tuple[list[OffloadKey], bytes]:
    """Store blocks whose bytes tell nothing of their keys; return the keys, and what a reader of the storage sees."""
    keys = make_keys(KEYS, "a prompt that the reader knows")
    rig = place.open(SPEC, lambda key, size, epoch: b"\xa5" * size, name_key=name_key)
    assert rig.store(keys).success
    rig.tier.shutdown()
    stored = place.stored(rig)
    names = [bytes.fromhex(name) if place.kind == "redis" else name.encode() for name in stored]
    return keys, b"\0".join([*names, *stored.values()])


def findings(storage: bytes, keys: Sequence[OffloadKey]) -> dict[OffloadKey, list[str]]:
    """Return by what each key was found, for those keys that were."""
    found: dict[OffloadKey, list[str]] = {}
    for key in keys:
        for what, trace in traces_of(key, SPEC.namespace_digest).items():
            for form, text in forms_of(trace).items():
                if text in storage:
                    found.setdefault(key, []).append(f"{what}, {form}")
    return found


@pytest.mark.parametrize("tier", STORED)
def test_a_reader_finds_no_key_nor_a_digest_of_one(tier: str, place_of: PlaceOf, figures: Figures) -> None:
    keys, storage = filled(place_of(tier), NAME_KEY)
    found = findings(storage, keys)
    figures.add("security", tried=KEYS, passed=KEYS - len(found), note="keys sought in storage in all forms")
    assert found == {}
    names = NameMap(NAME_KEY, SPEC.namespace_digest).of(keys)
    assert findings(storage, names).keys() == set(names), "the same reader does not see where the blocks are"


@pytest.mark.parametrize("tier", STORED)
def test_the_reader_finds_every_key_where_names_are_not_keyed(tier: str, place_of: PlaceOf) -> None:
    keys, storage = filled(place_of(tier), None)
    assert findings(storage, keys).keys() == set(keys)


@pytest.mark.parametrize("tier", ["fs", "redis", "s3"])
def test_tiers_share_blocks_if_they_have_the_same_name_key(tier: str, place_of: PlaceOf, figures: Figures) -> None:
    place, keys = place_of(tier), make_keys(8)
    assert place.open(SPEC, name_key=NAME_KEY).store(keys).success
    found = [len(place.open(SPEC, name_key=name_key).load(keys)) for name_key in (NAME_KEY, NAME_KEY[::-1], None)]
    figures.add("security", tried=1, passed=int(found == [8, 0, 0]), note="tiers with and without the key")
    assert found == [8, 0, 0]
