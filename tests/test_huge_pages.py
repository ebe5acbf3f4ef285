"""Huge pages of several machines: which pool is taken, what is advised, what the kernel gives of itself, alignment."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from tests.support.kernels import GIB, KIB, MACHINES, MIB, give_transparent, write_files, write_machine
from tiered_kv.cpu.region import shared_sizes
from tiered_kv.system.huge_pages import HugePages, PoolLimit, aligned_to, map_aligned
from tiered_kv.system.limits import Limits

X86, ARM_16K, ARM_64K = MACHINES
V2 = "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
V1 = "30 20 0:26 / /sys/fs/cgroup/hugetlb rw - cgroup cgroup rw,hugetlb"


def pool(root: Path, size_bytes: int) -> HugePages:
    return Limits(str(root)).huge_pages(size_bytes)


@pytest.mark.parametrize("machine", MACHINES)
def test_each_pool_of_reserved_pages_is_found(machine: str, tmp_path: Path) -> None:
    sizes = MACHINES[machine][0]
    write_machine(tmp_path, machine, {size: 10 + at for at, size in enumerate(sizes)}, promised={sizes[-1]: 3})
    found = {each.page_bytes: each for each in Limits(str(tmp_path)).huge_page_pools()}
    assert found.keys() == set(sizes)
    assert [each.page_bytes for each in found.values() if each.is_default] == [sizes[0]]
    for at, size in enumerate(sizes):
        assert found[size].total_bytes == (10 + at) * size
        assert found[size].free_bytes == (10 + at - (3 if size == sizes[-1] else 0)) * size
        assert found[size].memfd_flags >> 26 == size.bit_length() - 1


@pytest.mark.parametrize(
    ("machine", "free", "wanted", "size"),
    [
        (X86, {2 * MIB: 32}, 64 * MIB, 2 * MIB),
        (X86, {GIB: 1}, 64 * MIB, GIB),
        (X86, {2 * MIB: 512, GIB: 1}, GIB, 2 * MIB),
        (ARM_64K, {2 * MIB: 64}, 64 * MIB, 2 * MIB),
        (ARM_64K, {2 * MIB: 512, 512 * MIB: 8}, 520 * MIB, 2 * MIB),
        (ARM_64K, {2 * MIB: 8192, 512 * MIB: 16}, 8 * GIB, 512 * MIB),
        (ARM_64K, {512 * MIB: 2}, 520 * MIB, 512 * MIB),
        (ARM_16K, {2 * MIB: 64}, 64 * MIB, 2 * MIB),
        (ARM_16K, {2 * MIB: 31, 32 * MIB: 2}, 64 * MIB, 32 * MIB),
    ],
)
def test_the_pool_that_has_enough_pages_and_wastes_few_is_taken(
    machine: str, free: dict[int, int], wanted: int, size: int, tmp_path: Path
) -> None:
    write_machine(tmp_path, machine, free)
    found = pool(tmp_path, wanted)
    assert found.page_bytes == size
    assert found.has_room_for(wanted)
    assert not found.advice(wanted)


@pytest.mark.parametrize(
    ("machine", "free", "wanted", "advice"),
    [
        (X86, {2 * MIB: 2}, 64 * MIB, "sysctl vm.nr_hugepages=32"),
        (ARM_64K, {512 * MIB: 1}, 64 * GIB, "sysctl vm.nr_hugepages=128"),
        (ARM_64K, {}, 64 * MIB, "echo 32 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"),
        (ARM_16K, {}, 64 * GIB, "sysctl vm.nr_hugepages=2048"),
    ],
)
def test_the_advice_counts_pages_of_the_machine(
    machine: str, free: dict[int, int], wanted: int, advice: str, tmp_path: Path
) -> None:
    write_machine(tmp_path, machine, free)
    assert pool(tmp_path, wanted).advice(wanted).endswith(advice)


@pytest.mark.parametrize("is_promised", [False, True])
@pytest.mark.parametrize("version", [1, 2])
def test_the_advice_names_the_limit_of_the_cgroup_that_binds(version: int, is_promised: bool, tmp_path: Path) -> None:
    write_machine(tmp_path, X86, {2 * MIB: 64})
    kind = "hugetlb.2MB.rsvd" if is_promised else "hugetlb.2MB"
    names = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
    folder = "sys/fs/cgroup/pod" if version == 2 else "sys/fs/cgroup/hugetlb/pod"
    above, unlimited = folder.removesuffix("/pod"), "max" if version == 2 else 0x7FFFFFFFFFE00000
    write_files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/inner" if version == 2 else "7:hugetlb:/pod/inner",
            "proc/self/mountinfo": V2 if version == 2 else V1,
            f"{above}/{kind}.{names[0]}": unlimited,
            f"{above}/{kind}.{names[1]}": 40 * MIB,
            f"{folder}/{kind}.{names[0]}": 48 * MIB,
            f"{folder}/{kind}.{names[1]}": 16 * MIB,
            f"{folder}/inner/{kind}.{names[0]}": unlimited,
            f"{folder}/inner/{kind}.{names[1]}": 0,
        },
    )
    found = pool(tmp_path, 64 * MIB)
    assert found.free_bytes == 32 * MIB
    assert found.where == f"{kind}.{names[0]} of the cgroup /{folder}"
    assert found.advice(64 * MIB) == f"raise {found.where} to {80 * MIB}"
    assert not found.advice(32 * MIB)


def test_both_are_advised_where_the_pool_and_a_limit_are_too_small() -> None:
    found = HugePages(2 * MIB, 8 * MIB, 2 * MIB, "x", True, 4 * MIB, (PoolLimit(2 * MIB, 0, "the limit"),))
    assert found.advice(8 * MIB) == (
        f"reserve them, at best when the machine starts: sysctl vm.nr_hugepages=6; raise the limit to {8 * MIB}"
    )


# Those that the kernel gives of itself.


@pytest.mark.parametrize("setting", ["enabled", "shmem_enabled"])
@pytest.mark.parametrize("machine", MACHINES)
def test_pages_of_one_size_are_given_where_that_size_alone_is_allowed(
    machine: str, setting: str, tmp_path: Path
) -> None:
    limits, advise = Limits(str(tmp_path)), "advise" if setting == "shmem_enabled" else "madvise"
    for size in MACHINES[machine][1]:
        write_machine(tmp_path, machine)
        assert limits.transparent_sizes(setting) == []  # type: ignore[arg-type]
        give_transparent(tmp_path, setting, advise, size)
        assert limits.transparent_sizes(setting) == [size]  # type: ignore[arg-type]
    give_transparent(tmp_path, setting, "always")
    assert limits.transparent_sizes(setting) == [MACHINES[machine][1][-1]]  # type: ignore[arg-type]


def test_the_largest_size_inherits_and_an_emergency_setting_is_stronger_than_all(tmp_path: Path) -> None:
    write_machine(tmp_path, ARM_64K)
    limits = Limits(str(tmp_path))
    give_transparent(tmp_path, "shmem_enabled", "within_size", 2 * MIB)
    give_transparent(tmp_path, "shmem_enabled", "advise")
    assert limits.transparent_sizes("shmem_enabled") == [2 * MIB, 512 * MIB]
    give_transparent(tmp_path, "shmem_enabled", "deny")
    assert limits.transparent_sizes("shmem_enabled") == []
    give_transparent(tmp_path, "shmem_enabled", "force")
    assert limits.transparent_sizes("shmem_enabled") == [512 * MIB]


def test_a_kernel_without_files_of_each_size_has_one_size(tmp_path: Path) -> None:
    folder = "sys/kernel/mm/transparent_hugepage"
    write_files(tmp_path, {f"{folder}/hpage_pmd_size": 2 * MIB, f"{folder}/shmem_enabled": "always [advise] never"})
    assert Limits(str(tmp_path)).transparent_sizes("shmem_enabled") == [2 * MIB]
    assert Limits(str(tmp_path)).transparent_sizes("enabled") == []
    assert Limits(str(tmp_path / "none")).transparent_sizes("enabled") == []


# Alignment.


@pytest.mark.parametrize("align_bytes", [64 * KIB, 2 * MIB, 32 * MIB])
@pytest.mark.parametrize("offset", [0, 2 * MIB])
def test_memory_of_a_file_begins_as_its_offset_does(align_bytes: int, offset: int) -> None:
    fd, size_bytes = os.memfd_create("aligned"), 32 * MIB
    try:
        os.ftruncate(fd, offset + size_bytes)
        mapping, start = map_aligned(size_bytes, align_bytes, fd=fd, offset=offset)
        view = np.frombuffer(mapping, np.uint8, size_bytes, start)
        assert (view.ctypes.data - offset) % align_bytes == 0
        view[0], view[-1] = 3, 4
        assert os.pread(fd, 1, offset) == b"\3"
        assert os.pread(fd, 1, offset + size_bytes - 1) == b"\4"
        os.pwrite(fd, b"\5", offset + 1)
        assert view[1] == 5
        with pytest.raises(BufferError):
            mapping.close()
        del view
        mapping.close()
    finally:
        os.close(fd)


@pytest.mark.parametrize("align_bytes", [mmap.PAGESIZE, 2 * MIB])
def test_private_memory_is_aligned_and_belongs_to_the_process(align_bytes: int) -> None:
    mapping, start = map_aligned(4 * MIB, align_bytes)
    view = np.frombuffer(mapping, np.uint8, 4 * MIB, start)
    assert view.ctypes.data % align_bytes == 0
    view[-1] = 1
    assert not view[:-1].any()


def test_a_file_that_cannot_be_mapped_leaves_nothing() -> None:
    read_only = os.open("/proc/self/exe", os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="denied"):
            map_aligned(2 * MIB, 2 * MIB, fd=read_only)
    finally:
        os.close(read_only)


def test_memory_is_aligned_to_the_largest_page_that_fits_into_it() -> None:
    sizes = [64 * KIB, 2 * MIB, 512 * MIB]
    assert [aligned_to(sizes, size) for size in (4096, MIB, 2 * MIB, 64 * MIB, GIB)] == [
        mmap.PAGESIZE,
        64 * KIB,
        2 * MIB,
        2 * MIB,
        512 * MIB,
    ]


# Those that shared memory gets on request.


@pytest.mark.parametrize(("machine", "size"), [(X86, 2 * MIB), (ARM_16K, 32 * MIB), (ARM_64K, 0)])
def test_shared_memory_gets_pages_of_the_machine_s_size_unless_that_is_too_large(
    machine: str, size: int, tmp_path: Path
) -> None:
    write_machine(tmp_path, machine)
    limits = Limits(str(tmp_path))
    assert limits.collapsed_size() == size, "though shmem_enabled is 'never'"
    assert shared_sizes(limits) == ([size] if size else [])
    give_transparent(tmp_path, "shmem_enabled", "advise", 64 * KIB)
    assert shared_sizes(limits) == [64 * KIB, *([size] if size else [])]
    give_transparent(tmp_path, "shmem_enabled", "deny")
    assert limits.collapsed_size() == 0
    assert shared_sizes(limits) == []
    assert Limits(str(tmp_path / "none")).collapsed_size() == 0
