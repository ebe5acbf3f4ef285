"""A process that lets children crash: it has everything imported, and forks one child a case.

A case is a writer with a fault (`crash_scenario`, `syscalls`), and a second child that looks at what is there then.
Starting Python for each would take longer than both. It reads a case a line, JSON, and writes what came of it;
`crash_cases` has the other end.

    python -m tests.support.crash_server FOLDER [--image]

    FOLDER     where it may write
    --image    the tiers' directories are on an ext4 image mounted there, whose power can be cut; it needs a mount
               namespace of its own
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import mmap
import shutil
import signal
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.support.crash_scenario import CrashScenario, Found, Progress
from tests.support.disk_use import flush_file_system
from tests.support.mounts import Ext4Image, PowerLoss
from tests.support.short_writes import ShortWrites
from tests.support.syscalls import CHANGES, READS, SENDS, Ended, Fault, record, run_plain, run_with_fault
from tiered_kv.errors import FormatError

CASE_S_MAX: Final = 300.0
"""For the writer, and for the look at what it left: longer than all that they wait for, one after the other."""
_IMPORTS: Final = {  # what a child would import otherwise, with the disk that its fault has
    "nvme": ("tiered_kv_nvme.tier", "numpy.random"),
    "fs": ("tiered_kv_fs.tier", "aiofiles.os", "numpy.random"),
    "redis": ("tiered_kv_redis.tier", "redis"),
    "s3": ("tiered_kv_s3.tier", "boto3", "boto3.session"),
}
_LENGTH = struct.Struct("<I")


class CrashServer:
    """Runs cases."""

    def __init__(self, folder: Path, image: Ext4Image | None) -> None:
        self._log = folder / "strace.log"
        self._image = image
        self._progress = Progress()

    def record(self, scenario: CrashScenario, names: Sequence[str], *, kills: bool) -> list[dict[str, object]]:
        """Return the calls of a run without a fault that concern the tier's directory, or sockets."""
        self._clean(scenario)
        write = functools.partial(scenario.write, self._progress, strict=True, answers=kills)
        calls = record(write, log=self._log, names=names)
        self._clean(scenario)
        return [dataclasses.asdict(call) for call in calls if _concerns(call.text, scenario)]

    def count_writes(self, scenario: CrashScenario) -> int:
        """Return how many writes a run makes that can come short."""
        self._clean(scenario)
        counter = _short_writes(scenario, at=-1, ends=False)
        ended = run_plain(counter.around(lambda: scenario.write(self._progress, strict=True)), log=self._log)
        assert ended.status == 0, ended.error
        self._clean(scenario)
        return counter.count

    def case(
        self,
        scenario: CrashScenario,
        *,
        fault: Fault | None = None,
        cut: int | None = None,
        cut_ends: bool = False,
        power: PowerLoss | None = None,
        lies: bool = False,
        loses_pages: bool = False,
        accepts_old: bool = False,
        capacity_bytes: int = 0,
    ) -> dict[str, object]:
        """Run a writer with a fault, then look at what is there.

        Args:
            scenario: What it does.
            fault: A system call that goes wrong.
            cut: Instead: the number of a write that takes only half of its bytes, and
            cut_ends: whether the process is killed then.
            power: Whether, and how, power is cut once the writer has ended.
            lies: Whether the fault is a disk that lies, or one that never recovers.
            loses_pages: Whether files may come back with their names and without their bytes, so that blocks are
                answered that turn out to be damaged when they are loaded.
            accepts_old: Whether the reset may be lost by this fault.
            capacity_bytes: What the directory, or the bucket's blocks, may occupy; 0 for anything.

        Returns:
            Whether it was hit, what was found, and what is wrong.
        """
        self._clean(scenario)
        if power is not None:  # or else what the case before has left comes back with the power
            assert scenario.path is not None
            flush_file_system(scenario.path.parent)
        kills = fault.kills if fault is not None else cut_ends
        ended = self._write(scenario, fault, cut, strict=not lies, kills=kills)
        problems = _problems_of(ended, kills=kills)
        use = _Use(scenario, capacity_bytes)
        use.look("when the writer ended")
        if power is not None:
            self._lose_power(power)
            use.look("after the power failure")
        found = self._verify(
            scenario,
            strict=not (lies or loses_pages),
            keeps=kills and power is None,
            accepts_old=accepts_old,
            may_refuse=lies,
        )
        use.look("at the end")
        problems += [*found.problems, *use.problems]
        return {
            "was_hit": ended.was_hit,
            "status": ended.status,
            "loaded": found.loaded,
            "answered": found.answered,
            "refused": found.refused,
            "occupied_bytes": use.most_bytes,
            "problems": problems,
            **self._progress.as_dict(),
        }

    def _lose_power(self, power: PowerLoss) -> None:
        assert self._image is not None
        self._image.cut_power(power)
        self._image.unmount()
        self._image.mount()

    def _write(
        self, scenario: CrashScenario, fault: Fault | None, cut: int | None, *, strict: bool, kills: bool
    ) -> Ended:
        """Run a writer with the fault or the cut."""
        # A child that is only killed answers as it goes: with other faults, looking may be what fails.
        write = functools.partial(
            scenario.write,
            self._progress,
            strict=strict,
            answers=kills,
            disk_recovers=fault is None or not fault.onwards,
        )
        if fault is not None:
            return run_with_fault(write, fault, log=self._log, timeout_s=CASE_S_MAX)
        assert cut is not None
        counter = _short_writes(scenario, cut, ends=kills)
        ended = run_plain(counter.around(write), log=self._log, timeout_s=CASE_S_MAX)
        return dataclasses.replace(ended, was_hit=counter.was_hit)

    def _verify(
        self, scenario: CrashScenario, *, strict: bool, keeps: bool, accepts_old: bool, may_refuse: bool
    ) -> Found:
        """Look in a child of its own: a tier that hangs or dies is a finding, and no end of this process."""
        progress = self._progress.as_dict()
        shared = mmap.mmap(-1, 1 << 20)

        def look() -> None:
            try:
                found = scenario.verify(progress, strict=strict, keeps=keeps, accepts_old=accepts_old)
            except FormatError:  # the disk lied when it was marked as the tier's own
                if not may_refuse:
                    raise
                found = Found()
            text = json.dumps(dataclasses.asdict(found)).encode()[: len(shared) - _LENGTH.size]
            shared[_LENGTH.size : _LENGTH.size + len(text)] = text
            shared[: _LENGTH.size] = _LENGTH.pack(len(text))

        ended = run_plain(look, log=self._log.with_name("look.log"), timeout_s=CASE_S_MAX)
        (size,) = _LENGTH.unpack_from(shared)
        if ended.status or not size:
            return Found(problems=[f"the look at it ended with {ended.status}: {ended.error}"])
        return Found(**json.loads(shared[_LENGTH.size : _LENGTH.size + size]))

    def _clean(self, scenario: CrashScenario) -> None:
        self._progress.clear()
        if scenario.path is not None:
            shutil.rmtree(scenario.path, ignore_errors=True)


def _short_writes(scenario: CrashScenario, at: int, *, ends: bool) -> ShortWrites:
    assert scenario.path is not None
    return ShortWrites(str(scenario.path), at, ends=ends)


def _concerns(text: str, scenario: CrashScenario) -> bool:
    """Return whether a call's arguments name the tier's directory, or, for tiers on the network, a socket."""
    if scenario.path is None:
        return "<socket:" in text or "<TCP" in text or "AF_INET" in text
    return f"{scenario.path}" in text


def _problems_of(ended: Ended, *, kills: bool) -> list[str]:
    if not ended.in_time:
        return [f"the writer did not end within {CASE_S_MAX} s"]
    if ended.status and not (kills and ended.status == -signal.SIGKILL):
        return [f"the writer ended with {ended.status}: {ended.error}"]
    return []


class _Use:
    """What is stored at some moments, held against the capacity; nothing if that is 0."""

    def __init__(self, scenario: CrashScenario, capacity_bytes: int) -> None:
        self._scenario = scenario
        self._capacity_bytes = capacity_bytes
        self.most_bytes = 0
        self.problems: list[str] = []

    def look(self, when: str) -> None:
        if not self._capacity_bytes:
            return
        used = self._scenario.occupied_bytes
        self.most_bytes = max(self.most_bytes, used)
        if used > self._capacity_bytes:
            self.problems.append(f"{used} bytes {when}, of {self._capacity_bytes}")


_KINDS: Final = {"changes": CHANGES, "reads": READS, "sends": SENDS}


def _serve(server: CrashServer) -> None:
    for line in sys.stdin:
        request = json.loads(line)
        answer: object
        try:
            scenario = CrashScenario(**request["scenario"])
            for module in _IMPORTS[str(scenario.entry["type"])]:
                importlib.import_module(module)
            if request["do"] == "record":
                answer = server.record(scenario, _KINDS[request["kind"]], kills=request["kills"])
            elif request["do"] == "count":
                answer = server.count_writes(scenario)
            else:
                options = request["options"]
                if options.get("fault"):
                    options["fault"] = Fault(**options["fault"])
                if options.get("power"):
                    options["power"] = PowerLoss(options["power"])
                answer = server.case(scenario, **options)
        except Exception as error:  # the other end tells it with the case
            answer = {"failed": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def main() -> None:
    """Serve until standard input ends."""
    folder = Path(sys.argv[1])
    if "--image" not in sys.argv[2:]:
        _serve(CrashServer(folder, None))
        return
    with Ext4Image(folder / "image", folder / "mounted") as image:
        _serve(CrashServer(folder, image))


if __name__ == "__main__":
    main()
