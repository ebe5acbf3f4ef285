"""`tiered-kv inspect` of directories; `trust/test_inspection.py` does it with servers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.damage import Kind, record_damages
from tests.support.faulty import FourMethodTier
from tests.support.places import Place
from tests.support.stacks import plugged, stack_file
from tests.support.tenants import BLOCK_BYTES, Tenant
from tiered_kv.cli import paced
from tiered_kv.cli.main import main
from tiered_kv.config.hooks import TierType
from tiered_kv.config.settings import TierSettings
from tiered_kv.stack.open import open_stack
from tiered_kv.toolkit.administration import (
    Ages,
    Purged,
    StoredNamespace,
    Survey,
    TierAdministration,
    Verification,
)
from tiered_kv_fs.administration import FsAdministration
from tiered_kv_fs.settings import FsSettings

BLOCKS = 24
KEYS = {1: "11" * 32, 2: "22" * 32}
HOSTILE = "\x1b]0;title\x07\x1b[2J\nfs: all is well\u202e"
of_each_kind = pytest.mark.parametrize("kind", ["nvme", "fs"])
in_nvme = pytest.mark.parametrize("kind", ["nvme"])


@pytest.fixture
def kind() -> str:
    """The tier's type, where a test does not say otherwise."""
    return "fs"


@pytest.fixture
def alice(kind: str, tmp_path: Path) -> Tenant:
    """A tenant whose tier has blocks."""
    alice = Place(kind, tmp_path).tenant("alice")
    alice.store(BLOCKS)
    return alice


@pytest.fixture
def bob(alice: Tenant, tmp_path: Path) -> Tenant:
    """Another tenant of the same directory, with three blocks."""
    bob = Place("fs", tmp_path).tenant("bob")
    bob.store(3)
    return bob


def block_files(tenant: Tenant) -> list[Path]:
    return sorted(path for path in tenant.path.glob(f"{tenant.digest}/*/??/*") if not path.name.startswith("."))


def files(tenant: Tenant) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in tenant.path.rglob("*") if path.is_file()}


def flip(tenant: Tenant, number: int) -> None:
    """Flip a bit of the payload of a block in an nvme tier's directory."""
    content = tenant.content(tenant.keys(1, number)[0])
    (path,) = [path for path in tenant.path.glob("segment-*") if content in path.read_bytes()]
    data = bytearray(path.read_bytes())
    data[data.index(content) + 1000] ^= 1
    path.write_bytes(data)


@of_each_kind
def test_blocks_bytes_and_ages_are_shown_and_nothing_changes(alice: Tenant, kind: str) -> None:
    before = files(alice)
    status, tier = alice.inspect()
    (own,) = tier["namespaces"]
    assert (status, tier["ok"], tier["error"], tier["name"], tier["type"]) == (0, True, "", kind, kind)
    assert (own["namespace"], own["own"], own["tenant"], own["blocks"]) == (alice.digest, True, "alice", BLOCKS)
    assert own["described"]["namespace"]["model"] == "test"
    assert (own["differences"], own["verification"]) == ({}, None)
    assert own["size_bytes"] >= BLOCKS * BLOCK_BYTES
    ages = own["used" if kind == "fs" else "written"]
    assert 0 <= ages["newest_s"] <= ages["oldest_s"] < 3600
    assert tier["foreign"] == {"entries": 0, "size_bytes": 0, "names": []}
    if kind == "nvme":
        assert own["used"] is None
        segments = tier["segments"]
        assert segments["files"] == len(list(alice.path.glob("segment-*")))
        assert segments["size_bytes"] == segments["files"] << 20
        assert BLOCKS * BLOCK_BYTES < segments["filled_bytes"] < segments["size_bytes"]
        assert (segments["free"], segments["unusable"]) == (segments["files"] - 1, 0)
    status, found = alice.verify()
    assert (status, found["ok"], found["blocks"]) == (0, True, BLOCKS)
    assert (found["damaged"], found["unreadable"], found["repaired"]) == ({}, {}, 0)
    assert files(alice) == before


@of_each_kind
def test_foreign_files_are_named(alice: Tenant) -> None:
    (alice.path / "notes.txt").write_text("mine")
    (alice.path / "lost+found").mkdir()  # the file system's own: not foreign
    (alice.path / f"segment-{alice.digest[:8]}-999999.kv").symlink_to("/dev/zero")
    os.mkfifo(alice.path / f"segment-{alice.digest[:8]}-999998.kv")
    status, tier = alice.inspect("--verify")
    assert (status, tier["namespaces"][0]["verification"]["blocks"]) == (0, BLOCKS)
    assert tier["foreign"]["entries"] == 3
    assert "notes.txt" in tier["foreign"]["names"]


def test_no_name_from_outside_is_obeyed_by_a_terminal_or_adds_a_line(
    alice: Tenant, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Place("fs", tmp_path).tenant(HOSTILE).store(1)
    (alice.path / HOSTILE).write_text("planted")
    assert main(["inspect", str(alice.file), "--verify"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\\x1b]0;title\\x07\\x1b[2J\\nfs: all is well\\u202e") == 3, "the tenant twice, and the file"
    assert all(line.isprintable() and not line.startswith("fs: all") for line in shown.splitlines())


def test_other_namespaces_are_shown_with_the_fields_that_differ(
    alice: Tenant, bob: Tenant, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kv" / ("ab" * 16) / ("cd" * 8)).mkdir(parents=True)
    status, tier = alice.inspect()
    found = {each["namespace"]: each for each in tier["namespaces"]}
    assert (status, len(found)) == (0, 3)
    assert found[bob.digest]["differences"] == {"namespace.tenant": ["alice", "bob"]}
    assert (found[bob.digest]["own"], found[bob.digest]["blocks"]) == (False, 3)
    assert (found["ab" * 16]["described"], found["ab" * 16]["tenant"]) == ({}, None)
    assert main(["inspect", str(alice.file)]) == 0
    text = capsys.readouterr().out
    assert f"{alice.digest}*" in text
    assert "last used" in text
    assert "written" not in text, "of which fs knows nothing"
    assert "namespace.tenant is 'bob', not 'alice'" in text
    assert f"{'ab' * 16} is another namespace, without a readable form" in text


@pytest.mark.slow
def test_every_damage_to_a_file_is_found_and_repaired(tmp_path: Path) -> None:
    # A file's name does not tell its key, so another key's record is found when it is loaded.
    damages = [each for each in record_damages(full=False) if not each.name.startswith("sealed key digest")]
    alice = Place("fs", tmp_path).tenant("alice")
    alice.store(4)
    sound = block_files(alice)[0]
    data = sound.read_bytes()
    changed = [(each, each.apply(data)) for each in damages]
    for number, (_, stored) in enumerate(changed):
        path = sound.parent.parent / "00" / f"{number:032x}"
        path.parent.mkdir(exist_ok=True, mode=0o700)
        path.write_bytes(stored)
        path.chmod(0o600)
    damaged = sum(stored != data and each.kind is Kind.BROKEN for each, stored in changed)
    unreadable = sum(each.kind is Kind.UNREADABLE for each in damages)

    status, found = alice.verify()
    assert (status, sum(found["damaged"].values()), found["repaired"]) == (1, damaged, 0)
    assert found["unreadable"] == {"unknown_codec": unreadable}
    status, found = alice.verify("--repair")
    assert (status, sum(found["damaged"].values()), found["repaired"]) == (0, damaged, damaged)
    status, found = alice.verify()
    assert (status, found["damaged"]) == (0, {})
    assert alice.load(4) == (4, 0)


@in_nvme
def test_damaged_blocks_in_segments_are_found_and_repaired(alice: Tenant) -> None:
    for number in (0, 7, BLOCKS - 1):
        flip(alice, number)
    status, found = alice.verify()
    assert (status, found["blocks"], found["damaged"], found["ok"]) == (1, BLOCKS, {"checksum": 3}, False)
    status, found = alice.verify("--repair")
    assert (status, found["damaged"], found["repaired"], found["ok"]) == (0, {"checksum": 3}, 3, True)
    status, found = alice.verify()
    assert (status, found["blocks"], found["damaged"]) == (0, BLOCKS - 3, {})
    assert alice.load(BLOCKS) == (BLOCKS - 3, 0)
    assert alice.store(BLOCKS) == BLOCKS
    assert alice.load(BLOCKS) == (BLOCKS, 0)


def test_a_segment_that_loses_all_its_blocks_is_deleted(tmp_path: Path) -> None:
    alice = Place("nvme", tmp_path).tenant("alice")
    alice.store(2)
    before = len(list(alice.path.glob("segment-*")))
    flip(alice, 0)
    flip(alice, 1)
    assert alice.verify("--repair")[1]["repaired"] == 2
    assert len(list(alice.path.glob("segment-*"))) == before - 1
    assert alice.store(BLOCKS) == BLOCKS
    assert alice.load(BLOCKS) == (BLOCKS, 0)


@in_nvme
def test_a_segment_without_a_sound_header_is_damage(alice: Tenant) -> None:
    unused = alice.path / f"segment-{alice.digest[:8]}-000077.kv"
    unused.write_bytes(bytes(1 << 20))  # a crash left it before its header was written
    broken = alice.path / f"segment-{alice.digest[:8]}-000078.kv"
    broken.write_bytes(b"x" * 8192)
    for path in (unused, broken):
        path.chmod(0o600)
    assert alice.inspect()[1]["segments"]["unusable"] == 1
    status, found = alice.verify()
    assert (status, found["damaged"]) == (1, {"bad_header": 1})
    assert alice.verify("--repair")[0] == 0
    assert unused.exists()
    assert not broken.exists()
    assert alice.load(BLOCKS) == (BLOCKS, 0)


@of_each_kind
def test_while_a_stack_has_it_open_it_is_only_read(kind: str, tmp_path: Path) -> None:
    alice = Place(kind, tmp_path).tenant("alice")
    with open_stack(alice.file) as stack:
        alice.put(stack, alice.keys(BLOCKS))
        status, found = alice.verify()
        assert (status, found["blocks"], found["damaged"]) == (0, BLOCKS, {})
        status, found = alice.verify("--repair")
        assert status == (kind == "nvme")
        assert ("is in use by another tier of this process; stop it first" in found["error"]) is (kind == "nvme")
        assert alice.wrong(stack, alice.keys(BLOCKS)) == (BLOCKS, 0)
    assert alice.load(BLOCKS) == (BLOCKS, 0)


def test_a_repair_that_cannot_be_made_says_no_block_was_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alice = Place("nvme", tmp_path).tenant("alice")
    with open_stack(alice.file) as stack:
        alice.put(stack, alice.keys(BLOCKS))
        assert main(["inspect", str(alice.file), "--verify", "--repair"]) == 1
        text = capsys.readouterr().out
        assert "FAILED" in text
        assert "deleted" not in text
        assert main(["purge", str(alice.file), "--yes"]) == 1
        assert f"{alice.path} is in use by another tier of this process; stop it" in capsys.readouterr().out


@of_each_kind
def test_a_damaged_block_is_named_by_its_file_and_its_key(
    kind: str, alice: Tenant, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "nvme":
        flip(alice, 7)
        (path,) = {
            each for each in alice.path.glob("segment-*") if alice.content(alice.keys(1)[0]) in each.read_bytes()
        }
    else:
        path = block_files(alice)[7]
        path.write_bytes(b"damaged")
    (named,) = alice.verify()[1]["named"]
    assert named["name"].startswith(str(path))
    assert named["key"] == (alice.keys(1, 7)[0].hex() if kind == "nvme" else "")
    main(["inspect", str(alice.file), "--verify"])
    text = capsys.readouterr().out
    assert (
        f"{kind}: damaged: {named['name']}{', key ' if named['key'] else ''}{named['key']}: {named['reason']}" in text
    )


@of_each_kind
def test_the_place_that_was_looked_at_is_shown_also_if_nothing_is_stored(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alice = Place(kind, tmp_path).tenant("alice")
    for verb in (["inspect", str(alice.file)], ["purge", str(alice.file), "--yes"]):
        assert main(verb) == 0
        assert f"{kind}: looked at {alice.path} (no such directory)\n" in capsys.readouterr().out
    alice.store(1)
    assert alice.inspect()[1]["where"] == str(alice.path)


@of_each_kind
def test_encrypted_blocks_are_unreadable_and_not_damaged_without_their_key(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    place = Place(kind, tmp_path)

    def tenant(key_id: int) -> Tenant:
        return place.tenant("alice", codec="aes-256-gcm", encryption={"keys": {key_id: KEYS[key_id]}})

    tenant(1).store(BLOCKS)
    _, found = tenant(1).verify()
    assert (found["unreadable"], found["checks_tags"]) == ({}, kind == "nvme")
    for other in (tenant(2), place.tenant("alice")):
        status, found = other.verify("--repair")
        assert (status, found["unreadable"], found["damaged"], found["repaired"]) == (0, {"unknown_key": BLOCKS}, {}, 0)
    assert tenant(1).load(BLOCKS) == (BLOCKS, 0)


@pytest.mark.parametrize("becomes", ["nothing", "sound"])
def test_a_damaged_file_that_an_engine_deletes_or_replaces_meanwhile_is_not_left(becomes: str, tmp_path: Path) -> None:
    alice = Place("fs", tmp_path).tenant("alice")
    alice.store(1)
    (victim,) = block_files(alice)
    sound = tmp_path / "sound"
    sound.write_bytes(victim.read_bytes())
    victim.write_bytes(b"damaged")

    def after_the_read(size_bytes: int) -> None:
        sound.replace(victim) if becomes == "sound" else victim.unlink()

    found = Verification(BLOCK_BYTES, repairs=True, on_block=after_the_read)
    administration = FsAdministration(FsSettings(name="fs", path=str(alice.path), capacity=64 << 20))
    administration.verify(alice.digest, found, time.monotonic() + 60)
    assert (found.damaged.total(), found.repaired) == (1, 1)
    assert alice.load(1) == (int(becomes == "sound"), 0)


def test_huge_and_planted_files_are_bounded(alice: Tenant, bob: Tenant) -> None:
    for tenant in (alice, bob):
        os.truncate(block_files(tenant)[0], 1 << 40)
        (tenant.path / tenant.digest / "namespace.json").write_text('{"namespace": {"block": {"bytes": 1e99}}}')
    status, tier = alice.inspect("--verify")
    found = {each["own"]: each["verification"] for each in tier["namespaces"]}
    assert status == 1
    assert found[True]["damaged"] == {"bad_length": 1}
    assert (found[False]["damaged"], found[False]["unreadable"]) == ({}, {"too_long": 1})


def test_the_rate_is_kept(alice: Tenant) -> None:
    started_s = time.monotonic()
    assert alice.verify("--rate", "480KiB/s")[0] == 0
    assert time.monotonic() - started_s > 0.9 * BLOCKS * BLOCK_BYTES / (480 << 10)


class StandingClock:
    """Stands in for the module `time`: nothing but a sleep, and storage that is read, takes time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept_s += seconds


class SlowStorage(TierAdministration):
    """Takes a fiftieth of a second of `clock` for each of 20 blocks."""

    clock = StandingClock()

    def __init__(self, settings: TierSettings) -> None:
        return

    def purge(self, digest: str, deadline: float) -> Purged:
        return Purged(0, 0)

    def survey(self, deadline: float, only: str | None = None) -> Survey:
        return Survey((StoredNamespace("ab" * 16),))

    def verify(self, digest: str, found: Verification, deadline: float) -> None:
        for _ in range(20):
            self.clock.now_s += 0.02
            found.on_block(1 << 20)


@pytest.mark.parametrize(("rate", "slept_s"), [("60MiB/s", 0.0), ("25MiB/s", 0.4)])
def test_storage_is_slowed_down_only_where_it_is_faster_than_the_rate(
    rate: str, slept_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlowStorage, "clock", clock := StandingClock())
    monkeypatch.setattr(paced, "time", clock)
    with plugged(TierType("slow", TierSettings, lambda: FourMethodTier, "", lambda: SlowStorage)):
        assert main(["inspect", stack_file(tmp_path, "type: slow"), "--verify", "--rate", rate]) == 0
    assert clock.slept_s == pytest.approx(slept_s, abs=0.05)


@of_each_kind
def test_the_timeout_is_kept(alice: Tenant) -> None:
    status, tier = alice.inspect("--verify", "--timeout", "1ms", "--rate", "1B/s")
    assert (status, tier["ok"]) == (1, False)
    errors = [tier["error"], *(each["verification"]["error"] for each in tier["namespaces"] if each["verification"])]
    assert any("time was over" in error or "takes too long" in error for error in errors)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--repair"], "--repair needs --verify"),
        (["--rate", "1MiB/s"], "--rate needs --verify"),
        (["--verify", "--rate", "fast"], "such as 64MiB"),
        (["--verify", "--rate", "0"], "at least 1 byte"),
        (["--tier", "s4"], "no secondary tier 's4'; it has: fs"),
        (["--timeout", "soon"], "a duration"),
    ],
)
def test_wrong_usage_is_refused(
    options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Place("fs", tmp_path).tenant("alice").file
    try:
        status = main(["inspect", str(file), *options])
    except SystemExit as ended:  # argparse
        status = int(str(ended.code))
    assert status == 2
    assert says in capsys.readouterr().err


@of_each_kind
def test_an_absent_directory_is_empty_and_that_of_another_program_is_an_error(kind: str, tmp_path: Path) -> None:
    alice = Place(kind, tmp_path).tenant("alice")
    status, tier = alice.inspect("--verify", "--repair")
    assert (status, tier["namespaces"], tier["notes"], tier["error"]) == (0, [], [], "")
    assert not alice.path.exists()
    alice.path.mkdir()
    (alice.path / "holiday.jpg").write_bytes(b"")
    status, tier = alice.inspect()
    assert (status, tier["ok"]) == (1, False)
    assert "holiday.jpg" in tier["error"]


class NoVerification(TierAdministration):
    """Has ages and a note, and verifies nothing."""

    def __init__(self, settings: TierSettings) -> None:
        return

    def purge(self, digest: str, deadline: float) -> Purged:
        return Purged(0, 0)

    def survey(self, deadline: float, only: str | None = None) -> Survey:
        found = StoredNamespace("ab" * 16, written=Ages(90.0, 1.0), used=Ages(30.2, 29.9))
        return Survey((found,), notes=("it may be otherwise",))


@pytest.fixture
def _plugin() -> Iterator[None]:
    with plugged(TierType("other", TierSettings, lambda: FourMethodTier, "", lambda: NoVerification)):
        yield


@pytest.mark.usefixtures("_plugin")
def test_a_third_party_tier_is_shown_and_what_it_lacks_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = stack_file(tmp_path, "type: other", "type: memory, capacity: 64KiB")
    assert main(["inspect", file]) == 0
    text = capsys.readouterr().out
    assert "90s to 1s   30s" in text
    assert "other: it may be otherwise" in text
    assert "memory: tiers of type 'memory' show nothing to other processes" in text
    assert main(["inspect", file, "--verify"]) == 1, "what was asked for was not done"
    assert "tiers of type 'other' cannot be verified" in capsys.readouterr().out
