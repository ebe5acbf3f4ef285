"""What others have put into an fs tier's directory is not believed, nor written to: in ours, and in a shared one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.tenants import BLOCK_BYTES, DirectoryStorage, Tenant
from tiered_kv.errors import ConfigError, FormatError, TieredKVError, TierUnavailableError
from tiered_kv.stack import open_stack
from tiered_kv.toolkit.codecs import PLAIN
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
        path.write_bytes(b"".join(encode_record(key, forged, bytes.fromhex(tenant.digest), PLAIN, _buffer)))


def _buffer(size: int) -> memoryview:
    return memoryview(bytearray(size))


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
    with pytest.raises(FormatError, match=rf"not a directory of this tier \(it holds '{alice.digest}'\)"):
        open_stack(alice.file)
    assert entries(top) == before


PLANTED: dict[str, Callable[[Path], object]] = {
    "f" * 32: lambda path: path.mkdir(),
    f".{'f' * 32}.{'0' * 16}.purged": lambda path: path.mkdir(),
    "ledger": lambda path: path.write_bytes(b""),
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
    with pytest.raises(TieredKVError, match=rf"{STRANGER}|not a directory of this tier|mode 1777"):
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
    with pytest.raises((ConfigError, FormatError), match=rf"not a directory of this tier|mode 1777; .*chmod 700 {top}"):
        open_stack(alice.file)
    assert entries(top) == before


def test_what_a_process_that_was_killed_before_the_marker_has_left_does_not_keep_others_out(
    alice: Tenant, top: Path
) -> None:
    top.mkdir(mode=0o700)
    (top / f".tiered-kv-fs.json.{'0' * 16}.tmp").write_bytes(b"")
    assert alice.store(BLOCKS) == BLOCKS
    assert alice.load(BLOCKS) == (BLOCKS, 0)


@needs_root
def test_a_stranger_s_namespace_in_a_directory_of_ours_is_refused_at_the_opening(alice: Tenant, top: Path) -> None:
    alice.store(BLOCKS)
    path = top / alice.digest
    os.chown(path, STRANGER, STRANGER)
    with pytest.raises(TierUnavailableError, match=rf"{path} belongs to another user \(uid {STRANGER}\)"):
        open_stack(alice.file)
    os.chown(path, os.geteuid(), os.getegid())
    assert alice.load(BLOCKS) == (BLOCKS, 0)


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
def test_a_namespace_s_directory_into_which_others_can_write_is_refused_and_says_what_to_do(
    alice: Tenant, top: Path, mode: int
) -> None:
    alice.store(BLOCKS)
    path = top / alice.digest
    path.chmod(mode)
    with pytest.raises(TierUnavailableError, match=rf"{path} can be written to by others \(mode {mode:04o}\)"):
        open_stack(alice.file)
    path.chmod(0o700)
    assert alice.load(BLOCKS) == (BLOCKS, 0)


@needs_root
def test_a_block_of_another_user_is_a_counted_miss_and_is_stored_again(alice: Tenant, top: Path) -> None:
    alice.store(BLOCKS)
    with open_stack(alice.file) as stack:
        for block in top.glob("*/*/*/*"):
            os.chown(block, STRANGER, STRANGER)
        assert alice.wrong(stack, alice.keys(BLOCKS)) == (0, 0)
    assert alice.store(BLOCKS) == BLOCKS
    assert alice.load(BLOCKS) == (BLOCKS, 0)


@needs_root
def test_a_shared_directory_without_modes_is_everybody_s(alice: Tenant, top: Path) -> None:
    alice.store(BLOCKS)
    for path in (top, *top.rglob("*")):
        os.chown(path, STRANGER, STRANGER)
        path.chmod(0o777)
    open_to_all(alice)
    with open_stack(alice.file) as stack:
        assert alice.wrong(stack, alice.keys(BLOCKS)) == (BLOCKS, 0)
        assert alice.put(stack, alice.keys(BLOCKS, 100)) == BLOCKS
