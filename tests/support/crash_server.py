"""A process that runs crash cases: it has everything imported, and forks a writer and a checker for each case.

Starting Python for each case would take longer than the case. `crash_cases` sends a case a line, as JSON, and reads
the result. Arguments:

    FOLDER     for its files
    --image    the tiers' directories are on an ext4 image mounted there, whose power can be cut; needs a separate
               mount namespace
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import importlib
import json
import mmap
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from tests.support.bad_place import BadPlace, PlaceGoesBad
from tests.support.crash_scenario import CrashScenario, Excuses, Found, Progress
from tests.support.disk_use import flush_file_system, occupied_bytes
from tests.support.mounts import Ext4Image, PowerLoss
from tests.support.syscalls import CHANGES, READS, RUN_S_MAX, SENDS, Ended, Fault, record, run_plain, run_with_fault
from tiered_kv.errors import FormatError

_IMPORTS: Final = {  # imported before the fork: a child's imports would meet its fault
    "nvme": ("tiered_kv_nvme.tier", "numpy.random"),
    "fs": ("tiered_kv_fs.tier", "aiofiles.os", "numpy.random"),
    "redis": ("tiered_kv_redis.tier", "redis"),
    "s3": ("tiered_kv_s3.tier", "boto3", "boto3.session"),
}
_WRITES: Final = ("write", "pwrite", "writev", "pwritev")
_KINDS: Final = {"changes": CHANGES, "reads": READS, "sends": SENDS, "all": ("all",)}


@dataclass(frozen=True, slots=True)
class Case:
    """One fault in one run: a call that fails, a write that takes half of its bytes, or a place that goes bad."""

    scenario: CrashScenario
    fault: Fault | None = None
    cut: int | None = None  # the number of the write
    cut_ends: bool = False  # the process is killed then
    bad: BadPlace | None = None  # a place that the disk refuses from then on
    power: PowerLoss | None = None  # is cut once the writer has ended
    lies: bool = False  # the disk returns false successes, or never recovers
    loses_pages: bool = False  # files may come back without their bytes: blocks are found, and damaged
    accepts_old: bool = False  # the reset may be lost by this fault

    @property
    def kills(self) -> bool:
        return self.fault.kills if self.fault is not None else self.cut_ends

    def __str__(self) -> str:
        fields = [
            f"{name}={value}" for name in self.__slots__[1:] if (value := getattr(self, name)) not in (None, False)
        ]
        return f"{self.scenario.tier} tier, {', '.join(fields)}"


_CASE: Final = TypeAdapter(Case)


class CrashServer:
    def __init__(self, folder: Path, image: Ext4Image | None) -> None:
        self._log = folder / "strace.log"
        self._image = image
        self._progress = Progress()

    def record(self, scenario: CrashScenario, names: Sequence[str], *, kills: bool) -> list[dict[str, object]]:
        """Return the calls of a run without a fault that concern the tier's directory, or sockets."""
        self._clean(scenario)
        write = functools.partial(scenario.write, self._progress, Excuses(one_call=not kills))
        calls = record(write, log=self._log, names=names)
        self._clean(scenario)
        return [dataclasses.asdict(call) for call in calls if _concerns(call.text, scenario)]

    def count_writes(self, scenario: CrashScenario) -> int:
        self._clean(scenario)
        counter = _short_writes(scenario, at=-1, ends=False)
        ended = run_plain(counter.around(lambda: scenario.write(self._progress)), log=self._log)
        assert ended.status == 0, ended.error
        self._clean(scenario)
        return counter.count

    def case(self, case: Case) -> dict[str, object]:
        """Run a writer with a fault, then check the tier."""
        scenario = case.scenario
        self._clean(scenario)
        if case.power is not None:  # otherwise blocks of the case before come back with the power
            assert scenario.path is not None
            flush_file_system(scenario.path.parent)
        ended = self._write(case)
        problems = [*problems_of(ended, kills=case.kills), *_over_capacity(scenario, "when the writer ended")]
        if case.power is not None:
            assert self._image is not None
            self._image.cut_power(case.power)
            problems += _over_capacity(scenario, "after the power failure")
        found = self._verify(case)
        problems += [*found.problems, *_over_capacity(scenario, "at the end")]
        return {"was_hit": ended.was_hit, "loaded": found.loaded, "answered": found.answered, "problems": problems}

    def _write(self, case: Case) -> Ended:
        # A child that is only killed answers as it goes: with other faults, looking may be what fails.
        onwards = case.fault is not None and case.fault.onwards
        cannot_read = case.bad is not None and case.bad.refuses == "reads"
        excuses = Excuses(damaged=case.lies or cannot_read, one_call=not case.kills, for_good=onwards)
        write = functools.partial(case.scenario.write, self._progress, excuses)
        if case.fault is not None:
            return run_with_fault(write, case.fault, log=self._log)
        if case.bad is not None:
            place = PlaceGoesBad(str(case.scenario.path), case.bad)
            ended = run_plain(place.around(write), log=self._log)
            return dataclasses.replace(ended, was_hit=place.was_hit)
        assert case.cut is not None
        counter = _short_writes(case.scenario, case.cut, ends=case.kills)
        ended = run_plain(counter.around(write), log=self._log)
        return dataclasses.replace(ended, was_hit=counter.was_hit)

    def _verify(self, case: Case) -> Found:
        """Check the tier in a child: a tier that hangs or dies is a finding, and must not end this process."""
        progress = self._progress.as_dict()
        shared = mmap.mmap(-1, 1 << 20)

        def look() -> None:
            excuses = Excuses(damaged=case.lies or case.loses_pages)
            keeps = case.kills and case.power is None
            try:
                found = case.scenario.verify(progress, excuses, keeps=keeps, accepts_old=case.accepts_old)
            except FormatError:  # the disk lied when it was marked as the tier's own
                if not case.lies:
                    raise
                found = Found()
            text = json.dumps(dataclasses.asdict(found)).encode()[: len(shared)]
            shared[: len(text)] = text

        ended = run_plain(look, log=self._log.with_name("look.log"))
        text = shared[:].rstrip(b"\0")
        if ended.status or not text:
            return Found(problems=[f"the look at it ended with {ended.status}: {ended.error}"])
        return Found(**json.loads(text))

    def _clean(self, scenario: CrashScenario) -> None:
        self._progress.clear()
        if scenario.path is not None:
            shutil.rmtree(scenario.path, ignore_errors=True)


def _short_writes(scenario: CrashScenario, at: int, *, ends: bool) -> ShortWrites:
    assert scenario.path is not None
    return ShortWrites(str(scenario.path), at, ends=ends)


class ShortWrites:
    """Shortens one write of a process below a path: the one with the number `at`, from 0, of those that can be short.

    strace(1) cannot shorten a call, so `os.write` and the like are replaced in the process that writes.

    Half of the bytes are written; of a direct write half of the pages, as direct I/O takes whole pages only (open(2),
    O_DIRECT). A direct write of one page and a write of one byte are neither counted nor shortened.

    `count` and `was_hit` are in memory that a forked child shares. Any thread may write.
    """

    def __init__(self, path: str, at: int, *, ends: bool) -> None:
        self._path = path
        self._at = at
        self._ends = ends
        self._shared = mmap.mmap(-1, mmap.PAGESIZE)  # count, and whether one was shortened
        self._lock = threading.Lock()
        self._real = {name: getattr(os, name) for name in _WRITES}

    @property
    def count(self) -> int:
        """Writes that can be short."""
        return int.from_bytes(self._shared[:8], "little")

    @property
    def was_hit(self) -> bool:
        return self._shared[8] != 0

    def around(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return `work` with the short write; called in a child, whose calls stay replaced."""

        def short_work() -> None:
            for name in _WRITES:
                setattr(os, name, functools.partial(self.write, name))
            work()

        return short_work

    def write(self, name: str, fd: int, data: Any, *rest: Any) -> int:  # Any: as the four calls take it
        call = self._real[name]
        parts = [memoryview(part).cast("B") for part in (data if name.endswith("v") else [data])]
        keep = _kept_bytes(fd, sum(map(len, parts)))
        if not keep or not os.readlink(f"/proc/self/fd/{fd}").startswith(self._path):
            return int(call(fd, data, *rest))
        with self._lock:
            number = self.count
            self._shared[:8] = (number + 1).to_bytes(8, "little")
        if number != self._at:
            return int(call(fd, data, *rest))
        kept: list[memoryview] = []
        for part in parts:
            kept.append(part[:keep])
            keep -= len(kept[-1])
        written = int(call(fd, kept if name.endswith("v") else b"".join(kept), *rest))
        self._shared[8] = 1
        if self._ends:
            os.kill(os.getpid(), signal.SIGKILL)
        return written


def _kept_bytes(fd: int, size_bytes: int) -> int:
    """Return the size of a write of `size_bytes` that is shortened; 0 if it cannot be."""
    half_bytes = size_bytes // 2
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
        return half_bytes // mmap.PAGESIZE * mmap.PAGESIZE
    return half_bytes


def _concerns(text: str, scenario: CrashScenario) -> bool:
    """Return whether a call's arguments name the tier's directory; for network tiers, a socket."""
    if scenario.path is None:
        return "<socket:" in text or "<TCP" in text or "AF_INET" in text
    return f"{scenario.path}" in text


def problems_of(ended: Ended, *, kills: bool) -> list[str]:
    if not ended.in_time:
        return [f"the writer did not end within {RUN_S_MAX} s"]
    if ended.status and not (kills and ended.status == -signal.SIGKILL):
        return [f"the writer ended with {ended.status}: {ended.error}"]
    return []


def _over_capacity(scenario: CrashScenario, when: str) -> list[str]:
    if not scenario.occupied_bytes_max or scenario.path is None:
        return []
    used_bytes = occupied_bytes(scenario.path)
    is_over = used_bytes > scenario.occupied_bytes_max
    return [f"{used_bytes} bytes {when}, of {scenario.occupied_bytes_max}"] if is_over else []


def serve(server: CrashServer) -> None:
    for line in sys.stdin:
        request = json.loads(line)
        answer: object
        try:
            case = _CASE.validate_python(request["case"])
            for module in _IMPORTS.get(case.scenario.tier, ()):
                importlib.import_module(module)
            if request["do"] == "record":
                answer = server.record(case.scenario, _KINDS[request["kind"]], kills=request["kills"])
            elif request["do"] == "count":
                answer = server.count_writes(case.scenario)
            else:
                answer = server.case(case)
        except Exception as error:  # reported with the case
            answer = {"failed": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def main() -> None:
    """Serve until standard input ends."""
    folder = Path(sys.argv[1])
    if "--image" not in sys.argv[2:]:
        serve(CrashServer(folder, None))
        return
    with Ext4Image(folder / "image", folder / "mounted") as image:
        serve(CrashServer(folder, image))
