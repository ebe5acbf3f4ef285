"""Processes with memory of their own share the cache of a host's server, whatever becomes of each other."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.children import Child
from tests.support.host_server import (
    BLOCK_BYTES,
    content_of,
    keys_of,
    server_process,
    serving,
    stack_of,
    unmapping_hangs,
)
from tiered_kv.base import OffloadKey, make_offload_key
from tiered_kv.cli.main import main
from tiered_kv.config.namespace import Namespace
from tiered_kv.direct import DirectTiers
from tiered_kv.errors import ConfigError
from tiered_kv.stack.open import open_stack
from tiered_kv.testing.control import wait_until
from tiered_kv_host import tier

KEYS = keys_of(40)
NAMESPACE = Namespace(model="test")
WAIT_S = 60.0


class Process:
    """What a process has that uses the tier over memory of its own."""

    def __init__(
        self, address: str, namespace: Namespace = NAMESPACE, block_bytes: int = BLOCK_BYTES, **options: Any
    ) -> None:
        self.memory = np.zeros((len(KEYS), block_bytes), np.uint8)
        entry = {"type": "host", "socket": address, "lookup_timeout": "20s"}
        blocks: dict[str, Any] = {"block_bytes": block_bytes, "block_tokens": 16, "namespace": namespace, **options}
        self.tiers = DirectTiers(self.memory, tiers=[entry], **blocks)

    def store(self, keys: Sequence[OffloadKey]) -> int:
        for row, key in zip(self.memory, keys, strict=False):
            row[:] = np.frombuffer(content_of(key), np.uint8)
        return sum(self._wait("store", keys, range(len(keys))))

    def load(self, keys: Sequence[OffloadKey]) -> int:
        """Load blocks, check their bytes, and return their number."""
        self.memory[:] = 0
        loaded = self._wait("load", keys, range(len(keys)))
        for key, row, is_loaded in zip(keys, self.memory, loaded, strict=False):
            assert not is_loaded or row.tobytes() == content_of(key), "wrong bytes"
        return sum(loaded)

    def contains(self, keys: Sequence[OffloadKey]) -> int:
        return sum(self.tiers.wait("contains", keys, timeout_s=WAIT_S))

    def is_attached(self) -> bool:
        return bool(self.tiers.counters()["host"]["tier"]["is_attached"])

    def _wait(self, method: Any, keys: Sequence[OffloadKey], rows: Sequence[int]) -> list[bool]:
        return self.tiers.wait(method, keys, [row * BLOCK_BYTES for row in rows], timeout_s=WAIT_S)


@contextmanager
def process_of(address: str, **options: Any) -> Iterator[Process]:
    process = Process(address, **options)
    try:
        yield process
    finally:
        assert process.tiers.close()


def store_and_wait() -> None:
    """Run in a process of its own: store all blocks, and use the tier until it is killed."""
    process = Process(sys.argv[1])
    print(process.store(KEYS), flush=True)
    while True:
        assert process.load(KEYS) == len(KEYS)


@pytest.mark.slow
def test_a_process_finds_what_a_killed_one_has_stored(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        with Child(store_and_wait, served.address) as child:
            assert child.line() == str(len(KEYS))
            child.kill()  # while it loads
        with process_of(served.address) as process:
            assert process.contains([*KEYS, *keys_of(3, first=900)]) == len(KEYS)
            assert process.load(KEYS) == len(KEYS)
            assert process.store(KEYS) == len(KEYS)  # it knows that the server has them
        wait_until(lambda: not served.rows_in_use())


def test_a_use_in_the_memory_of_a_process_is_a_use_in_the_servers_memory(tmp_path: Path) -> None:
    stack = {"namespace": {"model": "test"}, "block": {"bytes": BLOCK_BYTES}, "primary": {"capacity": 8 * BLOCK_BYTES}}
    hashes, blocks = [key[:-4] for key in KEYS[:4]], np.ones((4, BLOCK_BYTES), np.uint8)
    with serving(tmp_path) as served:
        entry = {"type": "host", "socket": served.address, "lookup_timeout": "20s"}
        with open_stack({**stack, "secondary": [entry]}) as process:
            assert process.put(hashes, blocks, timeout=WAIT_S) == 4
            assert process.flush(WAIT_S)
            before = served.count(last_use)
            assert len(process.get(hashes, timeout=WAIT_S)) == 4

            def is_used() -> bool:
                process.contains(keys_of(1, first=900), timeout=WAIT_S)
                return served.count(last_use) > before

            wait_until(is_used, timeout_s=WAIT_S)


def test_what_a_process_uses_in_its_memory_is_stored_again_in_a_server_that_was_started_anew(tmp_path: Path) -> None:
    stack = {"namespace": {"model": "test"}, "block": {"bytes": BLOCK_BYTES}, "primary": {"capacity": 16 * BLOCK_BYTES}}
    entry = {"type": "host", "socket": f"unix:{tmp_path}/cache.sock", "lookup_timeout": "20s"}
    hashes = [key[:-4] for key in KEYS[:8]]
    with ExitStack() as undo:
        with serving(tmp_path):
            process = undo.enter_context(open_stack({**stack, "secondary": [entry]}))
            assert process.put(hashes, np.ones((8, BLOCK_BYTES), np.uint8), timeout=WAIT_S) == 8
            assert process.flush(WAIT_S)
        with serving(tmp_path) as served, process_of(served.address) as another:
            assert another.contains(KEYS[:8]) == 0

            def is_stored() -> bool:
                assert len(process.get(hashes[:4], timeout=WAIT_S)) == 4
                return another.contains(KEYS[:4]) == 4

            wait_until(is_stored, timeout_s=WAIT_S)
            assert another.contains(KEYS[4:8]) == 0, "nobody uses these"
        process.close()


def last_use(host: Any) -> int:
    """Return when a request last used a block, as its chain says."""
    return max(int(block.chain.last_use) for block in host.manager.primary.blocks.values())


@pytest.mark.slow
def test_without_a_server_every_block_is_a_miss_and_an_idle_process_attaches_again(tmp_path: Path) -> None:
    nvme = {"type": "nvme", "path": str(tmp_path / "nvme"), "capacity": "64MiB"}
    with process_of(f"unix:{tmp_path}/cache.sock") as process:
        assert (process.store(KEYS), process.contains(KEYS), process.load(KEYS)) == (0, 0, 0)
        for stored in (0, len(KEYS)):
            with server_process(tmp_path, secondary=[nvme]):
                wait_until(process.is_attached)
                assert process.load(KEYS) <= stored  # nvme has what it had written
                assert process.store(KEYS) == process.load(KEYS) == len(KEYS)
            wait_until(lambda: not process.is_attached())
            assert process.load(KEYS) == 0


def test_a_block_is_gone_if_the_server_says_so_and_not_while_it_is_away(tmp_path: Path) -> None:
    gone: list[OffloadKey] = []
    with process_of(f"unix:{tmp_path}/cache.sock", on_removed=lambda _, keys: gone.extend(keys)) as process:
        assert process.load(KEYS) == 0
        assert process.contains(KEYS) == 0  # after what was told of the load
        assert gone == []
        with serving(tmp_path):
            wait_until(process.is_attached)
            assert process.load(KEYS) == 0
            wait_until(lambda: gone == KEYS)


def test_a_load_of_more_blocks_than_a_session_may_lease_finds_all(tmp_path: Path) -> None:
    gone: list[OffloadKey] = []
    with (
        serving(tmp_path, stack_of(rows=64)) as served,
        process_of(served.address, on_removed=lambda _, keys: gone.extend(keys)) as process,
    ):
        assert sum(process.store(KEYS[first : first + 10]) for first in range(0, 40, 10)) == 40
        assert process.load(KEYS) == process.contains(KEYS) == 40
    assert gone == []


def test_a_block_that_the_server_has_no_lease_for_is_not_gone(tmp_path: Path) -> None:
    gone: list[OffloadKey] = []
    keys = keys_of(200)
    with (
        serving(tmp_path) as served,
        process_of(served.address, on_removed=lambda _, keys: gone.extend(keys)) as process,
    ):
        first, second = served.engine(), served.engine()
        for at in range(0, 200, 40):
            first.store(keys[at : at + 40])
        assert first.look_up(keys[:128], first.begin()) == 128
        assert second.look_up(keys[128:192], second.begin()) == 64
        assert (process.load(keys[192:]), process.contains(keys[192:])) == (0, 8)
        assert gone == []


def test_blocks_come_back_from_the_server_s_disk(tmp_path: Path) -> None:
    nvme = {"type": "nvme", "path": str(tmp_path / "nvme"), "capacity": "64MiB"}
    with serving(tmp_path, stack_of(rows=64, secondary=[nvme])) as served, process_of(served.address) as process:
        assert process.store(KEYS[:8]) == 8
        numbers = itertools.count(2000, 8)

        def are_evicted() -> bool:  # a block is not before it is on the disk
            process.store(keys_of(8, next(numbers)))
            return served.count(lambda host: sum(key in host.manager.primary.blocks for key in KEYS[:8])) == 0

        wait_until(are_evicted)
        assert process.contains(KEYS[:8]) == process.load(KEYS[:8]) == 8


@pytest.mark.parametrize("is_allowed", [True, False])
def test_blocks_are_copied_by_one_call_or_one_by_one_where_that_is_forbidden(
    tmp_path: Path, is_allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = dict.fromkeys(("process_vm_readv", "process_vm_writev"), 0)

    class Libc:
        def __getattr__(self, name: str) -> Callable[..., int]:
            def call(*arguments: int) -> int:
                copied[name] += arguments[2]
                return int(getattr(libc, name)(*arguments)) if is_allowed else -1

            return call

    libc = tier._libc
    monkeypatch.setattr(tier, "_libc", Libc())
    monkeypatch.setattr(tier, "_VECTORS_MAX", 24)
    with serving(tmp_path) as served, process_of(served.address) as process:
        assert process.store(KEYS) == process.load(KEYS) == len(KEYS)
    assert set(copied.values()) == {len(KEYS)}


def test_no_reset_waits_while_the_memory_of_a_dead_server_is_unmapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as served:
        process = Process(served.address)
    with unmapping_hangs(monkeypatch):
        process.tiers.reset()
        assert process.contains(KEYS) == 0
    assert process.tiers.close()


def test_another_namespace_or_size_is_refused_with_what_differs(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        for options, says in (
            ({"namespace": Namespace(model="other")}, "namespace.model 'test', the engine 'other'"),
            ({"block_bytes": 2 * BLOCK_BYTES}, f"block.bytes {BLOCK_BYTES}, the engine {2 * BLOCK_BYTES}"),
        ):
            with pytest.raises(ConfigError, match=says):
                Process(served.address, **options)


def test_the_server_s_namespace_is_that_of_the_blocks(tmp_path: Path) -> None:
    parallel = {"tensor": 2, "rank": 1}
    namespace = Namespace.model_validate({"model": "m", "groups": ["kv"], "extra": {"a": "b"}, "parallel": parallel})
    shared = Namespace.model_validate({"model": "m", "parallel": {"same_bytes_on_every_rank": True}})
    with serving(tmp_path, {"primary": {"capacity": "1MiB"}}, 2) as served:
        for each in (namespace, shared):
            with process_of(served.address, namespace=each) as process:
                process.store(KEYS)
            digest = each.identify(block_bytes=BLOCK_BYTES, block_tokens=16).digest
            assert served.namespaces.stacks[-1].config.identity.digest == digest


def test_blocks_with_long_and_empty_hashes_are_different_blocks(tmp_path: Path) -> None:
    long = [make_offload_key(b"x" * size, group) for size in (0, 90, 91, 92, 93, 500) for group in (0, 1)]
    with serving(tmp_path) as served, process_of(served.address) as process:
        assert process.store(long) == process.load(long) == len(long)
        assert process.contains([make_offload_key(b"x" * 501, 0)]) == 0


def test_check_says_that_no_server_answers_and_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    address = f"unix:{tmp_path}/none.sock"
    (tmp_path / "stack.yaml").write_text(json.dumps(stack_of(secondary=[{"type": "host", "socket": address}])))
    assert main(["check", str(tmp_path / "stack.yaml")]) == 1
    assert f"no server answers at {address}: start 'tiered-kv serve STACK --socket PATH'" in capsys.readouterr().out
