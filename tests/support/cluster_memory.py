"""What a cluster's memory does when its servers fail, come, go and move, while two clients load and store.

`python -m tests.support.cluster_memory` prints the table of docs/how-to/a-clusters-memory.md. A test runs it with
shorter outages. There are six masters without replicas. Each event is measured by the clients' `Window`s.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from redis.crc import REDIS_CLUSTER_HASH_SLOTS

from tests.support.children import Child
from tests.support.cluster_client import WINDOW_S, ClientSettings, Window
from tests.support.cluster_client import main as run_client
from tests.support.redis_masters import Ranges, RedisMasters
from tests.support.redis_servers import RedisServer
from tests.support.stacks import stack_of
from tiered_kv.config.units import format_bytes
from tiered_kv.testing.control import wait_until

_WHOLE_S_MAX: Final = 300.0
_WHOLE_WINDOWS: Final = 4
_WHOLE_SHARE: Final = 0.99
"""Of the blocks in the last windows: the servers evict new blocks by a sample, which may hit one that is in use."""
_COMMAND: Final = "from tiered_kv.cli.main import main; raise SystemExit(main())"
_ALL: Final[Ranges] = [(0, REDIS_CLUSTER_HASH_SLOTS - 1)]
_IN_MEMORY: Final = Path("/dev/shm")
"""A server flushes its small file for each slot that moves: a busy disk would be measured."""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    masters: int = 6
    block_bytes: int = 64 << 10
    blocks: int = 960
    """Those that each client loads again and again."""
    rounds_per_s: float = 8.0
    steady_s: float = 5.0
    """How long the rate before each event is measured."""
    load_s: float = 1.0
    """How long a `get` of the clients waits; 1 s is its default."""
    tier: dict[str, object] = field(default_factory=dict)
    """Further settings of the clients' tiers."""
    killed_s: float = 10.0
    paused_s: float = 60.0
    grace_s: int = 10
    """How long the keeper waits before it gives the slots of a lost master away."""
    moved_slots: int = REDIS_CLUSTER_HASH_SLOTS // 7
    rate_block_bytes: tuple[int, ...] = (64 << 10, 1 << 20)
    rate_bytes: int = 64 << 20
    """Of a round, in which each client measures its rates."""
    rate_rounds: int = 5


@dataclass(frozen=True, slots=True)
class Event:
    """One row of the table."""

    what: str
    before: Window
    during: Window
    """From the event until it is over: the server is back, has been replaced, or its slots have moved."""
    whole_after_s: float
    """From the end of `during` until all blocks were found again."""
    wrong: int

    @property
    def rate(self) -> float:
        """Loads of the other servers' blocks in a second, as a share of those before."""
        return _share(self.during.other_loaded / self.during.seconds, self.before.other_loaded / self.before.seconds)

    @property
    def other_lost(self) -> float:
        return 1.0 - _share(self.during.other_loaded, self.during.other_wanted)

    @property
    def lost(self) -> float:
        """The share of all blocks that were wanted and not loaded."""
        wanted = self.during.other_wanted + self.during.hit_wanted
        return 1.0 - _share(self.during.other_loaded + self.during.hit_loaded, wanted)


class Clients:
    """Two clients, and what they did since they were asked last."""

    def __init__(self, held: ExitStack, masters: RedisMasters, settings: ClusterSettings, directory: Path) -> None:
        self._masters = masters
        self._addresses = directory / "addresses"
        self.note_addresses()
        self._windows: list[list[Window]] = []
        self._children: list[Child] = []
        for number in range(2):
            client = ClientSettings(
                str(self._addresses),
                f"client {number}",
                settings.block_bytes,
                settings.blocks,
                settings.rounds_per_s,
                settings.load_s,
                settings.tier,
            )
            child = held.enter_context(Child(run_client, json.dumps(asdict(client))))
            assert child.line() == "stored"
            self._children.append(child)
            windows: list[Window] = []
            self._windows.append(windows)
            reader = threading.Thread(target=_collect, args=(child, windows))
            held.callback(reader.join)
            held.callback(child.kill)
            reader.start()
        name = next(name for server in masters.servers for name in server.keys("tkv1:*:*:*"))
        self._prefix = b":".join(name.split(b":")[:3]) + b":"

    def note_addresses(self) -> None:
        """Let the clients' only name lead to the masters, at the addresses that they have now."""
        self._addresses.write_text("\n".join(self._masters.addresses))

    def expect(self, ranges: Ranges) -> None:
        for child in self._children:
            child.tell(json.dumps({"prefix": self._prefix.decode(), "ranges": ranges}))
        self.skip()

    def skip(self) -> None:
        """Let each client begin another window."""
        for windows in self._windows:
            count = len(windows)
            wait_until(partial(_has_more, windows, count + 1), _WHOLE_S_MAX, pause_s=0.02, what="a window")
            windows.clear()

    def take(self) -> Window:
        """Return what both did since the last call; its seconds are those of one."""
        taken = Window()
        for windows in self._windows:
            count = len(windows)
            taken = sum(windows[:count], taken)
            del windows[:count]
        taken.seconds /= len(self._windows)
        return taken

    def wait_until_whole(self) -> float:
        """Return the seconds until all blocks were found in the last windows."""
        began_s = time.monotonic()
        wait_until(
            lambda: all(map(_is_whole, self._windows)), _WHOLE_S_MAX, pause_s=0.02, what="that all blocks are found"
        )
        return max(0.0, time.monotonic() - began_s - _WHOLE_WINDOWS * WINDOW_S)


def _has_more(windows: list[Window], count: int) -> bool:
    return len(windows) > count


def _collect(child: Child, windows: list[Window]) -> None:
    while line := child.line():
        windows.append(Window(**json.loads(line)))


def _is_whole(windows: list[Window]) -> bool:
    last = windows[-_WHOLE_WINDOWS:]
    wanted = sum(each.other_wanted + each.hit_wanted for each in last)
    loaded = sum(each.other_loaded + each.hit_loaded for each in last)
    return len(last) == _WHOLE_WINDOWS and loaded >= _WHOLE_SHARE * wanted > 0


class Proof:
    def __init__(self, masters: RedisMasters, clients: Clients, settings: ClusterSettings) -> None:
        self._masters = masters
        self._clients = clients
        self._settings = settings
        self.events: list[Event] = []

    def run(self) -> list[Event]:
        masters, settings = self._masters, self._settings
        first, second, third, *_ = masters.servers
        killed = f"A master is killed, and starts again after {settings.killed_s:g} s"
        self._measure(killed, masters.slots_of(first), partial(self._kill, first))
        self._measure(
            f"A master is paused for {settings.paused_s:g} s", masters.slots_of(second), partial(self._pause, second)
        )
        self._measure(f"A seventh master gets {settings.moved_slots:,} slots of the others", _ALL, self._add)
        lost = f"A master is gone for good; the keeper gives its slots away after {settings.grace_s} s"
        self._measure(lost, masters.slots_of(third), partial(self._lose, third))
        self._measure("All masters start again at other addresses", _ALL, self._move_all)
        return self.events

    def _measure(self, what: str, ranges: Ranges, happen: Callable[[], None]) -> None:
        clients = self._clients
        clients.expect(ranges)
        clients.wait_until_whole()
        clients.take()
        time.sleep(self._settings.steady_s)
        before = clients.take()
        happen()
        during = clients.take()
        whole_after_s = clients.wait_until_whole()
        after = clients.take()
        self.events.append(Event(what, before, during, whole_after_s, before.wrong + during.wrong + after.wrong))

    def _kill(self, server: RedisServer) -> None:
        server.kill()
        time.sleep(self._settings.killed_s)
        server.start()

    def _pause(self, server: RedisServer) -> None:
        server.freeze()
        time.sleep(self._settings.paused_s)
        server.thaw()

    def _add(self) -> None:
        self._masters.give(self._masters.add(), self._settings.moved_slots)
        self._clients.note_addresses()

    def _lose(self, server: RedisServer) -> None:
        self._masters.lose(server, self._settings.grace_s)
        self._clients.note_addresses()

    def _move_all(self) -> None:
        for server in self._masters.servers:
            server.kill()
        self._masters.start_elsewhere()
        self._clients.note_addresses()


@dataclass(frozen=True, slots=True)
class Rate:
    """What clients store and load together, by `tiered-kv bench` in each: sums of medians, in GB/s."""

    block_bytes: int
    clients: int
    store: float
    load: float
    wrong: int


def rates(addresses: list[str], settings: ClusterSettings, directory: Path) -> list[Rate]:
    """Measure one client, and two at once."""
    stack = directory / "stack.yaml"
    measured = []
    for block_bytes in settings.rate_block_bytes:
        tier = {"type": "redis", "mode": "cluster", "nodes": addresses}
        stack.write_text(json.dumps(stack_of(tier, blocks=64, block_bytes=block_bytes)))
        blocks, rounds = settings.rate_bytes // block_bytes, settings.rate_rounds
        command = [sys.executable, "-c", _COMMAND, "bench", str(stack), "--json"]
        command += ["--blocks", str(blocks), "--rounds", str(rounds)]
        for count in (1, 2):
            with ExitStack() as held:
                running = [held.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE)) for _ in range(count)]
                printed = [json.loads(each.communicate(timeout=_WHOLE_S_MAX)[0])["tiers"][0] for each in running]
            store, load = (sum(each[f"{verb}_gb_per_s"] for each in printed) for verb in ("store", "load"))
            wrong = sum(each["corrupt_blocks"] for each in printed)
            measured.append(Rate(block_bytes, count, store, load, wrong))
    return measured


def prove(settings: ClusterSettings, directory: Path) -> tuple[list[Rate], list[Event]]:
    """Measure the rates, and run all events; raises `AssertionError` if the clients do not find all blocks again."""
    with RedisMasters(directory, settings.masters) as masters, ExitStack() as held:
        measured = rates(masters.addresses, settings, directory)
        return measured, Proof(masters, Clients(held, masters, settings, directory), settings).run()


def table_of_rates(measured: list[Rate]) -> list[str]:
    """Return the rates as a table in Markdown."""
    lines = ["| blocks | clients | store, GB/s | load, GB/s |", "| --- | --- | --- | --- |"]
    return lines + [
        f"| {format_bytes(each.block_bytes)} | {each.clients} | {each.store:.2f} | {each.load:.2f} |"
        for each in measured
    ]


def table(events: list[Event]) -> list[str]:
    """Return the events as a table in Markdown."""
    lines = [
        "| event | wrong bytes | others' blocks: lost, rate | all blocks: lost | longest load, store | whole after |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for each in events:
        during = each.during
        others = f"{each.other_lost:.1%}, {each.rate:.2f} x" if during.other_wanted else ""
        lines.append(
            f"| {each.what} | {each.wrong} | {others} | {each.lost:.1%} | "
            f"{during.load_s_max:.2f} s, {during.store_s_max:.2f} s | {each.whole_after_s:.1f} s |"
        )
    return lines


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 1.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.cluster_memory", description=__doc__)
    parser.add_argument("--paused", type=float, default=60.0, help="seconds of the pause (default: %(default)s)")
    parser.add_argument(
        "--moved",
        type=int,
        default=REDIS_CLUSTER_HASH_SLOTS // 7,
        help="slots for the new master (default: %(default)s)",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cluster-", dir=_IN_MEMORY if _IN_MEMORY.is_dir() else None) as directory:
        settings = ClusterSettings(paused_s=options.paused, moved_slots=options.moved)
        measured, events = prove(settings, Path(directory))
    print("\n".join([*table_of_rates(measured), "", *table(events)]))
    return 1 if sum(each.wrong for each in measured) + sum(each.wrong for each in events) else 0


if __name__ == "__main__":
    sys.exit(main())
