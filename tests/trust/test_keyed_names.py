"""A reader of a tier's storage cannot find out which keys it holds: every byte is searched."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence

import pytest
import xxhash

from tests.support.figures import Figures
from tests.support.places import STORED, Place, PlaceOf
from tiered_kv.base import OffloadKey, get_offload_block_hash
from tiered_kv.testing.rig import make_keys
from tiered_kv.tiering.base import TierSpec
from tiered_kv.tiering.keyed_names import NameMap
from tiered_kv.toolkit.record import digest_of
from tiered_kv_fs.layout import block_path

pytestmark = [pytest.mark.trust, pytest.mark.slow]

KEYS = 16
SEEN_BYTES = 8
"""Eight bytes of a digest occur by chance in none of the few megabytes that are searched."""
NAME_KEY, OTHER_KEY = "5a" * 32, "a5" * 32
SPEC = TierSpec("names", 4096, bytes(range(16)), {"model": "names"})
DIGESTS: tuple[Callable[[bytes], bytes], ...] = (
    bytes,
    xxhash.xxh3_128_digest,
    xxhash.xxh64_digest,
    lambda text: hashlib.md5(text, usedforsecurity=False).digest(),
    lambda text: hashlib.sha256(text).digest(),
    lambda text: hashlib.blake2b(text, digest_size=16).digest(),
    lambda text: hashlib.blake2b(text, digest_size=32).digest(),
)


def traces_of(key: OffloadKey) -> set[bytes]:
    """Return a key and its digests without a secret, each in several encodings."""
    traces = {digest(text) for text in (key, get_offload_block_hash(key)) for digest in DIGESTS}
    traces |= {digest_of(key), bytes.fromhex(block_path(key, SPEC.namespace_digest)[3:])}  # the project's own
    written: set[bytes] = set()
    for trace in traces:
        seen, encoded = trace[:SEEN_BYTES], base64.b64encode(trace)[: SEEN_BYTES * 8 // 6]
        written |= {seen, seen[::-1], seen.hex().encode(), seen.hex().upper().encode(), encoded}
    return written


def filled(place: Place, name_key: str | None) -> tuple[list[OffloadKey], bytes]:
    """Store blocks of constant bytes; return their keys, and all names and bytes of the storage."""
    keys = make_keys(KEYS, "a prompt that the reader knows")
    rig = place.open(SPEC, lambda key, size, epoch: b"\xa5" * size, name_key=name_key)
    assert rig.store(keys).success
    rig.tier.shutdown()
    stored = place.stored()
    names = [bytes.fromhex(name) if place.kind == "redis" else name.encode() for name in stored]
    return keys, b"\0".join([*names, *stored.values()])


def found_in(storage: bytes, keys: Sequence[OffloadKey]) -> set[OffloadKey]:
    return {key for key in keys if any(text in storage for text in traces_of(key))}


@pytest.mark.parametrize("tier", STORED)
def test_a_reader_finds_no_key_nor_a_digest_of_one_but_where_names_are_not_keyed(
    tier: str, place_of: PlaceOf, figures: Figures
) -> None:
    place = place_of(tier)
    keys, storage = filled(place, NAME_KEY)
    found = found_in(storage, keys)
    figures.add("security", tried=KEYS, passed=KEYS - len(found), note="keys sought in storage in all forms")
    assert found == set()
    names = NameMap(bytes.fromhex(NAME_KEY), SPEC.namespace_digest).of(keys)
    assert found_in(storage, names) == set(names), "the same reader does not see where the blocks are"
    keys, storage = filled(place, None)
    assert found_in(storage, keys) == set(keys), "nor the keys where there is no secret"


@pytest.mark.parametrize("tier", ["fs", "redis", "s3"])
def test_tiers_share_blocks_if_they_have_the_same_name_key(tier: str, place_of: PlaceOf, figures: Figures) -> None:
    place, keys = place_of(tier), make_keys(8)
    assert place.open(SPEC, name_key=NAME_KEY).store(keys).success
    found = [len(place.open(SPEC, name_key=name_key).load(keys)) for name_key in (NAME_KEY, OTHER_KEY, None)]
    figures.add("security", tried=1, passed=int(found == [8, 0, 0]), note="tiers with and without the key")
    assert found == [8, 0, 0]
