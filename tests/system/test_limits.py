"""What a stack takes is compared with what there is: cgroups of both versions, descriptors, threads, shared memory."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.support.stacks import PATIENT, stack_of
from tiered_kv.cli.main import main
from tiered_kv.config.namespace import Namespace
from tiered_kv.config.stack_config import load_config
from tiered_kv.config.units import parse_bytes
from tiered_kv.direct import DirectTiers
from tiered_kv.errors import ConfigError
from tiered_kv.server.served_stack import ServedStack
from tiered_kv.stack.open import needs_of, open_stack
from tiered_kv.system.limits import Limits, Need, Take, compare, require
from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit.claimed import walk
from tiered_kv.worker.shared import SharedStack
from tiered_kv_nvme.sizing import SEGMENTS_MAX, SEGMENTS_MIN, Sizing, descriptors_left

MIB, GIB = 1 << 20, 1 << 30
PAIR = list(enumerate(("nvme", "nvme", "fs")))
UNLIMITED = str(0x7FFFFFFFFFFFF000)
V2 = "30 23 0:26 {root} /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "32 31 0:29 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "33 31 0:30 {root} /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
)
HYBRID = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n" + V1

# By case: the mounts, /proc/self/cgroup, the files of the cgroups, and the least limit of memory.
TREES: dict[str, tuple[str, str, dict[str, str], int]] = {
    "v2, nested": (
        V2.format(root="/"),
        "0::/kubepods/pod7/abc\n",
        {"kubepods/memory.max": "max", "kubepods/pod7/memory.max": f"{GIB}", "kubepods/pod7/abc/memory.max": "max"},
        GIB,
    ),
    "v2, the leaf is less": (
        V2.format(root="/"),
        "0::/a/b\n",
        {"a/memory.max": f"{GIB}", "a/b/memory.max": "512"},
        512,
    ),
    "v2, in a namespace": (V2.format(root="/"), "0::/\n", {"memory.max": f"{MIB}"}, MIB),
    "v2, a part is mounted": (V2.format(root="/pod7"), "0::/pod7/abc\n", {"memory.max": f"{MIB}"}, MIB),
    "v2, outside of the namespace": (V2.format(root="/"), "0::/../other\n", {"memory.max": f"{MIB}"}, MIB),
    "v1": (
        V1.format(root="/"),
        "4:memory:/docker/abc\n8:pids:/docker/abc\n",
        {"memory/docker/abc/memory.limit_in_bytes": f"{GIB}", "memory/memory.limit_in_bytes": UNLIMITED},
        GIB,
    ),
    "v1, a part is mounted": (
        V1.format(root="/docker/abc"),
        "4:cpu,memory:/docker/abc\n",
        {"memory/memory.limit_in_bytes": f"{GIB}"},
        GIB,
    ),
    "v1, of a cgroup that is not shown": (
        V1.format(root="/docker/abc"),
        "4:memory:/docker/abc\n",
        {
            "memory/memory.limit_in_bytes": UNLIMITED,
            "memory/memory.stat": f"cache 0\nhierarchical_memory_limit {MIB}\n",
        },
        MIB,
    ),
    "hybrid": (
        HYBRID.format(root="/"),
        "4:memory:/a\n0::/b\n",
        {"memory/a/memory.limit_in_bytes": f"{GIB}", "unified/b/cgroup.procs": ""},
        GIB,
    ),
    "none": (V2.format(root="/"), "0::/user.slice\n", {"user.slice/memory.max": "max"}, 64 * GIB),
    "no /proc": ("", "", {}, 64 * GIB),
}


def limits_of(root: Path, mounts: str, cgroup: str, files: Mapping[str, str]) -> Limits:
    proc = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mounts}
    proc["proc/meminfo"] = f"MemTotal:       {64 * GIB >> 10} kB\nMemFree: 1 kB\n"
    proc["proc/self/status"] = f"Name:\tpython\nRssAnon:\t{50 * MIB >> 10} kB\n"
    for name, text in {**proc, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return Limits(str(root))


def of_memory(size_bytes: int) -> list[Take]:
    return [Take("memory", size_bytes, "primary.capacity")]


def test_huge_pages_are_those_of_the_machine_and_of_the_least_cgroup(tmp_path: Path) -> None:
    files = {"pod/hugetlb.2MB.max": f"{8 * MIB}", "pod/hugetlb.2MB.current": f"{2 * MIB}", "hugetlb.2MB.max": "max"}
    limits = limits_of(tmp_path, V2.format(root="/"), "0::/pod\n", files)
    assert limits.huge_pages().free_bytes == limits.huge_pages().total_bytes == 0
    (tmp_path / "proc/meminfo").write_text(
        "HugePages_Total: 20\nHugePages_Free: 9\nHugePages_Rsvd: 5\nHugepagesize:    2048 kB\n"
    )
    found = limits.huge_pages()
    assert (found.total_bytes, found.free_bytes, found.page_bytes) == (40 * MIB, 6 * MIB, 2 * MIB)
    (tmp_path / "sys/fs/cgroup/pod/hugetlb.2MB.max").write_text("max\n")
    assert limits.huge_pages().free_bytes == 8 * MIB


@pytest.mark.parametrize("case", TREES)
def test_the_memory_is_that_of_the_least_cgroup_above_the_process(case: str, tmp_path: Path) -> None:
    *tree, wanted = TREES[case]
    limits = limits_of(tmp_path, *tree)  # type: ignore[arg-type]
    assert min(limit.amount for limit in limits.memory()) == wanted


@pytest.mark.parametrize("version", [1, 2])
def test_free_memory_is_what_the_machine_and_the_cgroups_have_left(version: int, tmp_path: Path) -> None:
    stat = f"inactive_file {MIB}\nactive_file {2 * MIB}"
    if version == 2:
        files = {"a/memory.max": f"{GIB}", "a/memory.current": f"{900 * MIB}", "a/memory.stat": stat}
        limits = limits_of(tmp_path, V2.format(root="/"), "0::/a\n", files)
    else:
        stat = "inactive_file 1\nactive_file 2\n" + re.sub(r"(?m)^", "total_", stat)
        used = {"memory.limit_in_bytes": f"{GIB}", "memory.usage_in_bytes": f"{900 * MIB}", "memory.stat": stat}
        files = {f"memory/a/{name}": text for name, text in used.items()}
        limits = limits_of(tmp_path, V1.format(root="/"), "4:memory:/a\n", files)
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {2 * GIB >> 10} kB\n")
    assert sorted(limit.amount for limit in limits.free_memory()) == [127 * MIB, 2 * GIB]


def test_a_stack_that_does_not_fit_is_refused_and_one_that_barely_fits_is_warned_about(tmp_path: Path) -> None:
    limits = limits_of(tmp_path, *TREES["v2, nested"][:3])
    both = [*of_memory(600 * MIB), Take("memory", 400 * MIB, "secondary.0.capacity")]
    (need,) = compare(both, limits)
    with pytest.raises(ConfigError) as caught:
        require([need])
    assert str(caught.value) == (
        "primary.capacity: the stack takes up to 1.0GiB of memory, and the limit is 1GiB (memory.max of the cgroup "
        "/sys/fs/cgroup/kubepods/pod7): 50MiB that this process has, 600MiB by primary.capacity, 400MiB by "
        "secondary.0.capacity; lower primary.capacity, or raise that limit; primary.capacity has room for 471MiB"
    )
    (close,) = compare(of_memory(950 * MIB), limits)
    assert "leaves little for everything else" in close.problem
    assert not close.is_refused
    (guess,) = compare([*of_memory(800 * MIB), Take("memory", GIB, "secondary.0.capacity", is_estimate=True)], limits)
    assert "1GiB by secondary.0.capacity" in guess.problem
    assert not guess.is_refused
    (fits,) = compare(of_memory(800 * MIB), limits)
    assert fits.problem == ""


@pytest.mark.parametrize("capacity", ["2GiB", "983MiB", "2000123456"])
def test_the_room_that_a_message_names_is_enough(capacity: str, tmp_path: Path) -> None:
    limits = limits_of(tmp_path, *TREES["v2, nested"][:3])
    (need,) = compare(of_memory(parse_bytes(capacity)), limits)
    assert need.is_refused
    (again,) = compare(of_memory(parse_bytes(need.problem.rpartition(" ")[2])), limits)
    assert again.problem == ""
    assert again.wanted > 0.89 * GIB


def test_the_descriptors_that_a_message_names_are_enough(tmp_path: Path) -> None:
    tiers = [
        {"type": kind, "name": f"{kind}-{at}", "path": f"{tmp_path}/{at}", "capacity": "1TiB"} for at, kind in PAIR
    ]
    config = load_config(stack_of(*tiers))
    with soft_limit(resource.RLIMIT_NOFILE, 64):
        (need,) = (each for each in needs_of(config) if each.what == "descriptors")
    named = re.search(r"raise it to (\d+)", need.problem)
    assert named
    with soft_limit(resource.RLIMIT_NOFILE, int(named[1])):
        (need,) = (each for each in needs_of(config) if each.what == "descriptors")
    assert need.problem == ""


@pytest.mark.parametrize("kind", ["server", "shared", "own"])
@pytest.mark.parametrize("file", ["memory.max", "memory.high"])
def test_who_opens_a_stack_is_warned_of_tight_memory_as_check_warns(
    kind: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows_bytes = 64 * MIB
    limit = {"memory.max": rows_bytes + 52 * MIB, "memory.high": rows_bytes // 2}[file]
    used = {"a/memory.current": "0", f"a/{file}": f"{limit}"}
    limits = limits_of(tmp_path, V2.format(root="/"), "0::/a\n", used)
    config = load_config({**stack_of(), "primary": {"capacity": rows_bytes}})
    monkeypatch.setattr("tiered_kv.system.limits.Limits", lambda: limits)
    (checked, *_) = needs_of(config)
    assert file in checked.problem
    if kind == "server":
        ServedStack(config).close(0.0)
    elif kind == "own":
        open_stack(config).close()
    else:
        shared = SharedStack(config, name=f"tiered-kv-test-{os.getpid()}", bytes_per_worker=4096, num_workers=1)
        shared.open_engine_stack().close()
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == [checked.problem]


def test_rows_in_reserved_huge_pages_count_in_no_limit_of_memory() -> None:
    config = load_config(stack_of(blocks=64))
    assert [each.what for each in needs_of(config)] == ["memory"]
    assert needs_of(config, has_rows=False) == []


def test_a_node_s_free_memory_limits_what_is_bound_to_it(tmp_path: Path) -> None:
    limits = limits_of(tmp_path, "", "", {})
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {2 * GIB >> 10} kB\n")
    node = tmp_path / "sys/devices/system/node/node1"
    node.mkdir(parents=True)
    (node / "meminfo").write_text(
        "Node 1 MemFree: 1024 kB\nNode 1 Active(file): 512 kB\nNode 1 Inactive(file): 512 kB\nNode 1 Active: 9 kB\n"
    )
    assert min(each.amount for each in limits.free_memory(1)) == 2 * MIB
    assert min(each.amount for each in limits.free_memory()) == 2 * GIB


def test_rows_are_not_allocated_above_memory_high_but_a_stack_may_open_there(tmp_path: Path) -> None:
    files = {"a/memory.max": f"{GIB}", "a/memory.high": f"{300 * MIB}", "a/memory.current": f"{100 * MIB}"}
    limits = limits_of(tmp_path, V2.format(root="/"), "0::/a\n", files)
    assert min(each.amount for each in limits.free_memory()) == 924 * MIB
    least = min(limits.free_memory(is_slow=False), key=lambda each: each.amount)
    assert least.amount == 200 * MIB
    assert "memory.high" in least.where


def test_memory_high_slows_down_and_is_a_warning(tmp_path: Path) -> None:
    limits = limits_of(tmp_path, V2.format(root="/"), "0::/a\n", {"a/memory.max": f"{GIB}", "a/memory.high": f"{MIB}"})
    (need,) = compare(of_memory(100 * MIB), limits)
    assert "memory.high" in need.where
    assert "slows the process down" in need.problem
    assert not need.is_refused


def test_a_numa_node_is_a_limit_of_what_is_bound_to_it(tmp_path: Path) -> None:
    limits = limits_of(tmp_path, "", "", {})
    node = tmp_path / "sys/devices/system/node/node1"
    node.mkdir(parents=True)
    (node / "meminfo").write_text("Node 1 MemTotal:       2048 kB\n")
    (need,) = compare(of_memory(3 * MIB), limits, numa_node=1)
    assert need.is_refused
    assert "the memory of NUMA node 1" in need.problem


def test_threads_are_compared_with_what_the_cgroups_have_left(tmp_path: Path) -> None:
    files = {"a/pids.max": "100", "a/pids.current": "90", "a/b/pids.max": "max", "a/b/pids.current": "3"}
    limits = limits_of(tmp_path, V2.format(root="/"), "0::/a/b\n", files)
    (need,) = compare([Take("threads", 18, "secondary.0.threads")], limits)
    assert (need.wanted, need.available) == (18, 10)
    assert "raise it by 8, or lower secondary.0.threads" in need.problem
    assert not need.is_refused, "fewer threads suffice"


@contextmanager
def soft_limit(kind: int, amount: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (amount, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def segments_open(path: Path) -> int:
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum(f"{path}/segment-" in os.readlink(link) for link in links if os.path.islink(link))


def test_nvme_leaves_half_of_the_descriptors_and_says_what_to_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": 60 * MIB, "segment": 128 << 10}
    with (
        soft_limit(resource.RLIMIT_NOFILE, 256),
        caplog.at_level(logging.WARNING),
        open_stack(stack_of(entry, blocks=2048)) as stack,
    ):
        for number in range(3):  # more than so many segments hold
            keys = make_keys(2000, f"batch {number}")
            stack.put(keys, np.ones((len(keys), 4096), np.uint8))
            stack.flush(10.0)
        assert 64 < stack.counters()["nvme"]["tier"]["segments"] <= 128
        assert segments_open(tmp_path / "kv") <= 128
    assert "takes up to 451 descriptors, and the limit is 256 (ulimit -n)" in caplog.text
    assert "raise it to 902, or change secondary.0.segment" in caplog.text


def test_nvme_opens_with_fewer_descriptors_than_before_and_keeps_its_newest_blocks(tmp_path: Path) -> None:
    entry = {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": 16 * MIB, "segment": 128 << 10}
    config = stack_of(entry, blocks=1024)
    newest = make_keys(500, "batch 4")
    blocks = np.ones((500, 4096), np.uint8)
    with open_stack(config) as stack:
        for number in range(5):
            stack.put(make_keys(500, f"batch {number}"), blocks)
            stack.flush(10.0)
    assert len(list((tmp_path / "kv").glob("segment-*"))) > 80
    with soft_limit(resource.RLIMIT_NOFILE, 120), open_stack(config) as stack:
        assert stack.counters()["nvme"]["tier"]["segments"] <= 60
        assert stack.get(newest, np.empty_like(blocks), timeout=10.0) == 500


def test_nvme_stores_with_a_capacity_far_above_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    status = os.statvfs(tmp_path)
    small = os.statvfs_result((*status[:4], 100 * MIB // status.f_frsize, *status[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    entry = {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": "100TiB"}
    with open_stack(stack_of(entry, blocks=64)) as stack:
        assert stack.secondary_tiers[0].describe()["segment_bytes"] < 9 * MIB  # type: ignore[operator]
        assert stack.put(make_keys(8), np.ones((8, 4096), np.uint8)) == 8
        stack.flush(10.0)
        assert stack.counters()["nvme"]["stored_blocks_total"] == 8
    assert "of the capacity can be had: its disk has no more free space; lower capacity" in caplog.text


@pytest.mark.slow
def test_fs_evicts_for_new_blocks_on_a_disk_that_is_smaller_than_its_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, disk_bytes = os.statvfs(tmp_path), 8 * MIB

    def of_small_disk(path: object) -> os.statvfs_result:
        used_bytes = sum(each.st_blocks * 512 for entries in walk(str(tmp_path)) for _, each in entries)
        return os.statvfs_result((*status[:4], max(0, disk_bytes - used_bytes) // status.f_frsize, *status[5:]))

    monkeypatch.setattr(os, "statvfs", of_small_disk)
    entry = {"type": "fs", "path": str(tmp_path / "kv"), "capacity": "100TiB", **PATIENT}
    with open_stack(stack_of(entry, blocks=512)) as stack:
        for number in range(6):
            keys = make_keys(250, f"batch {number}")
            stack.put(keys, np.full((250, 4096), number, np.uint8), timeout=60.0)
            assert stack.flush(60.0)
        assert stack.counters()["fs"]["stored_blocks_total"] == 1500
    assert sum(each.st_blocks * 512 for entries in walk(str(tmp_path)) for _, each in entries) <= disk_bytes
    with open_stack(stack_of(entry, blocks=512)) as stack:
        assert stack.get(keys, np.empty((250, 4096), np.uint8), timeout=60.0) == 250


def test_a_segment_by_default_is_larger_where_there_are_few_descriptors() -> None:
    with soft_limit(resource.RLIMIT_NOFILE, 256):
        assert descriptors_left() == 128
        assert descriptors_left(others=100) == 28
        assert descriptors_left(others=200) == SEGMENTS_MIN
        few = Sizing.of(1 << 40, 65536, descriptors_max=descriptors_left())
    assert few.segments_max <= 128
    assert few.segments_wanted == few.segments_max
    assert Sizing.of(1 << 40, 65536).segments_max <= SEGMENTS_MAX


def test_a_capacity_far_above_the_disk_has_segments_of_the_disk() -> None:
    sizing = Sizing.of(1 << 50, 65536, room_bytes=10 * GIB)
    assert sizing.segment_bytes == 128 * MIB
    assert Sizing.of(1 << 50, 65536, room_bytes=11 * GIB) == sizing, "a restart chooses the same"
    assert sizing.segments_max <= SEGMENTS_MAX
    assert Sizing.of(1 << 40, 65536, 64 * GIB, room_bytes=10 * GIB).segment_bytes == 64 * GIB, "as it was given"


def test_segments_of_a_full_disk_are_chosen_for_the_time_when_it_has_space() -> None:
    """They are at most 512, so least ones would never fill the capacity."""
    sizing = Sizing.of(10 * GIB, 65536)
    assert [Sizing.of(10 * GIB, 65536, room_bytes=room) for room in (0, 4096, 100_000)] == [sizing] * 3


def test_opening_and_check_refuse_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = limits_of(tmp_path, *TREES["v2, nested"][:3])
    monkeypatch.setattr("tiered_kv.system.limits.Limits", lambda: limits)
    file = tmp_path / "stack.json"
    file.write_text(
        json.dumps(
            {
                "namespace": {"model": "m"},
                "block": {"bytes": "1MiB"},
                "primary": {"capacity": "2GiB", "shared": "x"},
                "secondary": [{"type": "memory", "capacity": "1MiB"}],
            }
        )
    )
    wanted = "primary.capacity: the stack takes up to .* and the limit is 1GiB"
    with pytest.raises(ConfigError, match=wanted):
        open_stack(str(file))
    with pytest.raises(ConfigError, match=wanted):
        SharedStack(str(file), bytes_per_worker=1 << 20)
    assert main(["check", str(file), "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert "the limit is 1GiB" in shown["tiers"][0]["error"]
    memory, shared = shown["limits"][0], shown["limits"][-1]
    assert (memory["what"], memory["wanted"], memory["available"]) == ("memory", 2 * GIB + 51 * MIB, GIB)
    assert memory["setting"] == "primary.capacity"
    assert shared["what"] == "shared memory"
    assert main(["check", str(file)]) == 1
    assert "memory            FAILED    line 1: the stack takes up to" in capsys.readouterr().out


def test_tiers_over_a_host_s_memory_are_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = limits_of(tmp_path, *TREES["v2, nested"][:3])
    monkeypatch.setattr("tiered_kv.system.limits.Limits", lambda: limits)
    tiers = [{"type": "memory", "capacity": "2GiB"}]
    with pytest.raises(ConfigError, match=r"tiers\.0\.capacity: the stack takes up to 2\.0GiB of memory"):
        DirectTiers(bytearray(8192), block_bytes=4096, tiers=tiers, namespace=Namespace(model="m"))


def test_every_built_in_tier_says_what_it_takes(tmp_path: Path) -> None:
    tiers: list[dict[str, object]] = [
        {"type": "nvme", "path": str(tmp_path), "capacity": "1TiB"},
        {"type": "fs", "path": str(tmp_path), "capacity": "1TiB"},
        {"type": "memory", "capacity": "1GiB"},
        {"type": "redis", "host": "h"},
        {"type": "s3", "bucket": "blocks"},
    ]
    needs: list[Need] = needs_of(load_config(stack_of(*tiers)))
    assert [need.what for need in needs][:2] == ["memory", "descriptors"]
    assert needs[0].wanted > GIB + 4096, "the index of nvme counts"
    assert needs[1].wanted > 64 + 16 + 5 + 16


def _memory_cgroup() -> Path | None:
    return next((path for path in map(Path, ("/sys/fs/cgroup/memory", "/sys/fs/cgroup")) if path.is_dir()), None)


IN_CGROUP = """
import sys
from pathlib import Path
import tiered_kv
Path(sys.argv[1], "cgroup.procs").write_text(str(__import__("os").getpid()))
primary = {"capacity": sys.argv[2], "prefault": True}
config = {"namespace": {"model": "m"}, "block": {"bytes": "1MiB"}, "primary": primary}
try:
    tiered_kv.open_stack(config).close()
except tiered_kv.ConfigError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or _memory_cgroup() is None, reason="making a cgroup takes root, and cgroups")
@pytest.mark.parametrize(("capacity", "wanted"), [("1GiB", "the limit is 256MiB"), ("64MiB", "")])
def test_in_a_real_cgroup_a_stack_is_refused_and_not_killed(capacity: str, wanted: str) -> None:
    above = _memory_cgroup()
    assert above is not None
    group = above / f"tiered-kv-test-{os.getpid()}"
    try:
        group.mkdir()
        name = "memory.limit_in_bytes" if above.name == "memory" else "memory.max"
        (group / name).write_text(str(256 * MIB))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no cgroup with a limit of memory can be made here: {error}")
    try:
        command = [sys.executable, "-c", IN_CGROUP, str(group), capacity]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert wanted in done.stdout
        assert bool(done.stdout.strip()) is bool(wanted)
    finally:
        group.rmdir()
