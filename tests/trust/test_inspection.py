"""Inspection of real servers finds and repairs every damage, disturbs no process, and deletes no sound block."""

from __future__ import annotations

from contextlib import closing

import pytest

from tests.support.damage import Damage, Kind, record_damages
from tests.support.places import Place, PlaceOf
from tests.support.secret_hunt import Sheet, new_marker
from tests.support.tenants import BLOCK_BYTES, neighbour
from tiered_kv.base import OffloadKey, make_offload_key
from tiered_kv.cli.main import main
from tiered_kv.stack.open import open_stack
from tiered_kv.testing.rig import block_content, make_keys
from tiered_kv.tiering.base import TierSpec
from tiered_kv.toolkit.administration import Verification

pytestmark = [pytest.mark.trust("security"), pytest.mark.slow]

SPEC = TierSpec("inspection", 4096, bytes(range(16)), {"model": "inspection"})


@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_every_damage_is_found_and_repaired_and_the_rest_stays(kind: str, place_of: PlaceOf) -> None:
    place = place_of(kind)
    rig = place.open(SPEC, block_content)
    damages = record_damages(full=False)
    keys = make_keys(len(damages) + 4)
    for at in range(0, len(keys), 64):
        assert rig.store(keys[at : at + 64])
    door = place.door(rig)
    broken: set[OffloadKey] = set()
    unreadable: set[OffloadKey] = set()
    for key, damage in zip(keys, damages, strict=False):
        data = door.read(key)
        assert data is not None
        stored = damage.apply(data)
        door.write(key, stored)
        if stored != data:
            (unreadable if is_unreadable(kind, damage, stored) else broken).add(key)
    for repairs, left in ((False, len(broken)), (True, len(broken)), (False, 0)):
        found = verify(place, repairs=repairs)
        assert sum(found.damaged.values()) == left, found.damaged
        assert (sum(found.unreadable.values()), found.repaired) == (len(unreadable), left if repairs else 0)
    assert [key for key in keys if door.read(key) is None] == [key for key in keys if key in broken]


def is_unreadable(kind: str, damage: Damage, stored: bytes) -> bool:
    """Return whether another release or installation may read what is stored; a bucket has no format version."""
    is_of_other_version = (
        kind == "s3" and len(stored) >= 128 and stored[:8] == b"\x89TKVREC\n" and stored[8:10] != b"\1\0"
    )
    return damage.kind is Kind.UNREADABLE or is_of_other_version


def verify(place: Place, *, repairs: bool) -> Verification:
    found = Verification(block_bytes=SPEC.block_bytes, repairs=repairs)
    with closing(place.administration()) as administration:
        administration.verify(SPEC.namespace_digest.hex(), found, 1e12)
    return found


@pytest.mark.parametrize("kind", ["nvme", "fs", "redis", "s3"])
def test_a_process_that_stores_and_loads_meanwhile_is_not_disturbed(kind: str, place_of: PlaceOf) -> None:
    alice = place_of(kind).tenant("alice", **({"capacity": "16MiB"} if kind == "nvme" else {}))
    with neighbour(alice) as other:
        for _ in range(8):
            other.read()
        checked = 0
        for _ in range(5):
            status, tier = alice.inspect("--verify")
            (found,) = [each["verification"] for each in tier["namespaces"]]
            assert (status, found["damaged"]) == (0, {}), tier
            checked += found["blocks"]
        assert checked


def test_a_server_that_does_not_answer_is_an_error(place_of: PlaceOf) -> None:
    storage = place_of("redis")
    alice = storage.tenant("alice", url="redis://127.0.0.1:1", connect_timeout="1s")
    status, tier = alice.inspect("--verify")
    assert (status, tier["ok"]) == (1, False)
    assert "the server" in tier["error"]


@pytest.mark.parametrize("kind", ["nvme", "fs", "redis", "s3"])
def test_no_secret_or_block_is_shown_and_of_damaged_blocks_only_the_key(
    kind: str, place_of: PlaceOf, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    place, secret = place_of(kind), new_marker()
    encryption = {"codec": "aes-256-gcm", "encryption": {"keys": {1: secret}}}
    plain, alice = place.tenant("alice"), place.tenant("alice", **encryption)
    secrets = {"the secret": secret, "a block": plain.marker.decode()}
    sheet, of_sound_blocks = Sheet(secrets), Sheet({**secrets, "a key": (key := new_marker())})
    for tenant in (plain, alice):
        with open_stack(tenant.file) as stack:
            assert tenant.put(stack, [make_offload_key(f"{key}{tenant is plain}{at}".encode(), 0) for at in range(4)])
    shown = ""
    for tenant in (plain, alice):
        for options in ([], ["--verify"], ["--verify", "--json"]):
            main(["inspect", str(tenant.file), *options])
            shown += "".join(capsys.readouterr())
    of_sound_blocks.note("inspect", shown, caplog.text)
    assert of_sound_blocks.findings() == []
    at = 8592 if kind == "nvme" else 400  # in a block's payload
    records = {name: data for name, data in place.stored().items() if len(data) > BLOCK_BYTES}
    place.restore({name: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for name, data in records.items()})
    shown = ""
    for tenant in (plain, alice):
        for options in ([], ["--verify"], ["--verify", "--json"], ["--verify", "--repair"]):
            main(["inspect", str(tenant.file), *options])
            shown += "".join(capsys.readouterr())
    sheet.note("inspect", shown, caplog.text)
    assert "(checksum " in shown, "a damaged block is shown too"
    assert sheet.findings() == []
