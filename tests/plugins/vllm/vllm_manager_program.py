"""Runs in an environment with vLLM: vLLM's own tiering manager above our tiers gets the calls of vLLM's scheduler.

    python vllm_manager_program.py DIRECTORY

Each check opens vLLM's `TieringOffloadingSpec`, so that its factories construct our tier, and drives the manager as
vLLM's connector does. Prints one line of JSON for each check: its name, and an error or nothing. A test reads them.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from vllm.v1.kv_offload.base import Medium
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm_program_parts import (  # type: ignore[import-not-found]  # found beside this program when it runs
    CHUNK_BYTES,
    OUR_TIER,
    WAIT_S,
    Scheduler,
    all_stats,
    config_with,
    damage,
    keys_of,
    run_checks,
    small_engine,
    wait_for,
)

import tiered_kv_vllm.tier as tier_module
from tests.engines.program_checks import ChecksIn
from tests.support.faulty import FourMethodTier
from tiered_kv.metrics.counters import count_of

PRIMARY_CHUNKS = 16
WHOLE_PRIMARY = {"store_budget": PRIMARY_CHUNKS * CHUNK_BYTES, "load_budget": PRIMARY_CHUNKS * CHUNK_BYTES}

Entry = Mapping[str, object]


class GatedTier(FourMethodTier):
    """A tier whose calls block: loads and lookups wait until a gate opens."""

    loads = threading.Event()
    lookups = threading.Event()

    def submit_load(self, job_metadata: Any) -> None:
        self.loads.wait(WAIT_S)
        super().submit_load(job_metadata)

    def lookup(self, key: Any, req_context: Any) -> bool | None:
        self.lookups.wait(WAIT_S)
        return super().lookup(key, req_context)


class HoldingTier(FourMethodTier):
    """A tier that answers at once, and reports nothing while it is told to hold it back."""

    is_nonblocking = True
    holds = False

    def get_finished(self) -> Any:
        return () if self.holds else super().get_finished()


class Engine(Scheduler):  # type: ignore[misc]  # found beside this program when it runs
    """The part of vLLM's scheduler and worker that calls the manager; blocks are told apart by their key."""

    def __init__(self, entries: Sequence[Entry], *, model: str = "m", enable_events: bool = False) -> None:
        super().__init__()
        tiers = [{**OUR_TIER, "tier": entry} for entry in entries]
        extra = {"cpu_bytes_to_use": PRIMARY_CHUNKS * CHUNK_BYTES, "secondary_tiers": tiers}
        self.spec = TieringOffloadingSpec(config_with(extra, model, enable_events))
        self.manager = self.spec.get_manager()
        self.region = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self.tiers = self.manager.secondary_tiers

    def store(self, keys: Sequence[bytes], **said: object) -> None:
        """A request that computes and stores all of `keys`, with hints."""
        context = self.begin(keys, kv_transfer_params={"tiered_kv": said})
        output = wait_for(lambda: self.prepare_store(keys, context))
        for key, row in zip(output.keys_to_store, output.store_spec.block_ids.tolist(), strict=True):
            self.region[row] = content_of(key)
        if output.keys_to_store:
            self.manager.complete_store(set(output.keys_to_store), context)
        self.finish(context)

    def fill(self, name: str, requests: int, blocks: int) -> None:
        """Serve requests of other blocks, which take the place of earlier ones in the primary tier."""
        for number in range(requests):
            self.store(keys_of(f"{name}-{number}", blocks))
            self.settle()

    def load(self, keys: Sequence[bytes], **said: object) -> int:
        """A request that loads what it can of `keys`; returns how many, after it has compared their bytes."""
        context = self.begin(keys, kv_transfer_params={"tiered_kv": said})
        hits: int = self.find(keys, context)
        if hits:
            rows = self.manager.prepare_load(list(keys[:hits]), context).block_ids.tolist()
            for key, row in zip(keys, rows, strict=False):
                assert np.array_equal(self.region[row], content_of(key)), f"wrong bytes in {key.hex()}"
            self.manager.complete_load(set(keys[:hits]), context)
        self.finish(context)
        return hits

    def counted(self, index: int = 0) -> dict[str, Any]:
        (counters,) = self.tiers[index].counters().values()
        return dict(counters)

    def close(self) -> None:
        self.region = np.empty(0, dtype=np.uint8)
        self.manager.shutdown()


def content_of(key: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    seed = int.from_bytes(hashlib.sha256(key).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, int(CHUNK_BYTES), dtype=np.uint8)


def engine_on(entries: Sequence[Entry], **options: Any) -> contextlib.closing[Engine]:
    return contextlib.closing(Engine(entries, **options))


class Checks(ChecksIn):
    def _nvme(self, name: str, **more: object) -> Entry:
        entry = {"type": "nvme", "path": str(self.directory / name), "capacity": "64MiB"}
        return {**entry, **WHOLE_PRIMARY, **more}

    def store_cascade_evict_promote(self) -> None:
        batches = [keys_of(f"batch-{number}", 8) for number in range(8)]
        with engine_on([self._nvme("cascade")]) as engine:
            for batch in batches:
                engine.store(batch)
                engine.settle()
            assert engine.counted()["stored_blocks_total"] == 64
            assert [engine.load(batch) for batch in batches[:6]] == [8] * 6
            assert engine.counted()["loaded_blocks_total"] >= 32
            assert engine.load(keys_of("unknown", 4)) == 0
        with engine_on([self._nvme("cascade", load_budget=4 * CHUNK_BYTES)]) as engine:
            assert [engine.load(batch) for batch in batches] == [4] * 8, (
                "a request brings up no more than the load budget"
            )

    def a_prefix_that_the_primary_tier_cannot_hold(self) -> None:
        keys = keys_of("long", 64)
        with engine_on([self._nvme("long")]) as engine:
            for first in range(0, 64, 8):
                engine.store(keys[first : first + 8])
                engine.settle()
            assert 0 < engine.load(keys) <= PRIMARY_CHUNKS

    def empty_jobs_end_and_chunks_outside_of_the_memory_are_refused(self) -> None:
        keys, entry = keys_of("outside", 2), self._nvme("outside")
        with engine_on([entry]) as engine:
            engine.store(keys)
            engine.settle()
            (tier,) = engine.manager.secondary_tiers
            context = engine.begin(keys)
            for chunks in ([], [0, PRIMARY_CHUNKS], [-1, 0]):
                for is_load, submit in ((True, tier.submit_load), (False, tier.submit_store)):
                    rows = np.array(chunks, dtype=np.int64)
                    submit(TransferJob(10**6, keys[: len(chunks)], rows, is_load, context))
                    (result,) = wait_for(lambda: list(tier.get_finished_jobs()))
                    assert result.success is not bool(chunks), (chunks, is_load)
            engine.finish(context)
        with engine_on([entry]) as engine:
            assert engine.load(keys) == 2

    def partial_failure(self) -> None:
        keys = keys_of("partial", 8)
        with engine_on([self._nvme("partial")]) as engine:
            engine.store(keys)
            engine.settle()
            engine.fill("others", 3, 8)
            damage(self.directory / "partial", content_of(keys[5]).tobytes())
            assert engine.load(keys) == 5, engine.counted()
            assert count_of(engine.counted(), "tier", "corrupt_blocks_total") == 1
            assert engine.load(keys) == 5, "what was loaded before the damage stays"

    def reset_cache(self) -> None:
        keys = keys_of("reset", 4)
        with engine_on([self._nvme("reset")]) as engine:
            for number in range(4):
                engine.store(keys_of(f"reset-{number}", 4))
            engine.store(keys)
            context = engine.begin(keys_of("reset-0", 4))
            engine.lookup(keys_of("reset-0", 4), context)
            engine.step()  # promotions and cascades are in flight
            engine.manager.reset_cache()
            assert not engine.manager.has_pending_work()
            if hasattr(engine.manager, "on_reset_flushed"):
                assert engine.load(keys) == 0, "vLLM promotes nothing until its workers have let go"
                engine.manager.on_reset_flushed()
            assert engine.load(keys) == 4, "vLLM keeps its secondary tiers"
            engine.finish(context)

    def drain_jobs_waits_for_a_tier_that_blocks(self) -> None:
        keys = keys_of("drain", 4)
        GatedTier.lookups.set()
        with engine_on([{"type": f"{__name__}:GatedTier"}]) as engine:
            engine.store(keys)
            engine.fill("drain", 5, 4)
            context = engine.begin(keys)
            while engine.lookup(keys, context) is None and not engine.manager._jobs:
                engine.step()
            timer = threading.Timer(0.2, GatedTier.loads.set)
            began_s = time.monotonic()
            timer.start()
            engine.manager.reset_cache()
            assert time.monotonic() - began_s > 0.15
            timer.join()
            engine.finish(context)

    def a_lookup_that_is_never_answered_is_a_miss(self) -> None:
        GatedTier.lookups.clear()
        with engine_on([{"type": f"{__name__}:GatedTier", "lookup_timeout": "100ms"}]) as engine:
            began_s = time.monotonic()
            assert engine.load(keys_of("never", 8)) == 0
            assert 0.09 < time.monotonic() - began_s < 5
            GatedTier.lookups.set()

    def waiting_for_room_ends_for_good(self) -> None:
        keys = keys_of("room", 4)
        entry = {"type": f"{__name__}:HoldingTier", "load_budget": 2 * CHUNK_BYTES}
        with engine_on([entry]) as engine, mock.patch.object(tier_module, "ROOM_WAIT_S", 0.05):
            engine.store(keys)
            engine.settle()
            engine.fill("room", 5, 4)
            hoarder, late = engine.begin(keys[:2]), engine.begin(keys[2:])
            HoldingTier.holds = True
            assert engine.lookup(keys[:2], hoarder) is None
            engine.step()
            assert engine.lookup(keys[2:], late) is None
            assert engine.find(keys[2:], late) == 0
            assert engine.lookup(keys[2:], late) == 0, "it does not begin to wait again"
            HoldingTier.holds = False
            engine.finish(hoarder)
            engine.finish(late)

    def a_key_may_stand_twice_in_a_job(self) -> None:
        keys = keys_of("twice", 2)
        entries = [
            self._nvme(f"twice-{number}", **more) for number, more in enumerate(({}, {"write_budget": "1GiB/day"}))
        ]
        with engine_on(entries) as engine:
            for tier in engine.tiers:
                for number, is_load in enumerate((False, True)):
                    named, rows = [*keys, keys[0]], np.arange(3) + 3 * is_load
                    for key, row in zip(named, rows, strict=True):
                        engine.region[row] = 0 if is_load else content_of(key)
                    context = engine.begin(keys)
                    job = TransferJob(10**6 + number, named, rows, is_load, context)
                    (tier.submit_load if is_load else tier.submit_store)(job)
                    (result,) = wait_for(lambda tier=tier: list(tier.get_finished_jobs()))
                    assert result.success, result
                    engine.finish(context)
                for key, row in zip(named, rows, strict=True):
                    assert np.array_equal(engine.region[row], content_of(key))

    def what_a_request_skips(self) -> None:
        kept, skipped = keys_of("kept", 4), keys_of("skipped", 4)
        with engine_on([self._nvme("skip")]) as engine:
            engine.store(kept)
            engine.store(skipped, skip="store")
            engine.settle()
            assert count_of(engine.counted(), "skipped_blocks_total", "by_request") == 4
            engine.fill("skip", 3, 8)
            assert engine.load(kept, skip="load") == 0
            assert engine.counted()["loaded_blocks_total"] == 0
            assert (engine.load(kept), engine.load(skipped)) == (4, 0)

    def events_and_metrics(self) -> None:
        keys = keys_of("events", 4)
        with engine_on([{"type": "memory", "capacity": "1MiB"}], enable_events=True) as engine:
            engine.store(keys)
            engine.settle()
            events = [event for event in engine.manager.take_events() if event.medium is Medium.STORAGE]
            assert {key for event in events for key in event.keys} == set(keys)
            stats = all_stats(engine.tiers[0].get_stats)
            values = stats.data["data"]
            assert values["tiered_kv_stored_blocks_total"] == {("memory",): 4}
            assert values.keys() <= engine.spec.build_metric_definitions(engine.spec.extra_config).keys()
            assert not stats.is_empty()
            if hasattr(engine.manager, "config_info"):
                assert engine.manager.config_info()[1]["tiered_kv_type"] == "memory"

    def shutdown_gives_everything_back(self) -> None:
        engine = Engine([self._nvme("shutdown")])
        path = Path(engine.manager.primary_tier._mmap_region.mmap_path)
        assert path.exists()
        for number in range(4):
            engine.store(keys_of(f"shutdown-{number}", 4))
        engine.close()
        assert not path.exists()
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("tiered-kv-nvme")]
        assert left == [], left
        with engine_on([self._nvme("shutdown")]) as again:  # the directory's lock is free
            assert again.load(keys_of("shutdown-0", 4)) == 4


def main() -> None:
    sys.modules.setdefault(__name__, sys.modules["__main__"])
    run_checks(Checks(Path(sys.argv[1])), sys.argv[2:])


if __name__ == "__main__":
    with small_engine(Path(sys.argv[1])):
        main()
