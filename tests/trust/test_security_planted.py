"""What others have put into an fs tier's directory is not believed, nor written to: in ours, and in a shared one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.tenants import DirectoryStorage, Tenant
from tiered_kv.errors import ConfigError, FormatError, TieredKVError, TierUnavailableError
from tiered_kv.stack import open_stack

pytestmark = pytest.mark.trust("security")

STRANGER = 12345
BLOCKS = 8
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture
def alice(tmp_path: Path) -> Tenant:
    return Tenant("alice", DirectoryStorage(tmp_path, "fs"))


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """The directory, which is not there yet."""
    return tmp_path / "kv"


def entries(path: Path) -> dict[str, tuple[int, int, int]]:
    """Return all that is in a directory, itself included: whose, with what mode, changed when."""
    found = [path, *path.rglob("*")]
    return {str(each): (each.lstat().st_uid, each.lstat().st_mode, each.lstat().st_mtime_ns) for each in found}


PLANTED: dict[str, Callable[[Path], object]] = {
    "f" * 32: lambda path: path.mkdir(),
    f".{'f' * 32}.{'0' * 16}.purged": lambda path: path.mkdir(),
    "ledger": lambda path: path.write_bytes(b""),
    "tiered-kv-fs.json": lambda path: path.write_text('{"format": 1, "tier": "fs"}'),
}
"""Names that this tier gives, a namespace's first, and how to put something there."""


@needs_root
@pytest.mark.parametrize("mode", [0o1777, 0o755, 0o700])
@pytest.mark.parametrize("name", PLANTED)
def test_a_directory_that_is_not_used_yet_and_holds_a_stranger_s_entry_is_refused_untouched(
    alice: Tenant, top: Path, name: str, mode: int
) -> None:
    top.mkdir()
    PLANTED[name](top / name)
    os.chown(top / name, STRANGER, STRANGER)
    top.chmod(mode)
    before = entries(top)
    with pytest.raises(TieredKVError, match=rf"{STRANGER}|not a directory of this tier|mode (1777|0755)"):
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
    alice.file.write_text(alice.file.read_text().replace("type: fs", "type: fs\n  private: false"))
    with open_stack(alice.file) as stack:
        assert alice.wrong(stack, alice.keys(BLOCKS)) == (BLOCKS, 0)
        assert alice.put(stack, alice.keys(BLOCKS, 100)) == BLOCKS
