"""The faults of a soak, switched on and off one after the other, in an order that a seed decides."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable

from tests.support.race_cases import flip_a_bit
from tests.support.soak.grounds import BLOCK_BYTES, Grounds
from tiered_kv.testing.proxy import NO_FAULTS, Direction, FaultProxy, Faults
from tiered_kv.testing.servers import ServerProcess

_AGAIN_S = 0.25
"""How often a fault that strikes once is set again."""
_STRIKING = ("stalled", "cut", "flipped", "reset")


class Troubles:
    """A thread that switches faults."""

    def __init__(
        self, grounds: Grounds, seed: int, *, fault_s: float, quiet_s: float, on_quiet: Callable[[], None]
    ) -> None:
        self.switched: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        self.error: Exception | None = None
        self._grounds = grounds
        self._chance = random.Random(seed)
        self._fault_s = fault_s
        self._quiet_s = quiet_s
        self._on_quiet = on_quiet
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-troubles")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Switch the present fault off, and return when that is done."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def faults(self) -> dict[str, Callable[[], None]]:
        """Functions that switch a fault on, and return after switching it off."""
        made: dict[str, Callable[[], None]] = {}
        grounds = self._grounds
        for tier, proxy in (("redis", grounds.redis_proxy), ("s3", grounds.s3_proxy)):
            for name, faults in _wire_faults(self._chance).items():
                made[f"{tier}: {name}"] = lambda proxy=proxy, faults=faults: self._on_the_wire(proxy, faults)  # type: ignore[misc]  # bound now
            made[f"{tier}: resets"] = lambda proxy=proxy: self._again(proxy.reset_connections)  # type: ignore[misc]
        made["redis: frozen"] = lambda: self._frozen(grounds.redis)
        made["redis: restarted empty"] = grounds.redis.restart
        made["s3: frozen"] = lambda: self._frozen(grounds.s3)
        made["s3: restarted empty"] = grounds.restart_s3
        made["nvme: damaged"] = lambda: self._damage("nvme: damaged", "nvme-*")
        made["fs: damaged"] = lambda: self._damage("fs: damaged", "fs")
        return made

    def _run(self) -> None:
        try:
            while True:
                names = sorted(self.faults)
                self._chance.shuffle(names)
                for name in names:
                    if self._stop.wait(self._quiet_s):
                        return
                    self._on_quiet()
                    self.switched[name] += 1
                    before = self._strikes()
                    self.faults[name]()
                    if self._strikes() > before:
                        self.struck[name] += 1
        except Exception as error:  # reported at the end of the soak
            self.error = error

    def _strikes(self) -> int:
        counts = [proxy.counts() for proxy in (self._grounds.redis_proxy, self._grounds.s3_proxy)]
        return sum(count[kind] for count in counts for kind in _STRIKING)

    def _on_the_wire(self, proxy: FaultProxy, faults: Callable[[], tuple[Faults, Faults]]) -> None:
        def switch() -> None:
            for direction, fault in zip(Direction, faults(), strict=True):
                proxy.set_faults(fault, direction)

        try:
            self._again(switch)
        finally:
            proxy.set_faults(NO_FAULTS)

    def _frozen(self, server: ServerProcess) -> None:
        server.freeze()
        try:
            self._stop.wait(self._fault_s)
        finally:
            server.thaw()

    def _damage(self, name: str, pattern: str) -> None:
        def damage() -> None:
            for directory in self._grounds.directory.glob(pattern):
                self.struck[name] += flip_a_bit(directory, self._chance, BLOCK_BYTES)

        self._again(damage, pause_s=_AGAIN_S / 10)

    def _again(self, act: Callable[[], None], pause_s: float = _AGAIN_S) -> None:
        """Repeat a call as long as a fault lasts."""
        end_s = time.monotonic() + self._fault_s
        while time.monotonic() < end_s:
            act()
            if self._stop.wait(pause_s):
                return


def _wire_faults(chance: random.Random) -> dict[str, Callable[[], tuple[Faults, Faults]]]:
    """Return faults to the server and to the client, by name; each call draws where they strike."""

    def at() -> int:
        return int(2 ** chance.uniform(0, 18))  # anywhere between a reply's first line and many blocks later

    return {
        "slow": lambda: (Faults(latency_s=0.02), Faults(latency_s=0.05)),
        "stalled": lambda: (NO_FAULTS, Faults(stalls=True)),
        "flipped on the way back": lambda: (NO_FAULTS, Faults(flip_at_byte=at())),
        "flipped on the way there": lambda: (Faults(flip_at_byte=at()), NO_FAULTS),
        "cut": lambda: (NO_FAULTS, Faults(cut_after_bytes=at(), cut_by_reset=chance.random() < 0.5)),
    }
