"""Programs in SGLang's environment, and the configuration of our backend."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.support.engines import SGLANG, Message, Program, environment_of, interpreter, program_path


def extra_config(tiers: Sequence[Mapping[str, object]], **more: object) -> Message:
    """Return the extra config of our backend, with the tests' watched class."""
    return {
        "backend_name": "tiered_kv",
        "module_path": "tests.support.sglang_cpu.watched",
        "class_name": "WatchedHiCache",
        "interface_v1": 1,
        "prefetch_threshold": 64,
        "tiers": list(tiers),
        **more,
    }


def hicache(extra: Mapping[str, object], **more: object) -> Message:
    """Return the options of an engine whose HiCache has our backend."""
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2,
        "hicache_mem_layout": "page_first",
        "hicache_io_backend": "kernel",
        "hicache_write_policy": "write_through",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(extra),
        **more,
    }


class SGLangEngine(Program):
    """An engine as a `Program`.

    Args:
        model: Where its model is, or is made.
        directory: For its files.
        options: Of SGLang's `Engine`.
        variables: Of its environment.
    """

    def __init__(self, model: Path, directory: Path, options: Mapping[str, object], **variables: str) -> None:
        self._counters = directory / "counters.json"
        program = program_path("sglang_engine_program.py")
        super().__init__(
            [interpreter(SGLANG), program, str(model), json.dumps(options)],
            directory / "engine.log",
            environment_of(SGLANG, directory, WATCHED_COUNTERS=str(self._counters), **variables),
        )

    def wait_ready(self) -> Self:
        assert self.answer() == {"ready": True}
        return self

    def kill(self) -> None:
        """Kill all processes of the engine, and remove what SGLang leaves in /dev/shm."""
        left = [Path(line.split()[-1]) for line in self._maps() if "/dev/shm/sgl" in line]
        super().kill()
        for path in left:
            path.unlink(missing_ok=True)

    def has_counted(self) -> bool:
        return self._counters.exists()

    def counters(self) -> Message:
        """Return the backend's counters after its last transfer."""
        counters: Message = json.loads(self._counters.read_text())
        return counters

    def _maps(self) -> list[str]:
        lines: list[str] = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if os.getpgid(int(process.name)) == self._process.pid:
                    lines += (process / "maps").read_text().splitlines()
            except OSError:  # it has ended
                continue
        return lines
