"""Mounted file systems: a small one in memory, and an ext4 image whose power can be cut. They need root.

They are mounted in this process's mount namespace. `command_in_namespace` starts a process in a new one, which
disappears with all its mounts when the process ends.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Final

_SHUTDOWN: Final = 0x8004587D
"""FS_IOC_SHUTDOWN of <linux/fs.h>, which ext4 and XFS know: _IOR('X', 125, __u32)."""
_TIMEOUT_S: Final = 120.0
_IMAGE_BYTES: Final = 16 << 20


class PowerLoss(IntEnum):
    """What is still written when the file system is shut down; the values of the ioctl."""

    FLUSHED_LOG = 1
    """The journal, and with it what ordered mode writes before it (EXT4_GOING_FLAGS_LOGFLUSH)."""
    NOTHING = 2
    """Nothing: what is not on the device is lost (EXT4_GOING_FLAGS_NOLOGFLUSH)."""


def command_in_namespace(command: Sequence[str]) -> list[str]:
    return ["unshare", "--mount", "--propagation", "private", *command]


@functools.cache
def missing_for_tmpfs() -> str:
    """Return why tmpfs cannot be mounted here; "" if it can."""
    return _missing('mount -t tmpfs -o size=64k tmpfs "$0"')


@functools.cache
def missing_for_ext4() -> str:
    """Return why an ext4 image cannot be mounted here; "" if it can."""
    for program in ("mkfs.ext4", "losetup"):
        if _which(program) is None:
            return f"{program} is not installed"
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "image"
        try:
            make_image(image)
        except OSError as error:
            return str(error)
        return _missing(f'mount -o loop -t ext4 "{image}" "$0"')


_FILE_SYSTEMS: Final = {
    "bindfs": "mkdir source && bindfs source mount",
    "tmpfs": 'mount -t tmpfs -o "size=512m,$0" tmpfs mount',
    **{
        kind: f'truncate -s 512M image && {make} image >/dev/null && mount -o "loop,$0" image mount'
        for kind, make in (("btrfs", "mkfs.btrfs -q"), ("ext4", "mkfs.ext4 -q -F"), ("xfs", "mkfs.xfs -q"))
    },
}
"""Shell commands that mount a new file system of 512 MiB at `mount`, with the options `$0`."""


@functools.cache
def missing_for(kind: str) -> str:
    """Return why a file system of this kind cannot be mounted here; "" if it can."""
    program = kind if kind == "bindfs" else f"mkfs.{kind}"
    if kind != "tmpfs" and _which(program) is None:
        return f"{program} is not installed"
    if os.geteuid() != 0:
        return "mounting takes root"
    with tempfile.TemporaryDirectory() as folder:
        command = command_on(kind, "", Path(folder), ["true"])
        tried = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    return f"cannot be mounted here: {tried.stderr.strip()}" if tried.returncode else ""


def command_on(kind: str, options: str, folder: Path, command: Sequence[str]) -> list[str]:
    """Return a command that runs another with a new file system mounted at `folder`/mount, which ends with it."""
    path = 'PATH="$PATH:/usr/sbin:/sbin"'
    script = f'{path}; cd "{folder}" && mkdir mount && {_FILE_SYSTEMS[kind]} && cd / && "$@"'
    return command_in_namespace(["sh", "-c", script, options or "rw", *command])


@contextmanager
def small_tmpfs(point: Path, size_bytes: int) -> Iterator[Path]:
    point.mkdir(exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(point))
    try:
        yield point
    finally:
        _run("umount", str(point))


class Ext4Image:
    """An ext4 file system in a file, mounted while the context is entered."""

    def __init__(
        self, image: Path, point: Path, *, size_bytes: int = _IMAGE_BYTES, options: Sequence[str] = ()
    ) -> None:
        self._image = image
        self._point = point
        make_image(image, size_bytes, options)
        point.mkdir(exist_ok=True)

    def __enter__(self) -> Ext4Image:
        self._mount()
        return self

    def __exit__(self, *_: object) -> None:
        _run("umount", str(self._point))

    def cut_power(self, how: PowerLoss) -> None:
        """Shut the file system down, so that every call on it fails, and mount it again."""
        fd = os.open(self._point, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("<I", how.value))
        finally:
            os.close(fd)
        _run("umount", str(self._point))
        self._mount()

    def _mount(self) -> None:  # the loop device detaches itself when it is unmounted
        _run("mount", "-o", "loop", "-t", "ext4", str(self._image), str(self._point))


def make_image(image: Path, size_bytes: int = _IMAGE_BYTES, options: Sequence[str] = ()) -> None:
    with image.open("wb") as file:
        file.truncate(size_bytes)
    # 4 KiB blocks, as on disks of a usual size: O_DIRECT of pages needs no more.
    _run("mkfs.ext4", "-q", "-F", "-b", "4096", "-J", "size=4", "-O", "^resize_inode", *options, str(image))


def _missing(mount: str) -> str:
    if os.geteuid() != 0:
        return "mounting takes root"
    if _which("unshare") is None:
        return "unshare is not installed"
    with tempfile.TemporaryDirectory() as point:
        command = command_in_namespace(["sh", "-c", mount, point])
        tried = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    return f"cannot be mounted here: {tried.stderr.strip()}" if tried.returncode else ""


def _run(program: str, *arguments: str) -> None:
    path = _which(program)
    assert path is not None, f"{program} is not installed"
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    if done.returncode:
        raise OSError(f"{program} {' '.join(arguments)}: {done.stderr.strip()}")


def _which(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
