#!/usr/bin/env bash
# XFS: new files of 68 KiB take 88 KiB of the free space that statvfs(2) tells, until they are written back.
#
# What happens: a buffered write has no place on the disk yet (delayed allocation). For each file XFS reserves besides its
# blocks what its tree of extents might need at worst, some 20 KiB here (xfs_bmap_worst_indlen in the kernel's
# fs/xfs/libxfs/xfs_bmap.c). st_blocks and `du` do not count the reserve, and f_bfree does. sync(2) gives it back.
# So a directory of small files whose size a program keeps to a limit looks 1.3 times as large to `df` for the half
# minute that writeback takes, and a disk is full sooner than the sum of its files says.
# Seen: Linux 6.18.44, xfsprogs 6.1.0, blocks of 4 KiB. It needs root, and a loop device.
set -euo pipefail
work=$(mktemp -d)
cleanup() { umount "$work/mount" 2>/dev/null || true; rm -rf "$work"; }
trap cleanup EXIT
cd "$work"
apt-get download -q xfsprogs=6.1.0-1 >/dev/null 2>&1
dpkg -x ./*.deb tools
printf 'kernel %s\n' "$(uname -r)"
make=$(echo tools/*bin/mkfs.xfs)
"$make" -V
truncate -s 400M image
"$make" -q image
mkdir mount
mount -o loop image mount
python3 - mount <<'PYTHON'
import os, sys

place, files, size = sys.argv[1], 1000, 68 << 10


def used():
    status = os.statvfs(place)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


before = used()
for number in range(files):
    with open(f"{place}/{number}", "wb", buffering=0) as file:
        file.write(bytes(size))
new = (used() - before) / files
occupied = sum(os.stat(f"{place}/{number}").st_blocks * 512 for number in range(files)) / files
os.sync()
written = (used() - before) / files
print(f"a file of {size >> 10} KiB: st_blocks {occupied / 1024:.0f} KiB; of the free space it takes {new / 1024:.0f} KiB, after sync {written / 1024:.0f}")
sys.exit(not (occupied == size and new > 1.2 * size and written < 1.05 * size))
PYTHON
