"""Our backend, as SGLang's scheduler makes it, which writes down what it counts: the tests see no memory of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tiered_kv.integrations.sglang import TieredKVHiCache

COUNTERS = Path(os.environ["WATCHED_COUNTERS"])


class WatchedHiCache(TieredKVHiCache):
    """Writes its counters to the file that WATCHED_COUNTERS names, whenever it has loaded or stored."""

    def _run(self, *args, **kwargs):  # type: ignore[no-untyped-def]  # as it is there
        try:
            return super()._run(*args, **kwargs)
        finally:
            new = COUNTERS.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps(self.counters()))
            new.replace(COUNTERS)
