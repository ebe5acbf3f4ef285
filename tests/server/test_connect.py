"""Programs put and get blocks of a host's cache."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiered_kv
from tests.support.host_server import BLOCK_BYTES, WAIT_S, serving, stack_of, wait_for
from tiered_kv.errors import ConfigError
from tiered_kv.server import protocol

HASHES = [number.to_bytes(16, "big") for number in range(24)]
BLOCKS = np.arange(24 * BLOCK_BYTES, dtype=np.uint32).astype(np.uint8).reshape(24, BLOCK_BYTES)


def test_a_program_gets_what_another_has_put(tmp_path: Path) -> None:
    nvme = {"type": "nvme", "path": str(tmp_path / "nvme"), "capacity": "64MiB"}
    with (
        serving(tmp_path, stack_of(secondary=[nvme])) as served,
        tiered_kv.connect(served.address) as first,
        tiered_kv.connect(served.address) as second,
    ):
        assert first.put(HASHES, BLOCKS) == 24
        assert first.flush()
        assert second.contains(HASHES) == 24
        assert second.contains([b"absent"]) == 0
        assert second.prefetch(HASHES) == 24
        assert (second.get(HASHES) == BLOCKS).all()
        second.reset_cache()
        wait_for(lambda: first.epoch == 1)
        assert len(first.get(HASHES)) == 0


def test_an_asyncio_program_awaits_the_calls(tmp_path: Path) -> None:
    async def use(address: str) -> int:
        async with tiered_kv.AsyncStack(tiered_kv.connect(address)) as stack:
            await stack.put(HASHES, BLOCKS)
            found = await asyncio.gather(*(stack.get(HASHES) for _ in range(4)))
            return sum(len(each) for each in found)

    with serving(tmp_path) as served:
        assert asyncio.run(use(served.address)) == 4 * 24


@pytest.mark.parametrize("other", [{"namespace": {"model": "other"}}, {"block": {"bytes": 2 * BLOCK_BYTES}}])
def test_a_program_uses_no_server_of_another_namespace(
    tmp_path: Path, other: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path) as served:
        stack = tiered_kv.connect(served.address)
    with stack:
        wait_for(lambda: not stack.is_attached or not stack.put(HASHES, BLOCKS))
        with serving(tmp_path, stack_of(**other)):
            wait_for(lambda: stack.contains(HASHES) or stack.is_attached or "connect anew" in caplog.text)
            assert not stack.is_attached
            assert stack.put(HASHES, BLOCKS) == 0
        with serving(tmp_path):
            wait_for(lambda: stack.put(HASHES, BLOCKS) == 24)


def test_a_program_stores_all_it_says_after_a_larger_server_has_gone(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        stack = tiered_kv.connect(served.address)
    with stack, serving(tmp_path, stack_of(rows=64)):
        wait_for(lambda: stack.put(HASHES, BLOCKS) == 24)
        assert stack.contains(HASHES) == 24


def test_without_a_server_nothing_is_found_and_nothing_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(tiered_kv.TierUnavailableError, match="tiered-kv serve"):
        tiered_kv.connect(f"unix:{tmp_path}/none.sock")
    with serving(tmp_path) as served:
        stack = tiered_kv.connect(served.address)
        stack.put(HASHES, BLOCKS)
    with stack:
        wait_for(lambda: not stack.put(HASHES, BLOCKS))
        assert len(stack.get(HASHES)) == 0
        with serving(tmp_path):
            wait_for(lambda: stack.put(HASHES, BLOCKS) == 24)
            assert (stack.get(HASHES) == BLOCKS).all()
    told = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert any("every block is a miss" in each for each in told)
    assert any("attached to the host's cache" in each for each in told)


def test_a_program_without_calls_lets_the_memory_of_its_server_go(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        stack = tiered_kv.connect(served.address)
    with stack:
        wait_for(lambda: not stack.region.array.size)


def test_a_server_of_another_release_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.settimeout(WAIT_S)
        listener.bind(str(tmp_path / "cache.sock"))
        listener.listen()

        def answer() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(1 << 16)
                body = json.dumps({"version": protocol.VERSION}).encode()
                sock.send(protocol.HEADER.pack(protocol.WELCOME, 0, 0, 0, len(body)) + body)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConfigError, match=r"does not say instance, namespace, .*: upgrade the server"):
            tiered_kv.connect(f"unix:{tmp_path}/cache.sock")
        thread.join()
