"""A tier is taken out and put back while requests run: no wrong byte, no wait, and nothing of it stays open."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.stacks import forget_memory, manager_of, stack_of
from tiered_kv.errors import ConfigError
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.testing.control import wait_until

BLOCK_BYTES = 4096
HASHES = [bytes(24) + number.to_bytes(8, "big") for number in range(1, 33)]


def config_of(directory: Path, blocks: int = 64, **top: Any) -> dict[str, object]:
    disk = {"type": "nvme", "name": "disk", "path": str(directory / "kv"), "capacity": "8MiB"}
    return stack_of(disk, blocks=blocks, **top)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with open_stack(config_of(tmp_path)) as stack:
        yield stack


def content_of(hashes: list[bytes]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.array([np.frombuffer((each * BLOCK_BYTES)[:BLOCK_BYTES], np.uint8) for each in hashes])


def put(stack: Stack, hashes: list[bytes]) -> None:
    assert stack.put(hashes, content_of(hashes)) == len(hashes)
    assert stack.flush(60.0)


def found_of(stack: Stack, hashes: list[bytes]) -> int:
    """Return the length of the prefix that is there, after a look at its bytes."""
    out = np.zeros((len(hashes), BLOCK_BYTES), np.uint8)
    found = int(stack.get(hashes, out))
    assert not found or (out[:found] == content_of(hashes[:found])).all()
    return found


def stage(stack: Stack) -> str:
    return manager_of(stack).removed_tiers().get("disk", "")


def drain(stack: Stack) -> None:
    manager_of(stack).removals.ask("drain", "disk")
    wait_until(lambda: stage(stack) == "drained")


def attach(stack: Stack) -> None:
    manager_of(stack).removals.ask("attach", "disk")
    wait_until(lambda: not stage(stack))


def open_files(directory: Path) -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return [each for each in found if each.startswith(str(directory))]


def mapped(directory: Path) -> bool:
    return str(directory) in Path("/proc/self/maps").read_text()


def test_a_drained_tier_has_nothing_open_and_its_blocks_are_misses(stack: Stack, tmp_path: Path) -> None:
    put(stack, HASHES[:8])
    assert open_files(tmp_path / "kv")
    drain(stack)
    assert not open_files(tmp_path / "kv")
    assert not mapped(tmp_path / "kv")
    assert not [each.name for each in threading.enumerate() if "nvme" in each.name or "disk" in each.name]
    assert found_of(stack, HASHES[:8]) == 8, "memory has them"
    forget_memory(manager_of(stack))
    assert found_of(stack, HASHES[:8]) == 0
    put(stack, HASHES[8:16])
    counters = stack.counters()["disk"]
    assert counters["skipped_blocks_total"]["drained"] == 8
    assert counters["misses_total"]["disabled"] >= 1
    assert counters["drained"] == 1


def test_the_same_directory_comes_back_with_its_blocks(stack: Stack) -> None:
    put(stack, HASHES[:8])
    drain(stack)
    forget_memory(manager_of(stack))
    attach(stack)
    assert found_of(stack, HASHES[:8]) == 8
    assert stack.counters()["disk"]["drained"] == 0
    put(stack, HASHES[8:16])
    forget_memory(manager_of(stack))
    assert found_of(stack, HASHES[8:16]) == 8


def test_another_disk_comes_back_empty_and_is_used(stack: Stack, tmp_path: Path) -> None:
    put(stack, HASHES[:8])
    drain(stack)
    shutil.move(tmp_path / "kv", tmp_path / "old")
    forget_memory(manager_of(stack))
    attach(stack)
    assert found_of(stack, HASHES[:8]) == 0
    put(stack, HASHES[:8])
    forget_memory(manager_of(stack))
    assert found_of(stack, HASHES[:8]) == 8


def test_a_reset_while_it_is_out_hides_its_older_blocks(stack: Stack) -> None:
    put(stack, HASHES[:8])
    drain(stack)
    stack.reset_cache()
    attach(stack)
    assert found_of(stack, HASHES[:8]) == 0
    put(stack, HASHES[:8])
    forget_memory(manager_of(stack))
    assert found_of(stack, HASHES[:8]) == 8


def test_a_tier_that_cannot_be_opened_yet_comes_when_it_can(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv.tiering.late.RETRY_S", 0.01)
    put(stack, HASHES[:8])
    drain(stack)
    shutil.move(tmp_path / "kv", tmp_path / "moved")
    (tmp_path / "kv").write_text("no directory")
    manager_of(stack).removals.ask("attach", "disk")
    wait_until(lambda: stage(stack) == "attaching")
    forget_memory(manager_of(stack))
    assert found_of(stack, HASHES[:8]) == 0, "requests go on"
    (tmp_path / "kv").unlink()
    shutil.move(tmp_path / "moved", tmp_path / "kv")
    wait_until(lambda: not stage(stack))
    assert found_of(stack, HASHES[:8]) == 8


def test_asking_twice_and_in_any_order_harms_nothing(stack: Stack) -> None:
    put(stack, HASHES[:8])
    removals = manager_of(stack).removals
    removals.ask("attach", "disk")  # it is in use
    for verb in ("drain", "drain", "attach", "attach", "drain"):
        removals.ask(verb, "disk")
    wait_until(lambda: stage(stack) == "drained")
    attach(stack)
    removals.ask("attach", "disk")
    forget_memory(manager_of(stack))
    assert found_of(stack, HASHES[:8]) == 8
    with pytest.raises(ConfigError, match="there are disk"):
        removals.ask("drain", "other")


@pytest.mark.parametrize("is_drained", [True, False])
def test_a_stack_closes_while_a_tier_is_out(tmp_path: Path, is_drained: bool) -> None:
    with open_stack(config_of(tmp_path)) as stack:
        put(stack, HASHES[:8])
        manager_of(stack).removals.ask("drain", "disk")
        if is_drained:
            wait_until(lambda: stage(stack) == "drained")
    with open_stack(config_of(tmp_path)) as stack:
        assert found_of(stack, HASHES[:8]) == 8, "it is out until the process ends only"


@pytest.mark.slow
def test_requests_run_while_a_disk_is_drained_replaced_and_attached_many_times(tmp_path: Path) -> None:
    end_s, errors = time.monotonic() + 20.0, list[BaseException]()
    with open_stack(config_of(tmp_path, blocks=16)) as stack:

        def use(seed: int) -> None:
            choose = random.Random(seed)
            try:
                while time.monotonic() < end_s:
                    first = choose.randrange(0, 28)
                    part = HASHES[first : first + choose.randrange(1, 5)]
                    if choose.random() < 0.5:
                        stack.put(part, content_of(part))
                    else:
                        found_of(stack, part)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=use, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        choose, rounds = random.Random(7), 0
        while time.monotonic() < end_s:
            drain(stack)
            assert not open_files(tmp_path / "kv")
            if choose.random() < 0.5:
                shutil.rmtree(tmp_path / "kv")
            if choose.random() < 0.2:
                stack.reset_cache()
            attach(stack)
            rounds += 1
            time.sleep(choose.random() * 0.05)
        for thread in threads:
            thread.join(60.0)
            assert not thread.is_alive()
        assert not errors
        assert rounds > 3
        put(stack, HASHES[:8])
        assert found_of(stack, HASHES[:8]) == 8
