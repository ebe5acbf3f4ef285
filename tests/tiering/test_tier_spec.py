"""What a tier is given: a tier without a namespace shares its blocks with nobody."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.faulty import FourMethodTier
from tiered_kv.errors import ConfigError
from tiered_kv.testing.rig import TierRig, make_keys
from tiered_kv.tiering.base import TierSpec
from tiered_kv.tiering.factory import SecondaryTierFactory

BLOCK_BYTES = 4096


def own_spec() -> object:
    """As an engine may pass it that knows nothing of namespaces."""
    return SimpleNamespace(vllm_config=None, extra_config={})


def view() -> memoryview:
    return memoryview(bytearray(2 * BLOCK_BYTES)).cast("B", (2, BLOCK_BYTES))


@pytest.mark.parametrize("spec", [None, object(), own_spec(), SimpleNamespace(name=7, memory="no", wants_events=1)])
def test_an_object_without_a_namespace_gets_one_of_its_own(spec: object) -> None:
    first, second = (FourMethodTier(spec, view(), "folder").tier_spec for _ in range(2))
    assert first.namespace_digest != second.namespace_digest
    assert (first.name, first.block_bytes, first.memory, first.wants_events) == ("folder", BLOCK_BYTES, None, False)


def test_a_spec_by_hand_without_a_namespace_shares_with_no_other() -> None:
    assert TierSpec("a", BLOCK_BYTES).namespace_digest != TierSpec("a", BLOCK_BYTES).namespace_digest


def test_what_an_object_says_is_taken_and_a_spec_stays_itself() -> None:
    spec = TierSpec("disk", BLOCK_BYTES, bytes(range(16)), {"model": "m"}, wants_events=True)
    like = SimpleNamespace(**{name: getattr(spec, name) for name in TierSpec.__slots__}, colour="red")
    assert TierSpec.of(like, "folder", view()) == spec
    assert TierSpec.of(spec, "folder", view()) is spec
    assert TierSpec.of(TierSpec("", BLOCK_BYTES), "folder", view()).name == "folder"


@pytest.mark.parametrize("digest", ["0" * 16, b"short", 7])
def test_a_digest_that_is_none_is_refused(digest: Any) -> None:
    with pytest.raises(ConfigError, match="namespace_digest is 16 bytes, found"):
        FourMethodTier(SimpleNamespace(namespace_digest=digest), view(), "folder")


def test_strangers_without_a_namespace_do_not_find_each_other_s_blocks(tmp_path: Path) -> None:
    entry = {"type": "fs", "path": str(tmp_path), "capacity": "64MiB", "lookup_timeout": "1h"}
    keys = make_keys(2)
    for _ in range(2):
        rig = TierRig(
            lambda _, view: SecondaryTierFactory.create(own_spec(), view, entry),
            num_blocks=8,
            block_bytes=BLOCK_BYTES,
            wait_s=60.0,
        )
        assert rig.lookup_all(keys) == [False, False]
        assert rig.store(keys).success
        assert rig.lookup_all(keys) == [True, True]
        rig.close()
