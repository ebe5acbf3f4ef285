"""A warm start: what a clean end lists is in memory again before anyone asks, and nothing waits for it."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.stacks import manager_of, stack_of
from tiered_kv.base import make_offload_key
from tiered_kv.config.files import WarmSettings
from tiered_kv.cpu.policies import CachePolicy, RequestChain, RowTable
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.stack.warm_list import read_list
from tiered_kv.testing.control import wait_until

BLOCK_BYTES = 4096
HASHES = [bytes(24) + number.to_bytes(8, "big") for number in range(1, 33)]
WARMED = "warmed_blocks_total"


def config_of(directory: Path, blocks: int = 64, policy: str = "lru", **warm: object) -> dict[str, object]:
    disk = {"type": "nvme", "name": "disk", "path": str(directory / "kv"), "capacity": "8MiB"}
    settings = {"path": str(directory / "list"), **warm}
    return stack_of(disk, blocks=blocks, primary={"policy": policy}, warm=settings)


def content_of(hashes: list[bytes]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.array([np.frombuffer((each * BLOCK_BYTES)[:BLOCK_BYTES], np.uint8) for each in hashes])


def put(stack: Stack, hashes: list[bytes]) -> None:
    assert stack.put(hashes, content_of(hashes)) == len(hashes)
    assert stack.flush(60.0)


def warmed(stack: Stack) -> dict[str, int]:
    found: dict[str, int] = stack.counters()["cpu"].get(WARMED, {})
    return found


def in_memory(stack: Stack) -> set[bytes]:
    index = manager_of(stack).primary.index
    return {each for each in HASHES if index.get(make_offload_key(each, 0), -1) >= 0}


def has_ended(stack: Stack) -> Callable[[], bool]:
    assert stack._warm is not None
    thread = stack._warm._thread
    return lambda: thread is None or not thread.is_alive()


@contextmanager
def warm_stack(config: dict[str, object]) -> Iterator[Stack]:
    """Open a stack, and wait until its warm start has ended."""
    with open_stack(config) as stack:
        wait_until(has_ended(stack))
        yield stack


class OfOthers(CachePolicy):
    """A policy as others write them: without a word on heat."""

    def __init__(self, table: RowTable) -> None:
        super().__init__(table)
        self._rows: set[int] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, rows: Collection[int]) -> None:
        self._rows.update(rows)

    def remove(self, rows: Collection[int]) -> None:
        self._rows.difference_update(rows)

    def use(self, rows: Sequence[int], chain: RequestChain) -> None:
        chain.take(rows, self.table)

    def evict(self, count: int, step: int, spare: RequestChain | None = None) -> list[int] | None:
        return None


@pytest.mark.parametrize("policy", ["lru", "arc", "density", f"{__name__}:OfOthers"])
def test_memory_is_as_before_when_nobody_has_asked(tmp_path: Path, policy: str) -> None:
    with open_stack(config_of(tmp_path, policy=policy)) as stack:
        put(stack, HASHES)
    with warm_stack(config_of(tmp_path, policy=policy)) as stack:
        assert warmed(stack) == {"loaded": len(HASHES)}
        assert in_memory(stack) == set(HASHES)
        out = np.zeros((len(HASHES), BLOCK_BYTES), np.uint8)
        assert stack.get(HASHES, out) == len(HASHES)
        assert (out == content_of(HASHES)).all()
        counters = stack.counters()
        assert counters["cpu"]["blocks_total"]["hit"] == len(HASHES)
        assert counters["disk"]["blocks_total"].get("hit", 0) == 0


def test_the_hottest_that_fit_come_and_the_coldest_leave_first(tmp_path: Path) -> None:
    with open_stack(config_of(tmp_path)) as stack:
        for first in range(0, 32, 8):
            put(stack, HASHES[first : first + 8])
        out = np.zeros((8, BLOCK_BYTES), np.uint8)
        assert stack.get(HASHES[:8], out) == 8  # the first are the hottest
    assert stack.config.warm is not None
    listed = read_list(tmp_path / "list", stack.config.identity.digest, BLOCK_BYTES)
    assert listed[:8] == [make_offload_key(each, 0) for each in HASHES[:8]]
    assert set(listed[-8:]) == {make_offload_key(each, 0) for each in HASHES[8:16]}
    with warm_stack(config_of(tmp_path, blocks=24)) as stack:
        assert warmed(stack)["loaded"] == 24
        assert in_memory(stack) == {*HASHES[:8], *HASHES[16:]}
        new = [b"new" + each[3:] for each in HASHES[:8]]
        put(stack, new)  # the coldest of the warm ones go
        assert in_memory(stack) == {*HASHES[:8], *HASHES[24:]}


def test_a_list_whose_tier_is_away_at_the_start_is_there_for_the_next_one(tmp_path: Path) -> None:
    with open_stack(config_of(tmp_path)) as stack:
        put(stack, HASHES)
    listed = (tmp_path / "list").read_bytes()
    (tmp_path / "kv").rename(tmp_path / "away")
    (tmp_path / "kv").write_text("no directory")
    away = config_of(tmp_path)
    away["secondary"][0]["required"] = False  # type: ignore[index]
    with warm_stack(away) as stack:
        assert in_memory(stack) == set()
    with warm_stack(config_of(tmp_path, rate=0) | {"secondary": []}) as stack:  # nothing to load, and nothing to list
        assert in_memory(stack) == set()
    assert (tmp_path / "list").read_bytes() == listed
    (tmp_path / "kv").unlink()
    (tmp_path / "away").rename(tmp_path / "kv")
    with warm_stack(config_of(tmp_path)) as stack:
        assert in_memory(stack) == set(HASHES)


def of_both(directory: Path, *, required: bool = True) -> dict[str, object]:
    """Return a stack of a shared directory, and then a disk."""
    shared = {
        "type": "fs",
        "name": "shared",
        "path": str(directory / "shared"),
        "capacity": "64MiB",
        "required": required,
    }
    config = config_of(directory)
    return config | {"secondary": [shared, *config["secondary"]]}  # type: ignore[misc]


def test_the_tiers_that_are_there_fill_memory_without_one_that_is_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv.stack.warm.ABSENT_MAX", 4)
    both, away = of_both(tmp_path), of_both(tmp_path, required=False)
    with warm_stack(both) as stack:
        put(stack, HASHES[:16])
    with warm_stack(both | {"secondary": both["secondary"][:1]}) as stack:  # type: ignore[index]
        put(stack, HASHES[16:])  # the hottest, and on no disk
    (tmp_path / "shared").rename(tmp_path / "away")
    (tmp_path / "shared").write_text("no directory")
    with warm_stack(away) as stack:
        assert in_memory(stack) == set(HASHES[:16])
        assert warmed(stack) == {"loaded": 16, "absent": 16}
        noted = {(each["tier"], each["what"]) for each in manager_of(stack).notices.snapshot()}
    assert ("shared", "left out of a warm start") in noted
    why = f"{tmp_path / 'shared'} is a file; give a directory"
    said = f"has loaded 16 of 32 blocks; no tier in use has 16; without tier 'shared': {why}"
    assert said in caplog.text
    (tmp_path / "shared").unlink()
    (tmp_path / "away").rename(tmp_path / "shared")
    with warm_stack(away) as stack:
        assert in_memory(stack) == set(HASHES), "the next start knows what was away"


def test_a_tier_that_is_away_is_no_news_where_the_others_have_all_blocks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with warm_stack(of_both(tmp_path)) as stack:
        put(stack, HASHES)
    (tmp_path / "shared").rename(tmp_path / "away")
    (tmp_path / "shared").write_text("no directory")
    with warm_stack(of_both(tmp_path, required=False)) as stack:
        assert in_memory(stack) == set(HASHES)
        noted = {(each["tier"], each["what"]) for each in manager_of(stack).notices.snapshot()}
    assert ("cpu", "warm start ended") in noted
    assert not {what for tier, what in noted if tier == "shared"}
    assert "without tier" not in caplog.text


@pytest.mark.parametrize("answers", [False, True])
def test_a_server_that_is_away_keeps_no_warm_start_waiting(tmp_path: Path, answers: bool) -> None:
    """Nobody listens at its port, or it accepts and never answers."""
    with open_stack(config_of(tmp_path)) as stack:
        put(stack, HASHES[:16])
    config = config_of(tmp_path)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        if not answers:
            silent.close()
        limits = {"timeout": 0.1, "connect_timeout": 0.1, "open_timeout": 0.01, "required": False}
        shared = {"type": "redis", "name": "shared", "url": url, **limits}
        with warm_stack(config | {"secondary": [shared, *config["secondary"]]}) as stack:  # type: ignore[misc]
            assert in_memory(stack) == set(HASHES[:16])
            assert warmed(stack) == {"loaded": 16}


def test_a_warm_start_evicts_nothing(tmp_path: Path) -> None:
    with open_stack(config_of(tmp_path)) as stack:
        put(stack, HASHES)
    with open_stack(config_of(tmp_path, blocks=40, rate=BLOCK_BYTES)) as stack:  # a block a second: it hardly begins
        new = [b"new" + each[3:] for each in HASHES]
        put(stack, new)
        with pytest.MonkeyPatch.context() as patch:
            assert stack._warm is not None
            patch.setattr(stack._warm._stopped, "wait", lambda _: False)
            stack._warm._fill([make_offload_key(each, 0) for each in HASHES])
        evicted = stack.counters()["cpu"]["evicted_blocks_total"]
        assert evicted == 0
        assert all(manager_of(stack).primary.index.get(make_offload_key(each, 0), -1) >= 0 for each in new)
        assert warmed(stack)["refused"] > 0


def test_a_stack_that_ends_early_lists_what_it_had_not_loaded(tmp_path: Path) -> None:
    with open_stack(config_of(tmp_path)) as stack:
        put(stack, HASHES)
    with open_stack(config_of(tmp_path, rate=1)) as stack:  # one part, then hours
        wait_until(lambda: warmed(stack).get("loaded", 0) > 0)
    with warm_stack(config_of(tmp_path)) as stack:
        assert in_memory(stack) == set(HASHES)


def test_a_reset_ends_it_and_no_older_block_comes(tmp_path: Path) -> None:
    with open_stack(config_of(tmp_path)) as stack:
        put(stack, HASHES)
    with open_stack(config_of(tmp_path, rate=1)) as stack:
        wait_until(lambda: warmed(stack).get("loaded", 0) > 0)
        stack.reset_cache()
        assert in_memory(stack) == set()
        assert stack.contains(HASHES) == 0
    with warm_stack(config_of(tmp_path)) as stack:
        assert in_memory(stack) == set()


def test_a_damaged_or_foreign_list_is_one_line_and_an_empty_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_stack(config_of(tmp_path)) as stack:
        put(stack, HASHES)
    data = (tmp_path / "list").read_bytes()
    for bad, said in ((data[:-1], "damaged"), (b"no list", "no list"), (data[:16] + bytes(16) + data[32:], "damaged")):
        (tmp_path / "list").write_bytes(bad)
        caplog.clear()
        with warm_stack(config_of(tmp_path)) as stack:
            assert in_memory(stack) == set()
        warnings = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
        assert len(warnings) == 1
        assert said in warnings[0]
        assert "memory begins empty" in warnings[0]


def test_blocks_that_no_tier_has_any_more_are_absent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with open_stack(config_of(tmp_path)) as stack:
        put(stack, HASHES)
    other = stack_of({"type": "memory", "capacity": "1MiB"}, blocks=64, warm=str(tmp_path / "list"))
    with warm_stack(other) as stack:
        assert warmed(stack) == {"absent": len(HASHES)}
        assert in_memory(stack) == set()
    assert "tiered-kv copy" in caplog.text


def test_a_list_that_cannot_be_written_costs_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(tmp_path, path=str(tmp_path / "none" / "list"))
    with open_stack(config) as stack:
        put(stack, HASHES)
    assert "cannot be written" in caplog.text
    assert not any(each.name.startswith("tiered-kv-warm") for each in threading.enumerate())


def test_the_source_goes_before_the_path(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_stack(config_of(tmp_path)) as stack:
        put(stack, HASHES)
    (tmp_path / "old.yaml").write_text(f"warm: {tmp_path / 'list'}\n")
    for source in (tmp_path / "list", tmp_path / "old.yaml"):
        with warm_stack(config_of(tmp_path, path=str(tmp_path / "new"), source=str(source))) as stack:
            assert in_memory(stack) == set(HASHES)
    with warm_stack(config_of(tmp_path, source=str(tmp_path / "gone"))):
        assert "there is no file" in caplog.text
    (tmp_path / "old.yaml").write_text("primary: {}\n")
    with warm_stack(config_of(tmp_path, source=str(tmp_path / "old.yaml"))):
        assert "expected the path of a list" in caplog.text


def test_small_blocks_come_at_a_rate_that_leaves_the_manager_its_thread() -> None:
    assert WarmSettings().rate_of(64 << 10) == 500 * (64 << 10)
    assert WarmSettings().rate_of(4 << 20) == 256 << 20
    assert WarmSettings(rate=1 << 30).rate_of(64 << 10) == 1 << 30
