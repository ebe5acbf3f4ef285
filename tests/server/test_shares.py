"""Programs of a host's cache name their tenants: the server gives each its share."""

from __future__ import annotations

from pathlib import Path

import tiered_kv
from tests.support.host_server import BLOCK_BYTES, WAIT_S, serving, stack_of

ROWS = 64
SHARE = ROWS // 4


def test_a_program_that_floods_a_host_s_cache_leaves_another_its_share(tmp_path: Path) -> None:
    limits = {"quiet": "25%", "default": "25%"}  # the rest of the rows is granted to programs in advance
    blocks = bytes(SHARE * BLOCK_BYTES)

    def keys_of(name: str) -> list[bytes]:
        return [f"{name}-{number}".encode().ljust(16) for number in range(SHARE)]

    with (
        serving(tmp_path, stack_of(rows=ROWS, limits=limits)) as served,
        tiered_kv.connect(served.address) as quiet,
        tiered_kv.connect(served.address) as flooding,
    ):
        assert quiet.put(keys_of("quiet"), blocks, timeout=WAIT_S, hints={"tenant": "quiet"}) == SHARE
        for turn in range(20):
            flooding.put(keys_of(f"flood-{turn}"), blocks, timeout=WAIT_S)
        assert quiet.contains(keys_of("quiet"), WAIT_S) == SHARE
        used = served.host.stack.counters()["cpu"]["tenant_used_bytes"]
        assert used["quiet"] == SHARE * BLOCK_BYTES
        assert used["default"] > 0
