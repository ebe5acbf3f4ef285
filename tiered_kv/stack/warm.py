"""A warm start: a new stack loads the blocks that were the hottest in the memory of an earlier one, or of another one.

A stack with the setting `warm` makes one. At a clean end the closing thread writes the list of the memory's hottest
blocks. At the start, a thread of its own reads a list, and gives the blocks to the manager as prefetch orders that only
fill memory (`tiering/orders.py`), a small part at a time. These things stay true:

- Nothing waits for it: without a list, or with one that cannot be used, memory begins empty.
- It takes free rows only, and stops when there are none. A reset ends it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from tiered_kv.base import OffloadKey
from tiered_kv.config.files import WarmSettings
from tiered_kv.config.reading import fill_variables, from_source
from tiered_kv.config.settings import PRIMARY_NAME
from tiered_kv.config.stack_config import StackConfig
from tiered_kv.config.validation import validate
from tiered_kv.cpu.chain import OldChain
from tiered_kv.cpu.hottest import hottest_keys
from tiered_kv.errors import ConfigError, ResourceError, TieredKVError
from tiered_kv.stack.warm_list import KEYS_MAX, is_list, read_list, write_list
from tiered_kv.system.threads import start_thread
from tiered_kv.tiering.manager import TieringOffloadingManager
from tiered_kv.tiering.order import Phase, PrefetchOrder

PART_S: Final = 0.1
"""How long the loads of one part take, by the setting `rate`."""
PART_BLOCKS: Final = (4, 1024)  # at least and at most
ORDER_S: Final = 20.0
"""How long a part may take: a tier that is down keeps only its own part."""
ABSENT_MAX: Final = 4096
"""After so many absent blocks, and none that a tier has, the start gives up: no tier here has what the list names."""
_STOP_S: Final = 1.0

_log = logging.getLogger(__name__)


class WarmStart:
    """The warm start of one stack, and the list for the next one. Any thread may call."""

    def __init__(self, config: StackConfig, settings: WarmSettings, manager: TieringOffloadingManager) -> None:
        self._settings, self._manager = settings, manager
        self._digest, self._block_bytes = config.identity.digest, config.block.bytes
        self._keys_max = min(KEYS_MAX, config.primary_blocks)
        token = None if config.metrics is None else config.metrics.token
        self._token = None if token is None else token.get_secret_value()
        self._rest: Sequence[OffloadKey] = ()
        """What the thread has not loaded yet: a stack that ends before lists it behind its memory."""
        self._missing: list[OffloadKey] = []
        """Blocks that a tier which was not in use may have: they are listed, too."""
        self._left_out: dict[str, str] = {}
        """The tiers that were not in use while blocks were missing, with the reason: the others fill memory."""
        self._thread: threading.Thread | None = None
        self._ended, self._stopped = threading.Event(), threading.Event()  # a part has; the stack closes

    def begin(self) -> None:
        """Begin to fill memory, on a thread of its own."""
        if self._settings.rate != 0:
            with suppress(ResourceError):  # memory begins empty
                self._thread = start_thread(self._run, "tiered-kv-warm")

    def end(self) -> None:
        """Stop, and write the list for the next start. Called before the manager shuts down."""
        self._stopped.set()
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)
        if self._settings.path is None:
            return
        keys = list(dict.fromkeys([*hottest_keys(self._manager.primary, self._keys_max), *self._missing, *self._rest]))
        if not keys:  # an older list is better than none
            return
        try:
            count = write_list(Path(self._settings.path), self._digest, self._block_bytes, keys[: self._keys_max])
            _log.info("the list of the %d hottest blocks is in %s", count, self._settings.path)
        except OSError as error:
            _log.warning("the list of the hottest blocks cannot be written: %s", error)

    # The thread.

    def _run(self) -> None:
        try:
            keys = self._read()
        except (TieredKVError, OSError) as error:
            _log.warning("memory begins empty: %s", error)
            return
        if keys:
            self._fill(keys)

    def _read(self) -> list[OffloadKey]:
        source = self._settings.source
        if source is None:
            return [] if self._settings.path is None else self._listed(Path(self._settings.path))
        from tiered_kv.stack.exporters.client import is_address, url_of_address

        if is_address(source):
            from tiered_kv.stack.exporters.hottest import ask_hottest

            url, digest = url_of_address(source), self._digest.hex()
            return ask_hottest(url, digest, self._block_bytes, self._token, self._keys_max)
        path = Path(source)
        if path.is_file() and not is_list(path):
            path = from_source(path, _path_in)
        if not path.exists():
            raise ConfigError(f"there is no file {path}")
        return self._listed(path)

    def _listed(self, path: Path) -> list[OffloadKey]:
        return read_list(path, self._digest, self._block_bytes)[: self._keys_max]

    def _fill(self, keys: Sequence[OffloadKey]) -> None:
        """Load blocks part by part, until memory is full, the cache is reset or the stack closes."""
        rate, epoch, counts = self._settings.rate_of(self._block_bytes), self._manager.primary.epoch, Counter[str]()
        least, most = PART_BLOCKS
        unanswered = self._unanswered()
        part_blocks = max(least, min(most, int(rate * PART_S) // self._block_bytes))
        self._rest = keys
        for age, first in enumerate(range(0, len(keys), part_blocks), 1):
            began_s = time.monotonic()
            part = keys[first : first + part_blocks]
            order = PrefetchOrder(f"warm {age}", part, began_s + ORDER_S, chain=OldChain(age), on_ended=self._ended.set)
            self._ended.clear()
            if self._stopped.is_set():
                return
            self._manager.orders.give(order)
            while not (order.is_ended or self._stopped.is_set()):
                self._ended.wait()
                self._ended.clear()
            if not order.is_ended:
                return
            self._rest = keys[first + part_blocks :]
            counts.update(order.counts())
            self._note_left_out(order, unanswered)
            has_others = 0 < len(self._left_out) < len(self._manager.secondary_tiers)
            is_in_vain = counts["absent"] >= ABSENT_MAX and not (counts["in_memory"] + counts["used"] or has_others)
            if counts["refused"] or is_in_vain or self._manager.primary.epoch != epoch:
                break
            loaded_s = order.counts()["in_memory"] * self._block_bytes / rate
            if self._stopped.wait(max(0.0, loaded_s - (time.monotonic() - began_s))):
                return
        is_in_vain = (
            not counts["in_memory"] + counts["used"] + counts["refused"] and self._manager.primary.epoch == epoch
        )
        self._rest = keys if is_in_vain else ()  # the tiers may be back when the next stack begins
        if self._manager.primary.epoch != epoch:
            self._missing.clear()
        self._note(len(keys), counts)

    def _unanswered(self) -> dict[str, int]:
        """Return the lookups that each tier has not answered."""
        found = self._manager.registry.snapshot().tiers.items()
        return {name: int(tier.value("lookup_timeouts_total")) for name, tier in found if name != PRIMARY_NAME}

    def _note_left_out(self, order: PrefetchOrder, before: Mapping[str, int]) -> None:
        """Note which tiers may have what a part lacks. Before the first one they had not answered `before` lookups."""
        missing = [key for key in order.keys if order.phases.get(key) in (None, Phase.ABSENT)]
        if not missing:
            return
        now = self._unanswered()  # a breaker opens after several failures only
        left_out = {name: "it answers no lookup" for name in now if now[name] > before[name]}
        self._left_out = left_out | self._manager.removals.notes(with_errors=True) | self._left_out
        if self._left_out:
            self._missing += missing

    def _note(self, listed: int, counts: Counter[str]) -> None:
        self._manager.notices.add(PRIMARY_NAME, "warm start ended")
        said = f"the warm start has loaded {counts['in_memory']} of {listed} blocks"
        if counts["used"]:
            said += f"; requests had brought {counts['used']} before"
        if absent := counts["absent"] + counts["coming"]:
            said += f"; no tier {'in use ' if self._left_out else ''}has {absent}"
        if counts["refused"]:
            said += "; memory is full"
        for name, why in self._left_out.items():
            self._manager.notices.add(name, "left out of a warm start")
            said += f"; without tier '{name}': {why}"
        if absent and not self._left_out and not counts["in_memory"] + counts["used"]:
            said += ": the tiers share none with the other stack; `tiered-kv copy` moves them"
        _log.log(logging.WARNING if self._left_out else logging.INFO, "%s", said)


def _path_in(raw: Mapping[str, object]) -> Path:
    """Return the path of the list in a stack's file."""
    given = raw.get("warm")
    filled = fill_variables({"warm": {"path": given} if isinstance(given, str) else given}, os.environ)
    settings = validate(WarmSettings, filled["warm"], ("warm",)) if given is not None else None
    if settings is None or settings.path is None:
        raise ConfigError("expected the path of a list, or a stack's file with `warm`", location="warm.path")
    return Path(settings.path)
