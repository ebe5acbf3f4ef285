"""The limits of this process, and a stack's needs.

`Limits` reads the limits of the process, of its cgroups and of the machine. `compare` checks a stack's estimated use
against them. Any thread may call. The memory use of other processes in the same container is not known: only the
stack counts, and the memory that its process has at that moment.
"""

from __future__ import annotations

import logging
import os
import re
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from tiered_kv.config.units import rounded_bytes
from tiered_kv.errors import ConfigError
from tiered_kv.system.huge_pages import (
    POOLS,
    TRANSPARENT,
    HugePages,
    PoolLimit,
    collapsed_size,
    pool_for,
    pool_name,
    transparent_sizes,
)

Resource = Literal["memory", "descriptors", "threads", "disk", "shared memory"]

_CLOSE: Final = 0.9
"""A stack that takes more than this share of the memory leaves little for everything else."""
DESCRIPTORS_SHARE: Final = 2
"""Limit of the descriptors that a stack takes: the process's descriptors, divided by this. Its server needs the other
descriptors."""
_COUNTS: Final = ("descriptors", "threads")
_CGROUP: Final = re.compile(r"^\d+:([^:]*):(.*)$", re.M)
_MOUNT: Final = re.compile(r"^\S+ \S+ \S+ (\S+) (\S+) .*- (cgroup2?) \S+ (\S+)$", re.M)
_MEMORY: Final = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
_SLOW_MEMORY: Final = {"memory.high": "memory.current"}
_OF_POOL: Final = ("nr", "free", "resv")
_OCTAL: Final = re.compile(r"\\([0-7]{3})")

_log = logging.getLogger("tiered_kv")


@dataclass(frozen=True, slots=True)
class Take:
    """The most that one part of a stack takes, and the setting that decides it."""

    what: Resource
    amount: int  # bytes, or a number
    setting: str
    is_estimate: bool = False  # never a reason to refuse the stack
    amount_max: int = 0
    """The amount that would be taken under a higher limit, if that amount is more."""


@dataclass(frozen=True, slots=True)
class Limit:
    amount: int
    where: str
    """The place of the limit, for messages."""


@dataclass(frozen=True, slots=True)
class Need:
    """A stack's use of one resource, and the limit of that resource."""

    what: Resource
    wanted: int
    available: int
    where: str  # the place that sets the limit
    setting: str  # the setting to lower
    problem: str = ""  # the problem and its remedy; empty if there is none
    is_refused: bool = False  # the stack cannot work

    @property
    def shown(self) -> list[str]:
        """The wanted and the available amount, for people."""
        return [str(each) if self.what in _COUNTS else rounded_bytes(each) for each in (self.wanted, self.available)]


class Limits:
    """The limits as of each call. `root` is where /proc and the cgroups' file systems are found."""

    def __init__(self, root: str = "") -> None:
        self._root = root

    def memory(self, numa_node: int | None = None) -> list[Limit]:
        """Return the limits at which a process is killed: of every cgroup above this process, and of the machine."""
        found = [limit for _, limit, _ in self._of_cgroups("memory", _MEMORY)]
        for folder in self._cgroups("memory"):  # version 1: also a cgroup that a container does not show
            if match := re.search(r"^hierarchical_memory_limit (\d+)$", self._read(f"{folder}/memory.stat"), re.M):
                found.append(Limit(int(match[1]), f"memory.limit_in_bytes of a cgroup above {folder}"))
        machine = "/proc/meminfo"
        if numa_node is not None:
            machine = f"/sys/devices/system/node/node{numa_node}/meminfo"
        if match := re.search(r"MemTotal: *(\d+) kB", self._read(machine)):
            name = "the memory of this machine" if numa_node is None else f"the memory of NUMA node {numa_node}"
            found.append(Limit(int(match[1]) << 10, name))
        return found

    def slow_memory(self) -> list[Limit]:
        """Return the limits above which processes are slowed down."""
        return [limit for _, limit, _ in self._of_cgroups("memory", _SLOW_MEMORY)]

    def free_memory(self, numa_node: int | None = None, *, is_slow: bool = True) -> list[Limit]:
        """Return how much more memory is free now: on the machine, on a NUMA node, and below the limit of each cgroup.

        The kernel's cache of files counts as free, since the kernel gives it up. Without `is_slow`, memory above
        `memory.high` counts as not free.
        """
        found = []
        if match := re.search(r"MemAvailable: *(\d+) kB", self._read("/proc/meminfo")):
            found.append(Limit(int(match[1]) << 10, "MemAvailable of this machine"))
        if numa_node is not None:
            node = self._read(f"/sys/devices/system/node/node{numa_node}/meminfo")
            if parts := re.findall(r"(?:MemFree|Active\(file\)|Inactive\(file\)): *(\d+) kB", node):
                found.append(Limit(sum(map(int, parts)) << 10, f"MemFree and files of NUMA node {numa_node}"))
        names = _MEMORY if is_slow else {**_MEMORY, **_SLOW_MEMORY}
        for folder, limit, used in self._of_cgroups("memory", names):
            kept = re.findall(r"^(?:total_)?(?:in)?active_file (\d+)$", self._read(f"{folder}/memory.stat"), re.M)
            # Version 1 gives both the cgroup's own and, behind them, the totals.
            free = limit.amount - used + sum(int(each) for each in kept[-2:])
            found.append(Limit(max(0, free), f"{limit.where}, less what it uses"))
        return found

    def huge_pages(self, size_bytes: int = 0) -> HugePages:
        """Return the pool of reserved huge pages from which to take `size_bytes`, with its free bytes."""
        return pool_for(self.huge_page_pools(), size_bytes)

    def huge_page_pools(self) -> list[HugePages]:
        """Return the reserved huge pages of each size, and the free ones below the limits of the cgroups."""
        found = dict(re.findall(r"^(Huge\w+): *(\d+)", self._read("/proc/meminfo"), re.M))
        # Without /proc there are none of any size; the number is for messages.
        default_bytes = int(found.get("Hugepagesize", 0)) << 10 or 2 << 20
        pools = []
        for page_bytes in dict.fromkeys([default_bytes, *sorted(self._pool_sizes())]):
            folder = f"{POOLS}/hugepages-{page_bytes >> 10}kB"
            where = f"free_hugepages in {folder}"
            total, free, promised = (int(self._read(f"{folder}/{each}_hugepages") or 0) for each in _OF_POOL)
            if page_bytes == default_bytes and "HugePages_Total" in found:
                total, free, promised = (int(found.get(f"HugePages_{each}", 0)) for each in ("Total", "Free", "Rsvd"))
                where = "/proc/meminfo"
            limits = tuple(self._pool_limits(page_bytes))
            pool_bytes = max(0, free - promised) * page_bytes
            least = min([(pool_bytes, where), *((each.left, each.where) for each in limits)])
            pool = (page_bytes, total * page_bytes, *least, page_bytes == default_bytes, pool_bytes, limits)
            pools.append(HugePages(*pool))
        return pools

    def transparent_sizes(self, setting: Literal["enabled", "shmem_enabled"], folder: Path = TRANSPARENT) -> list[int]:
        """Return the sizes of huge pages that the kernel gives of itself, as `huge_pages.transparent_sizes`."""
        return transparent_sizes(setting, Path(f"{self._root}{folder}"))

    def collapsed_size(self, folder: Path = TRANSPARENT) -> int:
        """Return the size of the huge pages that shared memory gets on request, as `huge_pages.collapsed_size`."""
        return collapsed_size(Path(f"{self._root}{folder}"))

    def _pool_sizes(self) -> Iterator[int]:
        with suppress(OSError):
            for name in os.listdir(f"{self._root}{POOLS}"):
                if match := re.fullmatch(r"hugepages-(\d+)kB", name):
                    yield int(match[1]) << 10

    def _pool_limits(self, page_bytes: int) -> Iterator[PoolLimit]:
        """Yield the limits of the cgroups: of pages that are used, and of those that are promised (`rsvd`)."""
        name = pool_name(page_bytes)
        for kind in (name, f"{name}.rsvd"):
            names = {f"{kind}.max": f"{kind}.current", f"{kind}.limit_in_bytes": f"{kind}.usage_in_bytes"}
            for _, limit, used in self._of_cgroups("hugetlb", names):
                yield PoolLimit(limit.amount, used, limit.where)

    def own_memory(self) -> int:
        """Return the bytes of private memory that this process has now."""
        match = re.search(r"^RssAnon:\s*(\d+) kB", self._read("/proc/self/status"), re.M)
        return int(match[1]) << 10 if match else 0

    def threads(self) -> list[Limit]:
        """Return how many more threads the cgroups allow, and how many all processes of this user may have."""
        found = [
            Limit(limit.amount - used, f"{limit.where}, less pids.current")
            for _, limit, used in self._of_cgroups("pids", {"pids.max": "pids.current"})
        ]
        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        if soft != resource.RLIM_INFINITY and os.geteuid():  # root has no such limit
            found.append(Limit(soft, "ulimit -u"))
        return found

    def descriptors(self) -> Limit:
        """Return how many descriptors this process may have."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return Limit(soft if soft != resource.RLIM_INFINITY else 1 << 30, "ulimit -n")

    def locked_memory(self) -> str:
        """Return the limit of locked memory, for people."""
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return rounded_bytes(soft) if soft != resource.RLIM_INFINITY else "unlimited"

    def _of_cgroups(self, controller: str, names: Mapping[str, str]) -> Iterator[tuple[str, Limit, int]]:
        """Yield for each cgroup its directory, limit and use; `names` has the limit's file, and the file of the use."""
        for folder in self._cgroups(controller):
            for name, usage in names.items():
                if (text := self._read(f"{folder}/{name}").strip()).isdecimal():  # else "max", or no such file
                    limit = Limit(int(text), f"{name} of the cgroup {folder}")
                    yield folder, limit, int(self._read(f"{folder}/{usage}") or 0)

    def _cgroups(self, controller: str) -> list[str]:
        """Return the directories of this process's cgroups and of all above it, as far as they are mounted.

        See cgroups(7). Version 1 has a hierarchy for each controller, version 2 has one, and a machine may use both.
        """
        paths: dict[str, str] = {}
        for controllers, path in _CGROUP.findall(self._read("/proc/self/cgroup")):
            paths |= dict.fromkeys(controllers.split(","), path)
        found: list[str] = []
        for *escaped, kind, options in _MOUNT.findall(self._read("/proc/self/mountinfo")):
            root, point = (_OCTAL.sub(lambda match: chr(int(match[1], 8)), each) for each in escaped)
            is_one = kind == "cgroup" and controller in options.split(",")
            own = paths.get(controller if is_one else "") if is_one or kind == "cgroup2" else None
            if own is None:
                continue
            # A container may see its own part: of the mount, or (in a namespace) of the path.
            below = own.removeprefix(root.rstrip("/")) if f"{own}/".startswith(f"{root.rstrip('/')}/") else ""
            folder = Path(point + ("" if ".." in below else below))
            found += [str(each) for each in (folder, *folder.parents) if each.is_relative_to(point)]
        return found

    def _read(self, path: str) -> str:
        with suppress(OSError):
            return Path(f"{self._root}{path}").read_text(errors="replace")
        return ""


def compare(takes: Sequence[Take], limits: Limits | None = None, *, numa_node: int | None = None) -> list[Need]:
    """Return a stack's need of each resource, with its problem."""
    limits = limits or Limits()
    needs: list[Need] = []
    for what in ("memory", "descriptors", "threads"):
        own = [take for take in takes if take.what == what]
        if not own:
            continue
        wanted, largest = sum(take.amount for take in own), max(own, key=lambda take: take.amount)
        if what == "memory":
            needs.append(_memory(own, limits, numa_node))
        elif what == "descriptors":
            limit = limits.descriptors()
            enough = DESCRIPTORS_SHARE * sum(max(take.amount, take.amount_max) for take in own)
            advice = f"half of it is left to the process; raise it to {enough}, or change {largest.setting}"
            is_short = wanted > limit.amount // DESCRIPTORS_SHARE
            needs.append(_need("descriptors", wanted, limit, largest.setting, advice if is_short else ""))
        elif every := limits.threads():
            limit = min(every, key=lambda each: each.amount)
            advice = f"raise it by {wanted - limit.amount}, or lower {largest.setting}"
            needs.append(_need("threads", wanted, limit, largest.setting, advice if wanted > limit.amount else ""))
    return needs


def _memory(takes: Sequence[Take], limits: Limits, numa_node: int | None) -> Need:
    own_bytes, taken_bytes = limits.own_memory(), sum(take.amount for take in takes)
    wanted, setting = own_bytes + taken_bytes, max(takes, key=lambda take: take.amount).setting
    parts = ", ".join(f"{rounded_bytes(take.amount)} by {take.setting}" for take in takes)
    text = f"{rounded_bytes(own_bytes)} that this process has, {parts}"
    limit = min(limits.memory(numa_node), key=lambda each: each.amount, default=Limit(1 << 62, "unknown"))
    lower = f"lower {setting}, or raise that limit"
    if wanted > limit.amount:
        others = wanted - max(take.amount for take in takes)
        room = _rounded_down(max(0, int(_CLOSE * limit.amount) - others))
        estimate = sum(take.amount for take in takes if take.is_estimate)
        advice = f"{text}; {lower}; {setting} has room for {room}"
        return _need("memory", wanted, limit, setting, advice, refused=wanted - estimate > limit.amount)
    slow = min(limits.slow_memory(), key=lambda each: each.amount, default=limit)
    if wanted > slow.amount:
        return _need("memory", wanted, slow, setting, f"{text}; above it, the kernel slows the process down; {lower}")
    close = f"{text}; that leaves little for everything else in it; {lower}" if wanted > _CLOSE * limit.amount else ""
    return _need("memory", wanted, limit, setting, close)


def _rounded_down(size_bytes: int) -> str:
    """Return at most `size_bytes`, in the unit of `rounded_bytes`, as text that a setting takes as it is."""
    unit = 1 << max(0, size_bytes.bit_length() - 1) // 10 * 10
    step = unit if size_bytes >= 100 * unit else max(1, unit // 4)
    return f"{size_bytes // step * step / unit:g}{rounded_bytes(unit)[1:]}"


def disk_need(path: str | int, capacity_bytes: int, used_bytes: int, setting: str = "capacity") -> Need:
    """Return a directory's need of its disk; `used_bytes` are already in it. May wait for the file system."""
    status = os.statvfs(path)
    limit = Limit(used_bytes + status.f_bavail * status.f_frsize, "the free space of its disk")
    short = (
        f"only {rounded_bytes(limit.amount)} of the capacity can be had: its disk has no more free space; "
        f"lower {setting}, or free some"
    )
    return _need("disk", capacity_bytes, limit, setting, short if limit.amount < capacity_bytes else "")


def shared_memory_need(size_bytes: int, setting: str, folder: str = "/dev/shm") -> Need:
    free_bytes = 0
    with suppress(OSError):  # no such folder
        status = os.statvfs(folder)
        free_bytes = status.f_bavail * status.f_frsize
    limit = Limit(free_bytes, f"the free space of {folder}")
    short = f"lower {setting}, or enlarge it (mount -o remount,size=...; --shm-size of a container)"
    return _need("shared memory", size_bytes, limit, setting, short if limit.amount < size_bytes else "", refused=True)


def _need(what: Resource, wanted: int, limit: Limit, setting: str, problem: str, *, refused: bool = False) -> Need:
    need = Need(what, wanted, limit.amount, limit.where, setting, problem, bool(problem) and refused)
    if not problem or what == "disk":
        return need
    wants, has = need.shown
    unit = what if what in _COUNTS else f"of {what}"
    text = f"the stack takes up to {wants} {unit}, and the limit is {has} ({limit.where}): {problem}"
    return replace(need, problem=text)


def refuse(needs: Sequence[Need]) -> None:
    """Raise `ConfigError` for the first need that makes a stack impossible here."""
    for need in needs:
        if need.is_refused:
            raise ConfigError(need.problem, location=need.setting)


def require(needs: Sequence[Need]) -> None:
    """Refuse a stack that cannot work here, and warn about one that may not. Raises: see `refuse`."""
    refuse(needs)
    for need in needs:
        if need.problem:
            _log.warning("%s", need.problem)
