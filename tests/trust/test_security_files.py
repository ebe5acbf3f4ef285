"""Files on disk and in shared memory are private, and planted files are neither followed nor written to."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.places import Place
from tests.support.tenants import BLOCK_BYTES, Tenant
from tiered_kv.cli.main import main
from tiered_kv.cpu.region import Geometry
from tiered_kv.errors import ConfigError, FormatError, TieredKVError, TierUnavailableError
from tiered_kv.stack.open import open_stack
from tiered_kv.worker.shared import SharedRegion
from tiered_kv.worker.shared_file import SharedFile

pytestmark = pytest.mark.trust("security")

TIERS = ("nvme", "fs")
FILES = {
    "nvme": ("lock", "epoch", "tiered-kv-nvme.json", "segment"),
    "fs": ("tiered-kv-fs.json",),
}
"""Files that a tier reads or writes when it opens a directory."""
CASES = [(tier, name) for tier, names in FILES.items() for name in names]
VICTIM = b"precious" * 1024
OTHER_UID = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture(params=TIERS)
def tenant(request: pytest.FixtureRequest, tmp_path: Path) -> Tenant:
    return Place(request.param, tmp_path).tenant("alice")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0, 0o022, 0o077])
@pytest.mark.parametrize("tier", TIERS)
def test_files_and_directories_are_private_with_any_umask(tier: str, mask: int, tmp_path: Path) -> None:
    nested = tmp_path / "made" / "above"
    with umask(mask):
        tenant = Place(tier, tmp_path).tenant("alice")
        tenant.file.write_text(tenant.file.read_text().replace(str(tmp_path), str(nested)))
        tenant.store(8)
    entries = [tmp_path / "made", nested, *nested.rglob("*")]
    assert len(entries) > 5
    wrong = [path for path in entries if mode_of(path) != (0o700 if path.is_dir() else 0o600)]
    assert wrong == []


@pytest.mark.one_quick(4)
@pytest.mark.parametrize("mode", [0o702, 0o707, 0o777, 0o1777])
def test_a_directory_with_blocks_that_all_can_write_to_is_refused_and_says_what_to_do(
    tenant: Tenant, mode: int
) -> None:
    tenant.store(4)
    directory = tenant.path
    directory.chmod(mode)
    with pytest.raises(
        ConfigError, match=rf"secondary\.0\.path: .*mode {mode:04o}; .*chmod 700 {directory}; or set .private: f"
    ):
        open_stack(tenant.file)
    directory.chmod(0o700)
    assert tenant.load(4) == (4, 0)


def widen(directory: Path) -> None:
    """Give all entries to a group, as kubelet does for a volume of a pod with an `fsGroup`."""
    for path in (directory, *directory.rglob("*")):
        if os.geteuid() == 0:
            os.chown(path, -1, 2000)
        path.chmod(path.stat().st_mode & 0o7777 | (0o2770 if path.is_dir() else 0o660))


def test_what_a_platform_gave_to_a_group_is_closed_again(tenant: Tenant) -> None:
    tenant.store(8)
    widen(tenant.path.parent)
    assert tenant.load(8) == (8, 0)
    for path in (tenant.path, *tenant.path.iterdir()):  # no other user can reach the files of fs below these
        assert mode_of(path) & 0o077 == 0 or path.name in ("lock", "sweep", "ledger"), path
    assert tenant.store(16) == 16


@pytest.mark.one_quick(4)
@pytest.mark.parametrize("mode", [0o755, 0o750, 0o770, 0o701])
def test_a_directory_that_not_all_can_write_to_is_closed(tenant: Tenant, mode: int) -> None:
    tenant.store(4)
    tenant.path.chmod(mode)
    assert tenant.load(4) == (4, 0)
    assert mode_of(tenant.path) == 0o700


@needs_root
def test_a_group_s_directory_with_an_entry_of_another_user_is_refused(tenant: Tenant) -> None:
    tenant.store(4)
    tenant.path.chmod(0o770)
    (tenant.path / "planted").write_bytes(b"")
    os.chown(tenant.path / "planted", OTHER_UID, OTHER_UID)
    with pytest.raises(ConfigError, match=r"mode 0770 and in it 'planted' of uid 12345; remove it"):
        open_stack(tenant.file)
    assert mode_of(tenant.path) == 0o770


def test_a_file_system_that_keeps_its_modes_is_refused_with_the_setting_to_change(
    tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant.store(4)
    tenant.path.chmod(0o770)
    monkeypatch.setattr("os.fchmod", lambda *_: None)  # as CIFS and FUSE do
    with pytest.raises(ConfigError, match=r"mode 0770, which its file system does not change; .*set .private: false"):
        open_stack(tenant.file)


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o1777])
def test_an_empty_directory_of_ours_is_closed_to_others(tenant: Tenant, mode: int) -> None:
    """A new file system's `lost+found` does not count."""
    directory = tenant.path
    directory.mkdir()
    (directory / "lost+found").mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(directory / "lost+found", OTHER_UID, OTHER_UID)
    directory.chmod(mode)
    assert tenant.store(4) == 4
    assert mode_of(directory) & 0o077 == 0


@needs_root
def test_another_user_s_directory_is_refused_and_not_purged(tenant: Tenant, capsys: pytest.CaptureFixture[str]) -> None:
    tenant.store(4)
    directory = tenant.path
    before = sorted(os.listdir(directory))
    os.chown(directory, OTHER_UID, OTHER_UID)
    with pytest.raises(ConfigError, match=r"found .* of uid 12345; .*make sure that nobody has put .*: chown -R 0"):
        open_stack(tenant.file)
    assert main(["purge", str(tenant.file), "--yes"]) == 1
    assert str(OTHER_UID) in capsys.readouterr().out
    assert sorted(os.listdir(directory)) == before
    os.chown(directory, os.geteuid(), os.getegid())
    assert tenant.load(4) == (4, 0)


def test_a_directory_that_is_a_symbolic_link_is_refused(tenant: Tenant, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    tenant.path.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match=r"found the symbolic link .*; give the path that it leads to"):
        open_stack(tenant.file)
    assert os.listdir(elsewhere) == []


def made(tier: str, name: str, tmp_path: Path) -> tuple[Tenant, Path]:
    """Return a tenant that has stored blocks, and one of the files that its tier opens."""
    tenant = Place(tier, tmp_path).tenant("alice")
    tenant.store(8)
    directory = tenant.path
    path = min(directory.glob("segment-*")) if name == "segment" else directory / name
    assert path.is_file()
    return tenant, path


PLANTS: dict[str, Callable[[Path, Path], None]] = {
    "symbolic link": lambda path, victim: path.symlink_to(victim),
    "hard link": lambda path, victim: path.hardlink_to(victim),
    "pipe": lambda path, victim: os.mkfifo(path),
    "directory": lambda path, victim: path.mkdir(),
}


@pytest.mark.one_quick(4)
@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize(("tier", "name"), CASES)
def test_a_file_planted_in_a_file_s_place_is_neither_followed_nor_written_to_nor_waited_for(
    tier: str, name: str, plant: str, tmp_path: Path
) -> None:
    tenant, path = made(tier, name, tmp_path)
    victim = tmp_path / "victim"
    victim.write_bytes(VICTIM)
    path.unlink()
    PLANTS[plant](path, victim)
    refusal = ""
    try:
        with open_stack(tenant.file) as stack:  # a planted segment may be dropped: a cache may lose blocks
            _, wrong = tenant.wrong(stack, tenant.keys(8))
            assert wrong == 0
    except TieredKVError as error:
        refusal = str(error)
    assert not refusal or name in refusal or str(path.parent) in refusal
    assert victim.read_bytes() == VICTIM
    assert victim.stat().st_nlink == (2 if plant == "hard link" and path.exists() else 1)


@needs_root
@pytest.mark.parametrize(("tier", "name"), CASES)
def test_a_file_of_another_user_is_refused(tier: str, name: str, tmp_path: Path) -> None:
    tenant, path = made(tier, name, tmp_path)
    os.chown(path, OTHER_UID, OTHER_UID)
    with pytest.raises(TierUnavailableError, match=r"belongs to another user \(uid 12345\)"):
        open_stack(tenant.file)


@pytest.mark.parametrize(("tier", "name"), CASES)
def test_a_file_with_a_looser_mode_is_closed_to_others(tier: str, name: str, tmp_path: Path) -> None:
    tenant, path = made(tier, name, tmp_path)
    path.chmod(0o666)
    assert tenant.load(8) == (8, 0)
    assert mode_of(path) == 0o600


def test_a_namespace_that_is_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    tenant = Place("fs", tmp_path).tenant("alice")
    tenant.path.mkdir(mode=0o700)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tenant.path / "tiered-kv-fs.json").write_text('{"format": 1}')
    (tenant.path / tenant.digest).symlink_to(elsewhere)
    with pytest.raises(TieredKVError, match="is a symbolic link; remove it"):
        open_stack(tenant.file)
    assert os.listdir(elsewhere) == []


@pytest.mark.parametrize("tier", TIERS)
def test_where_a_file_system_keeps_no_modes_the_check_can_be_turned_off_and_check_shows_it(
    tier: str, tmp_path: Path
) -> None:
    tenant = Place(tier, tmp_path).tenant("alice", private=False)
    tenant.store(4)
    for path in (tenant.path, *tenant.path.rglob("*")):
        if os.geteuid() == 0:
            os.chown(path, OTHER_UID, OTHER_UID)
        path.chmod(0o777)
    with open_stack(tenant.file) as stack:
        assert tenant.wrong(stack, tenant.keys(4)) == (4, 0)
        assert tenant.put(stack, tenant.keys(4, 100)) == 4
        assert stack.secondary_tiers[0].describe()["private"] is False
    assert mode_of(tenant.path) == 0o777


@pytest.fixture
def shared() -> Iterator[Path]:
    """Return the place of a region's file."""
    path = Path("/dev/shm") / f"tiered-kv-test-{os.getpid()}+workers"
    yield path
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def join(path: Path, *parties: str) -> SharedRegion:
    file = SharedFile(path.name.removesuffix("+workers"), "a", ["a", *parties])
    return SharedRegion.join(file, Geometry(2, BLOCK_BYTES))


@pytest.mark.parametrize("plant", PLANTS)
def test_a_file_planted_in_the_place_of_a_region_is_refused(plant: str, shared: Path) -> None:
    victim = shared.with_name(f"{shared.name}-victim")  # a hard link needs the same file system
    victim.write_bytes(bytes(2 * BLOCK_BYTES))
    try:
        PLANTS[plant](shared, victim)
        with pytest.raises(ConfigError):
            join(shared)
        assert victim.read_bytes() == bytes(2 * BLOCK_BYTES)
    finally:
        victim.unlink()


@needs_root
def test_another_user_s_region_is_refused(shared: Path) -> None:
    shared.write_bytes(bytes(2 * BLOCK_BYTES))
    os.chown(shared, OTHER_UID, OTHER_UID)
    with pytest.raises(ConfigError, match="belongs to another user"):
        join(shared)


def test_a_region_is_private_with_any_umask(shared: Path) -> None:
    with umask(0):
        joined = join(shared, "b")
    try:
        assert mode_of(shared) == 0o600
    finally:
        joined.close()


# In a directory of fs, which a namespace shares with others.


@pytest.fixture
def alice(tmp_path: Path) -> Tenant:
    return Place("fs", tmp_path).tenant("alice")


def entries(path: Path) -> dict[str, tuple[int, int, int]]:
    """Return owner, mode and time of change of a directory and all its entries."""
    found = [path, *path.rglob("*")]
    return {str(each): (each.lstat().st_uid, each.lstat().st_mode, each.lstat().st_mtime_ns) for each in found}


PLANTED: dict[str, Callable[[Path], object]] = {
    "f" * 32: lambda path: path.mkdir(),
    f".{'f' * 32}.{'0' * 16}.purged": lambda path: path.mkdir(),
    "ledger": lambda path: path.write_bytes(b""),
    "tiered-kv-fs.json": lambda path: path.write_text('{"format": 1, "tier": "fs"}'),
}
"""Names that this tier uses, and how to make an entry of that name."""


@needs_root
@pytest.mark.parametrize("mode", [0o1777, 0o755, 0o700])
@pytest.mark.parametrize("name", PLANTED)
def test_an_unused_directory_with_another_user_s_entry_is_refused_untouched(
    alice: Tenant, name: str, mode: int
) -> None:
    alice.path.mkdir()
    PLANTED[name](alice.path / name)
    os.chown(alice.path / name, OTHER_UID, OTHER_UID)
    alice.path.chmod(mode)
    before = entries(alice.path)
    with pytest.raises(TieredKVError, match=rf"{OTHER_UID}|not a directory of this tier|mode (1777|0755)"):
        open_stack(alice.file)
    assert entries(alice.path) == before


@pytest.mark.parametrize("name", PLANTED)
def test_a_directory_that_is_open_to_others_and_holds_anything_is_not_closed_but_refused(
    alice: Tenant, name: str
) -> None:
    alice.path.mkdir()
    PLANTED[name](alice.path / name)
    alice.path.chmod(0o1777)
    before = entries(alice.path)
    with pytest.raises(
        (ConfigError, FormatError), match=rf"not a directory of this tier|mode 1777; .*chmod 700 {alice.path}"
    ):
        open_stack(alice.file)
    assert entries(alice.path) == before


@needs_root
def test_another_user_s_namespace_in_a_directory_is_refused_at_the_opening(alice: Tenant) -> None:
    alice.store(8)
    path = alice.path / alice.digest
    os.chown(path, OTHER_UID, OTHER_UID)
    with pytest.raises(ConfigError, match=rf"found {path} of uid {OTHER_UID}"):
        open_stack(alice.file)
    os.chown(path, os.geteuid(), os.getegid())
    assert alice.load(8) == (8, 0)


@pytest.mark.parametrize("mode", [0o777, 0o702])
def test_a_namespace_s_directory_into_which_others_can_write_is_refused_and_says_what_to_do(
    alice: Tenant, mode: int
) -> None:
    alice.store(8)
    path = alice.path / alice.digest
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"found {path} with mode {mode:04o}; .*chmod 700"):
        open_stack(alice.file)
    path.chmod(0o700)
    assert alice.load(8) == (8, 0)


@needs_root
def test_a_block_of_another_user_is_a_counted_miss_and_is_stored_again(alice: Tenant) -> None:
    alice.store(8)
    with open_stack(alice.file) as stack:
        for block in alice.path.glob("*/*/*/*"):
            os.chown(block, OTHER_UID, OTHER_UID)
        assert alice.wrong(stack, alice.keys(8)) == (0, 0)
    assert alice.store(8) == 8
    assert alice.load(8) == (8, 0)
