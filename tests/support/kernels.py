"""The kernel's files about huge pages, as several machines have them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

MACHINES: Final = {
    # By the size of a page: the sizes of reserved pages, the default one first, and the sizes of transparent ones.
    "x86-64": ((2 * MIB, GIB), (16 * KIB, 64 * KIB, MIB, 2 * MIB)),
    "arm64, pages of 16 KiB": ((32 * MIB, 2 * MIB, GIB), (64 * KIB, 2 * MIB, 32 * MIB)),
    "arm64, pages of 64 KiB": ((512 * MIB, 2 * MIB, 16 * GIB), (2 * MIB, 512 * MIB)),
}
POOLS: Final = "sys/kernel/mm/hugepages"
TRANSPARENT: Final = "sys/kernel/mm/transparent_hugepage"
_WORDS: Final = {
    "enabled": ("always", "madvise", "never"),
    "shmem_enabled": ("always", "within_size", "advise", "never", "deny", "force"),
    "one enabled": ("always", "inherit", "madvise", "never"),
    "one shmem_enabled": ("always", "inherit", "within_size", "advise", "never"),
}


def write_files(root: Path, files: Mapping[str, object]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")


def chosen(setting: str, word: str) -> str:
    """Return the text of a file that lists what may be chosen, with the chosen word in brackets."""
    return " ".join(f"[{each}]" if each == word else each for each in _WORDS[setting])


def write_machine(
    root: Path, machine: str, free: Mapping[int, int] | None = None, *, promised: Mapping[int, int] | None = None
) -> None:
    """Write a machine's files below `root`: `free` pages are reserved of each size, and `promised` of them."""
    sizes, transparent = MACHINES[machine]
    free, promised = free or {}, promised or {}
    default = sizes[0]
    meminfo = (
        f"MemTotal: {256 * GIB >> 10} kB\nMemAvailable: {200 * GIB >> 10} kB\n"
        f"HugePages_Total: {free.get(default, 0)}\nHugePages_Free: {free.get(default, 0)}\n"
        f"HugePages_Rsvd: {promised.get(default, 0)}\nHugepagesize: {default >> 10} kB"
    )
    files: dict[str, object] = {"proc/meminfo": meminfo}
    for size in sizes:
        folder = f"{POOLS}/hugepages-{size >> 10}kB"
        for name, count in (("nr", free), ("free", free), ("resv", promised)):
            files[f"{folder}/{name}_hugepages"] = count.get(size, 0)
    files[f"{TRANSPARENT}/hpage_pmd_size"] = transparent[-1]
    for setting in ("enabled", "shmem_enabled"):
        files[f"{TRANSPARENT}/{setting}"] = chosen(setting, "never")
        for size in transparent:
            word = "inherit" if size == transparent[-1] else "never"
            files[f"{TRANSPARENT}/hugepages-{size >> 10}kB/{setting}"] = chosen(f"one {setting}", word)
    write_files(root, files)


def give_transparent(root: Path, setting: str, word: str, size: int = 0) -> None:
    """Choose what the kernel does of itself: with pages of a size, or where each size inherits it."""
    name = f"hugepages-{size >> 10}kB/{setting}" if size else setting
    write_files(root, {f"{TRANSPARENT}/{name}": chosen(f"one {setting}" if size else setting, word)})
