"""Claiming a directory, again or with somebody else's things in it: no reset is undone, nothing leaks, counts go on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tiered_kv_fs.posix
import tiered_kv_fs.sweeper
from tiered_kv.errors import TierUnavailableError
from tiered_kv_fs.counters import Counters
from tiered_kv_fs.epochs import new_epoch, write_epoch
from tiered_kv_fs.owner import Owner
from tiered_kv_fs.sweeper import Sweep, Sweeper
from tiered_kv_fs.volume import Identity, Volume

OURS = Identity(b"\1" * 16, {}, 4096)
OTHERS = Identity(b"\2" * 16, {}, 4096)
STRANGER = 12345

OpenVolume = Callable[[Identity], Volume]


@pytest.fixture
def open_volume(tmp_path: Path) -> Iterator[OpenVolume]:
    opened: list[Volume] = []

    def open_one(identity: Identity) -> Volume:
        opened.append(Volume(str(tmp_path / "kv"), identity))
        return opened[-1]

    yield open_one
    for volume in opened:
        if volume.owner._fd >= 0:
            volume.close(gives_up=True)


def sweeper_of(volume: Volume) -> Sweeper:
    return Sweeper(volume, 64 << 20, None, 1 << 20, Counters())


def test_a_claim_that_is_renewed_does_not_undo_another_process_s_reset(open_volume: OpenVolume) -> None:
    resetting, claiming = open_volume(OURS), open_volume(OURS)
    reset_to = new_epoch()
    with resetting.ledger.locked(), resetting.opened_namespace() as namespace_fd:
        write_epoch(namespace_fd, reset_to)
    (Path(claiming.owners_path) / claiming.owner.name).unlink()  # as another host does that has seen its lock lost
    claiming.claim_again(claiming.found_epoch)
    assert claiming.owner.is_present
    assert open_volume(OURS).found_epoch == reset_to


def test_a_claim_that_is_renewed_makes_the_epoch_anew_where_all_was_removed(open_volume: OpenVolume) -> None:
    volume = open_volume(OURS)
    for path in Path(volume.namespace_path).iterdir():
        path.unlink()
    Path(volume.namespace_path).rmdir()
    volume.claim_again(volume.found_epoch)
    assert open_volume(OURS).found_epoch == volume.found_epoch


def test_a_reset_of_a_namespace_that_is_open_to_others_is_done_once_that_is_mended(open_volume: OpenVolume) -> None:
    dying = open_volume(OURS)
    dying.owner.ask_for_reset(1)
    os.close(dying.owner._fd)  # its lock is gone with it
    dying.owner._fd = -1
    Path(dying.namespace_path).chmod(0o770)
    open_volume(OTHERS)
    Path(dying.namespace_path).chmod(0o700)
    assert open_volume(OURS).found_epoch != dying.found_epoch


def test_a_claim_that_fails_leaves_no_owner_behind(
    open_volume: OpenVolume, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def is_full(self: Owner, epoch: str, resets: int) -> None:
        raise OSError(28, "no space left")

    open_volume(OURS)
    with monkeypatch.context() as patch:
        patch.setattr(Owner, "note_epoch", is_full)
        before = len(os.listdir("/proc/self/fd")), os.listdir(tmp_path / "kv" / "owners")
        for _ in range(3):
            with pytest.raises(TierUnavailableError):
                open_volume(OTHERS)
        assert (len(os.listdir("/proc/self/fd")), os.listdir(tmp_path / "kv" / "owners")) == before


def test_a_file_of_several_names_is_taken_for_no_lock(open_volume: OpenVolume, tmp_path: Path) -> None:
    volume = open_volume(OURS)
    victim = tmp_path / "victim"
    victim.touch()
    os.utime(victim, (1, 1))
    Path(volume.sweep_path).unlink(missing_ok=True)
    os.link(victim, volume.sweep_path)
    with pytest.raises(OSError, match="sweep"):
        sweeper_of(volume).make_room(1000, must_count=True)
    assert victim.stat().st_mtime == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory another user's")
def test_a_stranger_s_closed_directory_does_not_end_the_count(
    open_volume: OpenVolume, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may look into any directory, so the calls that another user fails at are made to fail."""
    volume = open_volume(OURS)
    closed = Path(volume.path) / ("ab" * 16)
    closed.mkdir(0o700)
    os.chown(closed, STRANGER, STRANGER)
    real_scandir, real_opened = os.scandir, tiered_kv_fs.posix.opened_directory

    def scandir(path: str) -> object:
        if path == str(closed):
            raise PermissionError(13, "not allowed", path)
        return real_scandir(path)

    def opened_directory(path: str, dir_fd: int | None = None) -> object:
        if path == str(closed):
            raise PermissionError(13, "not allowed", path)
        return real_opened(path, dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        patch.setattr(tiered_kv_fs.sweeper, "opened_directory", opened_directory)
        sweeper = sweeper_of(volume)
        assert sweeper.make_room(1000, must_count=True) is Sweep.DONE
        # One's own that cannot be read may hold blocks that have to be counted.
        os.chown(closed, os.geteuid(), -1)
        with pytest.raises(PermissionError):
            sweeper.make_room(1000, must_count=True)
