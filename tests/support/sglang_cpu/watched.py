"""Our backend with its counters written to a file: tests run outside the process of SGLang's scheduler."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tiered_kv_sglang import TieredKVHiCache

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
