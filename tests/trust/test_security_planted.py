"""What others have put into an fs tier's directory is not believed, nor written to: in ours, and in a shared one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tiered_kv.errors import ConfigError, FormatError, TieredKVError, TierUnavailableError
from tiered_kv.stack import Stack, open_stack
from tiered_kv.testing.tenants import BLOCK_BYTES, DirectoryStorage, Tenant
from tiered_kv.toolkit.codecs import RAW
from tiered_kv.toolkit.record import encode_record
from tiered_kv_fs.layout import block_name

pytestmark = pytest.mark.trust("security")

STRANGER = 12345
EPOCH = "deadbeef" * 2
BLOCKS = 8
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture
def alice(tmp_path: Path) -> Tenant:
    return Tenant("alice", DirectoryStorage(tmp_path, "fs"))


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """The directory, which is not there yet."""
    return tmp_path / "kv"


def open_to_all(tenant: Tenant) -> None:
    tenant.file.write_text(tenant.file.read_text().replace("type: fs", "type: fs\n  private: false"))


def give_away(path: Path) -> None:
    for entry in [path, *path.rglob("*")]:
        os.chown(entry, STRANGER, STRANGER, follow_symlinks=False)


def entries(path: Path) -> dict[str, tuple[int, int, int]]:
    """Return all that is in a directory, itself included: whose, with what mode, changed when."""
    found = [path, *path.rglob("*")]
    return {str(each): (each.lstat().st_uid, each.lstat().st_mode, each.lstat().st_mtime_ns) for each in found}


def forge(namespace: Path, tenant: Tenant) -> None:
    """Make a namespace's directory that holds blocks under the right names and with the right checksums."""
    namespace.mkdir(mode=0o755)
    (namespace / "epoch").write_text(f"{EPOCH}\n")
    for key in tenant.keys(BLOCKS):
        name = block_name(key, bytes.fromhex(tenant.digest))
        path = namespace / EPOCH / name[:2] / name
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        forged = memoryview(bytes([0x66]) * BLOCK_BYTES)
        path.write_bytes(b"".join(encode_record(key, forged, bytes.fromhex(tenant.digest), RAW, _buffer)))


def _buffer(size: int) -> memoryview:
    return memoryview(bytearray(size))


def came(stack: Stack, tenant: Tenant) -> int:
    """Load the blocks one by one; return how many came. None of them may be wrong."""
    count, wrong = tenant.wrong(stack, tenant.keys(BLOCKS))
    assert wrong == 0
    return count


def store(stack: Stack, tenant: Tenant, first: int) -> int:
    """Store blocks; return how many the tier has written."""
    before = stack.counters()["fs"]["stored_files"]
    keys = tenant.keys(BLOCKS, first)
    stack.put(keys, np.frombuffer(b"".join(map(tenant.content, keys)), np.uint8).reshape(len(keys), BLOCK_BYTES))
    assert stack.flush(30.0)
    return stack.counters()["fs"]["stored_files"] - before


@needs_root
@pytest.mark.parametrize("mode", [0o1777, 0o755, 0o700])
def test_blocks_that_somebody_forged_before_the_directory_was_used_are_not_served(
    alice: Tenant, top: Path, mode: int
) -> None:
    top.mkdir()
    forge(top / alice.digest, alice)
    give_away(top / alice.digest)
    top.chmod(mode)
    before = entries(top)
    with pytest.raises(FormatError, match=rf"has not been used yet, and holds '{alice.digest}' of .*uid {STRANGER}"):
        open_stack(alice.file)
    assert entries(top) == before


PLANTED: dict[str, Callable[[Path], object]] = {
    "owners": lambda path: path.mkdir(),
    "f" * 32: lambda path: path.mkdir(),
    f".{'f' * 32}.{'0' * 16}.purged": lambda path: path.mkdir(),
    "ledger": lambda path: path.write_bytes(b""),
    "sweep": lambda path: path.write_bytes(b""),
    f".namespace.json.{'0' * 16}.tmp": lambda path: path.write_bytes(b""),
    "tiered-kv-fs.json": lambda path: path.write_text('{"format": 1, "tier": "fs"}'),
}
"""Names that this tier gives, and how to put something there."""


@needs_root
@pytest.mark.parametrize("mode", [0o1777, 0o700])
@pytest.mark.parametrize("name", PLANTED)
def test_a_directory_that_is_not_used_yet_and_holds_a_stranger_s_entry_is_refused_untouched(
    alice: Tenant, top: Path, name: str, mode: int
) -> None:
    top.mkdir()
    PLANTED[name](top / name)
    give_away(top / name)
    top.chmod(mode)
    before = entries(top)
    with pytest.raises(TieredKVError, match=rf"{STRANGER}|mode 1777; make sure that nobody has put anything into it"):
        open_stack(alice.file)
    assert entries(top) == before


@pytest.mark.parametrize("name", PLANTED)
def test_a_directory_that_is_open_to_others_and_holds_anything_is_not_closed_but_refused(
    alice: Tenant, top: Path, name: str
) -> None:
    top.mkdir()
    PLANTED[name](top / name)
    top.chmod(0o1777)
    before = entries(top)
    with pytest.raises(ConfigError, match=rf"mode 1777; make sure that nobody has .*chmod 700 {top}"):
        open_stack(alice.file)
    assert entries(top) == before


@pytest.mark.parametrize("count", range(len(PLANTED)))
def test_what_a_process_that_was_killed_before_the_marker_has_left_does_not_keep_others_out(
    alice: Tenant, top: Path, count: int
) -> None:
    top.mkdir(mode=0o700)
    for name in list(PLANTED)[:count]:  # but the marker, which is the last
        PLANTED[name](top / name)
        (top / name).chmod(0o700 if (top / name).is_dir() else 0o600)
    assert alice.store(BLOCKS) == BLOCKS
    assert alice.load(BLOCKS) == (BLOCKS, 0)


def inner(top: Path, tenant: Tenant) -> dict[str, Path]:
    """Return what an opening believes below the top."""
    namespace = top / tenant.digest
    epoch = (namespace / "epoch").read_text().strip()
    return {
        "owners": top / "owners",
        "namespace": namespace,
        "epoch": namespace / epoch,
        "marker": top / "tiered-kv-fs.json",
        "epoch file": namespace / "epoch",
        "readable form": namespace / "namespace.json",
    }


DIRECTORIES = ("owners", "namespace", "epoch")
FILES = ("marker", "epoch file", "readable form")


@needs_root
@pytest.mark.parametrize("which", [*DIRECTORIES, *FILES])
def test_a_stranger_s_entry_in_a_directory_of_ours_is_refused_at_the_opening(
    alice: Tenant, top: Path, which: str
) -> None:
    alice.store(BLOCKS)
    path = inner(top, alice)[which]
    os.chown(path, STRANGER, STRANGER)
    with pytest.raises(TierUnavailableError, match=rf"{path} belongs to another user \(uid {STRANGER}\)"):
        open_stack(alice.file)
    os.chown(path, os.geteuid(), os.getegid())
    assert alice.load(BLOCKS) == (BLOCKS, 0)


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
@pytest.mark.parametrize("which", DIRECTORIES)
def test_a_directory_inside_into_which_others_can_write_is_refused_and_says_what_to_do(
    alice: Tenant, top: Path, which: str, mode: int
) -> None:
    alice.store(BLOCKS)
    path = inner(top, alice)[which]
    path.chmod(mode)
    with pytest.raises(TierUnavailableError, match=rf"{path} can be written to by others \(mode {mode:04o}\)"):
        open_stack(alice.file)
    path.chmod(0o700)
    assert alice.load(BLOCKS) == (BLOCKS, 0)


def loosen(path: Path) -> None:
    path.chmod(0o777)


SPOILT = [
    pytest.param(loosen, id="writable"),
    pytest.param(give_away, id="stranger's", marks=needs_root),
]


@pytest.mark.parametrize("spoil", SPOILT)
def test_blocks_in_a_shard_that_others_can_write_to_are_counted_misses_and_none_is_stored_there(
    alice: Tenant, top: Path, spoil: Callable[[Path], None]
) -> None:
    alice.store(BLOCKS)
    for shard in inner(top, alice)["epoch"].iterdir():
        spoil(shard)
    with open_stack(alice.file) as stack:
        assert came(stack, alice) == 0
        assert stack.counters()["fs"]["failed_not_private"] >= BLOCKS
        files = stack.counters()["fs"]["failed_not_private"]
        assert store(stack, alice, 0) == 0
        assert stack.counters()["fs"]["failed_not_private"] > files
        assert store(stack, alice, 100) > 0, "other shards are good"


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_namespace_that_somebody_exchanges_while_it_is_open_is_not_believed(
    alice: Tenant, top: Path, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    alice.store(BLOCKS)
    namespace = top / alice.digest
    with open_stack(alice.file) as stack:
        epoch = stack.secondary_tiers[0].describe()["epoch"]
        namespace.rename(tmp_path / "away")
        forge(namespace, alice)
        (namespace / EPOCH).rename(namespace / str(epoch))
        spoil(namespace)
        before = entries(namespace)
        assert came(stack, alice) == 0
        assert store(stack, alice, 100) == 0
        assert stack.counters()["fs"]["failed_not_private"] >= 2
        assert entries(namespace) == before
    shutil.rmtree(namespace)
    (tmp_path / "away").rename(namespace)
    assert alice.load(BLOCKS) == (BLOCKS, 0)


@needs_root
def test_a_shared_directory_without_modes_is_everybody_s(alice: Tenant, top: Path) -> None:
    alice.store(BLOCKS)
    for path in (top, *top.rglob("*")):
        os.chown(path, STRANGER, STRANGER)
        path.chmod(0o777)
    open_to_all(alice)
    with open_stack(alice.file) as stack:
        assert came(stack, alice) == BLOCKS
        assert store(stack, alice, 100) == BLOCKS


def exchange(path: Path, elsewhere: Path) -> dict[str, tuple[int, int, int]]:
    """Move a directory away and put a link to it in its place; return what there is."""
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    return entries(elsewhere)


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("which", ["namespace", "epoch", "shards"])
def test_a_link_in_a_directory_s_place_is_followed_neither_by_loads_nor_by_stores(
    alice: Tenant, top: Path, tmp_path: Path, which: str, private: bool
) -> None:
    if not private:
        open_to_all(alice)
    with open_stack(alice.file) as stack:
        assert alice.put(stack, alice.keys(BLOCKS)) == BLOCKS
    with open_stack(alice.file) as stack:
        assert came(stack, alice) == BLOCKS
    with open_stack(alice.file) as stack:  # none of the blocks is in its memory
        paths = inner(top, alice)
        exchanged = list(paths["epoch"].iterdir()) if which == "shards" else [paths[which]]
        before = [exchange(path, tmp_path / f"away{number}") for number, path in enumerate(exchanged)]
        assert came(stack, alice) == 0
        assert store(stack, alice, 0) == 0, "the names that are behind the links"
        assert any(count for name, count in stack.counters()["fs"].items() if name.startswith("failed_"))
        assert [entries(tmp_path / f"away{number}") for number in range(len(exchanged))] == before


@pytest.mark.parametrize("which", ["namespace", "epoch", "shard"])
def test_making_room_removes_nothing_through_a_link_in_a_directory_s_place(
    alice: Tenant, top: Path, tmp_path: Path, which: str
) -> None:
    from tiered_kv_fs.counters import Counters
    from tiered_kv_fs.sweeper import Sweeper
    from tiered_kv_fs.volume import Identity, Volume

    open_to_all(alice)
    with open_stack(alice.file) as stack:
        assert alice.put(stack, alice.keys(BLOCKS)) == BLOCKS
    volume = Volume(str(top), Identity(bytes.fromhex(alice.digest), {}, BLOCK_BYTES), private=False)
    try:
        sweeper = Sweeper(volume, 1 << 20, None, 0, Counters())
        sweeper.make_room(0, must_count=True)
        paths = inner(top, alice)
        shards = sorted(paths["epoch"].iterdir())
        exchanged = shards if which == "shard" else [paths[which]]
        before = [exchange(path, tmp_path / f"away{number}") for number, path in enumerate(exchanged)]
        sweeper.make_room(1 << 20)
        assert [entries(tmp_path / f"away{number}") for number in range(len(exchanged))] == before
    finally:
        volume.close(gives_up=True)


def test_ended_owners_are_not_looked_for_behind_a_link(alice: Tenant, top: Path, tmp_path: Path) -> None:
    from tiered_kv_fs.volume import Identity, Volume

    open_to_all(alice)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ("0" * 16)).write_bytes(b"precious")  # what looks like an owner's file that nobody has locked
    volume = Volume(str(top), Identity(bytes.fromhex(alice.digest), {}, BLOCK_BYTES), private=False)
    try:
        (top / "owners").rename(tmp_path / "away")
        (top / "owners").symlink_to(elsewhere)
        with volume.ledger.locked() as state, pytest.raises(NotADirectoryError):
            volume.reap(state)
        assert os.listdir(elsewhere) == ["0" * 16]
    finally:
        volume.close(gives_up=True)
