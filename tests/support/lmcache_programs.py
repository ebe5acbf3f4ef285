"""LMCache's server with our adapter, and its client benchmark, in LMCache's environment."""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.engines import LMCACHE, environment_of, interpreter, output_of
from tests.support.server_process import ServerProcess, free_port

CHUNKS = 4
"""Chunks of a sequence of the client's benchmark."""
_KV_SHAPE = "(2,512,8,4,32):float16:8"
_ANSWER_TIMEOUT_S = 10.0

Entry = Mapping[str, object]


def adapter(tiers: Sequence[Entry], **params: object) -> str:
    """Return LMCache's option for our adapter."""
    adapter_params = {"tiers": list(tiers), "namespace": {"revision": "1"}, **params}
    return json.dumps(
        {
            "type": "plugin",
            "module_path": "tiered_kv_lmcache",
            "class_name": "TieredKVL2Adapter",
            "adapter_params": adapter_params,
        }
    )


def lmcache(directory: Path, *arguments: str) -> list[str]:
    """Return the command `lmcache` with `arguments`; its temporary files go to `directory`."""
    variables = environment_of(LMCACHE, directory)
    chosen = {name: variables.get(name, "") for name in ("PYTHONHASHSEED", "PYTHONPATH", "TMPDIR")}
    chosen |= {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_LOG_LEVEL": "WARNING"}
    program = Path(interpreter(LMCACHE)).with_name("lmcache")
    return ["env", *(f"{name}={value}" for name, value in chosen.items()), str(program), *arguments]


def run(directory: Path, *arguments: str) -> str:
    return output_of(lmcache(directory, *arguments), directory, os.environ)


class LMCacheServer(ServerProcess):
    """LMCache's server with our adapter, for clients that share their blocks in shared memory."""

    def __init__(self, directory: Path, tiers: Sequence[Entry], *, chunk_tokens: int = 256) -> None:
        super().__init__()
        self._directory = directory
        self._http_port = free_port()
        self._tiers = tiers
        self._options = ("--chunk-size", str(chunk_tokens), "--l1-size-gb", "0.25")

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self._http_port}"

    def command(self) -> list[str]:
        return lmcache(
            self._directory,
            *("server", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--http-host", "127.0.0.1", "--http-port", str(self._http_port)),
            *("--supported-transfer-mode", "engine_driven", "--eviction-policy", "LRU"),
            *(*self._options, "--l2-adapter", adapter(self._tiers)),
        )

    def answers(self) -> bool:
        try:
            self.status()
        except (OSError, ValueError):
            return False
        return True

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.http_url}/status", timeout=_ANSWER_TIMEOUT_S) as answer:
            (adapter_status,) = json.load(answer)["storage_manager"]["l2_adapters"]
        assert isinstance(adapter_status, dict)
        return adapter_status

    def clear_l1(self) -> None:
        """Clear LMCache's memory."""
        request = urllib.request.Request(f"{self.http_url}/cache/clear", method="POST")
        urllib.request.urlopen(request, timeout=_ANSWER_TIMEOUT_S).close()

    def counters(self, tier: str) -> dict[str, Any]:
        """Return the counters of a tier, of the one layout in use."""
        (used,) = [each for each in self.status()["sets"] if "counters" in each]
        counted = used["counters"][tier]
        assert isinstance(counted, dict)
        return counted


@dataclass(frozen=True, slots=True)
class Sequences:
    """Results of the client's benchmark: chunks that the server had and digests, by sequence."""

    found: Mapping[int, int]
    digests: Mapping[int, str]
    mismatches: int


def bench(server: LMCacheServer, directory: Path, first: int, end: int, ranks: int = 1) -> Sequences:
    """Run LMCache's client benchmark, which stores missing chunks, clears its memory, and loads and compares all."""
    output = run(
        directory,
        *("bench", "server", "--rpc-url", f"tcp://127.0.0.1:{server.port}", "--url", server.http_url),
        *("--mode", "cpu", "--transfer-mode", "engine_driven", "--tp-size", str(ranks), "--num-tokens", "1024"),
        *("--start", str(first), "--end", str(end), "--interval", "0.3", "--kvcache-shape-spec", _KV_SHAPE),
    )
    found = re.findall(rf"seq (\d+)/cold\] LOOKUP: (\d+)/{CHUNKS} chunks", output)
    digests = re.findall(r"seq (\d+)/warm\] CHECKSUM: (\w+)", output)
    return Sequences(
        {int(number): int(chunks) for number, chunks in found},
        {int(number): digest for number, digest in digests},
        output.count("CHECKSUM MISMATCH"),
    )
