"""Our backend with its counters written to a file: tests run outside the process of SGLang's scheduler."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from tiered_kv.direct import DirectTiers
from tiered_kv.integrations.sglang import TieredKVHiCache, backend

COUNTERS = Path(os.environ["WATCHED_COUNTERS"])
HANGING = COUNTERS.with_name("hanging")


class HangingTiers(DirectTiers):
    """Loads hang while there is a file HANGING; the first says so by another file."""

    def load(self, *args):  # type: ignore[no-untyped-def]  # as it is there
        while HANGING.exists():
            HANGING.with_suffix(".load").touch()
            time.sleep(0.01)
        super().load(*args)


backend.DirectTiers = HangingTiers  # type: ignore[attr-defined]


class WatchedHiCache(TieredKVHiCache):
    """Writes its counters to the file that WATCHED_COUNTERS names, whenever it has loaded or stored."""

    def _run(self, *args, **kwargs):  # type: ignore[no-untyped-def]  # as it is there
        try:
            return super()._run(*args, **kwargs)
        finally:
            new = COUNTERS.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps(self.counters()))
            new.replace(COUNTERS)
