"""Processes that store more than a directory's capacity together, while their starter looks at what is stored.

A program, too: `python -m tests.support.capacity_writers ENTRY NAMESPACE LABEL BATCHES`, with the tier's entry as
JSON, stores blocks and prints after each batch how many it has stored in all. A store that finds no room is lost, and
those that follow at once are refused without a look: how many these are depends on how busy the machine is. So a batch
is offered until all of it is stored.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from tests.support.entries import rig_of
from tiered_kv.testing.rig import make_keys
from tiered_kv.testing.waiting import wait_for_each

BLOCK_BYTES: Final = 65_536
BATCH: Final = 8
"""Blocks of a batch."""

_WRITERS: Final = 2
_ENDLESS: Final = 1_000_000
_PAUSE_S: Final = 0.005
_ROOM_S_MAX: Final = 300.0
"""How long a writer offers its batches, all together, before it gives up."""

_END_S_MAX: Final = 2 * _ROOM_S_MAX


@dataclass(frozen=True, slots=True)
class Overfilled:
    """What came of it.

    Args:
        stored_bytes: What the writers that ended by themselves have stored: less than four times the capacity if one of
            them found no room again for minutes.
        most_bytes: The most that was in use at any look.
    """

    stored_bytes: int
    most_bytes: int


def overfill(
    entry: Mapping[str, object], namespace: bytes, capacity_bytes: int, used_bytes: Callable[[], int]
) -> Overfilled:
    """Let two processes store twice the capacity each, and a third one until it is killed amid its stores.

    Args:
        entry: Of the tier, with its capacity: each process opens one. JSON can say it.
        namespace: The digest of the namespace, 16 bytes.
        capacity_bytes: What must never be exceeded.
        used_bytes: Returns what the namespace's blocks take at one moment.

    Raises:
        AssertionError: More was in use at some look, or a process failed, or they do not end.
    """
    batches = 2 * capacity_bytes // (BATCH * BLOCK_BYTES)
    writers = [_start(entry, namespace, f"writer-{number}", batches) for number in range(_WRITERS)]
    victim = _start(entry, namespace, "victim", _ENDLESS)
    samples: list[int] = []
    ends_what_hangs = threading.Timer(_END_S_MAX, victim.kill)
    ends_what_hangs.start()

    def sample() -> None:
        samples.append(used_bytes())
        assert samples[-1] <= capacity_bytes, f"{samples[-1]} bytes are in use, of a capacity of {capacity_bytes}"

    try:
        assert victim.stdout is not None
        for line in victim.stdout:
            if int(line) >= 3 * BATCH:
                break
            sample()
        else:
            raise AssertionError("the process that was to be killed has ended")
        victim.send_signal(signal.SIGKILL)  # amid its stores
        end_s = time.monotonic() + _END_S_MAX
        while any(writer.poll() is None for writer in writers):
            sample()
            assert time.monotonic() < end_s, "the writers do not end"
            time.sleep(_PAUSE_S)
        stored = [int(writer.communicate()[0].split()[-1]) for writer in writers]
    finally:
        ends_what_hangs.cancel()
        for process in (*writers, victim):
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    sample()
    return Overfilled(sum(stored) * BLOCK_BYTES, max(samples))


def _start(entry: Mapping[str, object], namespace: bytes, label: str, batches: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", __name__, json.dumps(entry), namespace.hex(), label, str(batches)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def main() -> None:
    """Be such a process."""
    entry, namespace, label, batches = sys.argv[1:]
    rig = rig_of(json.loads(entry), block_bytes=BLOCK_BYTES, namespace=bytes.fromhex(namespace))

    def store(number: int) -> bool:
        is_stored = rig.store(make_keys(BATCH, f"{label}-{number}")).success
        if is_stored:
            print((number + 1) * BATCH, flush=True)
        return is_stored

    wait_for_each((partial(store, number) for number in range(int(batches))), _ROOM_S_MAX, what="room again")
    rig.close()


if __name__ == "__main__":
    main()
