#!/usr/bin/env bash
# btrfs: a directory that a program holds open is listed once as it was before the program's last files.
#
# What happens: os.listdir(fd) of Python reads from where the descriptor stands, and goes back to the beginning only
# after it has read (CPython, Modules/posixmodule.c: fdopendir, readdir, rewinddir). btrfs fixes at open(2), and at each
# rewind, the last entry that a descriptor shows. So the first listing after a file was made does not have it, and the
# next one does. POSIX leaves open whether readdir(3) returns files that were made after opendir or rewinddir. On ext4,
# in the same run, the first listing has the file.
# Seen: Linux 6.18.44, Python 3.11.7, btrfs-progs 6.2, e2fsprogs 1.47.0. It needs root, and a loop device.
# What a program can do: open "." anew relative to the descriptor, and list that.
set -euo pipefail
work=$(mktemp -d)
cleanup() { umount "$work/mount" 2>/dev/null || true; rm -rf "$work"; }
trap cleanup EXIT
cd "$work"
apt-get download -q btrfs-progs=6.2-1+deb12u2 e2fsprogs=1.47.0-2+b2 >/dev/null 2>&1
for package in ./*.deb; do dpkg -x "$package" tools; done
printf 'kernel %s, %s\n' "$(uname -r)" "$(python3 --version)"
tools/*bin/mkfs.btrfs --version

cat >look.py <<'PYTHON'
import os, sys

directory = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)
os.close(os.open("block", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=directory))
first, second = ("block" in os.listdir(directory) for _ in range(2))
again = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=directory)
print("first", first, "second", second, "opened anew", "block" in os.listdir(again))
PYTHON

seen() {  # seen KIND: make such a file system, and look at a new directory of it
    truncate -s 256M "$work/image.$1"
    local make; make=$(echo "$work"/tools/*bin/mkfs."$1")
    if [ "$1" = ext4 ]; then "$make" -q -F "$work/image.$1"; else "$make" -q "$work/image.$1" >/dev/null 2>&1; fi
    mkdir -p "$work/mount"
    mount -o loop "$work/image.$1" "$work/mount"
    mkdir "$work/mount/directory"
    python3 look.py "$work/mount/directory"
    umount "$work/mount"
}
btrfs=$(seen btrfs)
ext4=$(seen ext4)
echo "btrfs: $btrfs"
echo "ext4:  $ext4"
[ "$btrfs" = "first False second True opened anew True" ] && [ "$ext4" = "first True second True opened anew True" ]
