"""Runs in an environment with vLLM: our spec makes a manager and workers, and they get the calls of vLLM's connector.

    python vllm_spec_program.py DIRECTORY

The scheduler and two workers are three specs in one process, with KV caches in CPU memory. What goes from the scheduler
to the workers is a copy, as it is in vLLM. Prints one line of JSON for each check: its name, and an error or nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import sys
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    Medium,
    OffloadingManager,
    TierFilter,
    TierMatcher,
    make_offload_key,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm_program_parts import (  # type: ignore[import-not-found]  # found beside this program when it runs
    OUR_SPEC,
    Scheduler,
    all_stats,
    canonical,
    config_with,
    keys_of,
    refusal_of,
    run_checks,
    small_engine,
    wait_for,
)

from tests.engines.program_checks import ChecksIn
from tests.support.host_server import serving
from tiered_kv.config.hooks import TierType, hookimpl, tier_plugins
from tiered_kv.errors import ConfigError, TieredKVError
from tiered_kv.mediums import CPULoadStoreSpec
from tiered_kv.metrics.metric import Metric
from tiered_kv.metrics.own import OwnStats
from tiered_kv.metrics.series import Snapshot, TierSeries
from tiered_kv.stack.exporters.metrics import StackCollector
from tiered_kv_memory.settings import MemorySettings
from tiered_kv_memory.tier import MemoryTier
from tiered_kv_vllm.connector import TieredKVConnector
from tiered_kv_vllm.metrics import CounterReport
from tiered_kv_vllm.spec import TieredKVOffloadingSpec, stack_config
from tiered_kv_vllm.tier import TieredKVTier

WORKERS = 2
LAYERS = 2
PAGE_BYTES = 8 << 10
PRIMARY_BLOCKS = 16
DEVICE_BLOCKS = 64


def config_of(stack: object, rank: int = 0, *, engine_id: str, replica: int = 0, enable_events: bool = False) -> Any:
    config = config_with({**OUR_SPEC, "stack": stack}, enable_events=enable_events)
    parallel = dataclasses.replace(
        config.parallel, rank=rank, world_size=WORKERS, tp_size=WORKERS, data_parallel_index=replica
    )
    return dataclasses.replace(
        config, parallel=parallel, worker_kv_bytes_per_block=LAYERS * PAGE_BYTES, engine_id=engine_id
    )


def stage_of(config: Any, rank: int, layers: Sequence[int]) -> Any:
    """Return the configuration of a process that knows the layers of one pipeline stage."""
    first = sum(layers[:rank])
    names = tuple(f"layer.{number}" for number in range(first, first + layers[rank]))
    return dataclasses.replace(
        config,
        parallel=dataclasses.replace(
            config.parallel, rank=rank, world_size=len(layers), tp_size=1, pp_size=len(layers)
        ),
        worker_kv_bytes_per_block=layers[rank] * PAGE_BYTES,
        groups=(dataclasses.replace(config.groups[0], layer_names=names),),
    )


def samples_of(registry: CollectorRegistry) -> dict[tuple[Any, ...], float]:
    """Return the values in a registry by name and labels, without the times at which metrics were made."""
    return {
        (
            sample.name,
            *sorted((name, label if name != "le" else float(label)) for name, label in sample.labels.items()),
        ): (sample.value)
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


SEEN = Metric("seen_blocks_total", "Blocks that were seen.", ("kind",))


class CountedTier(MemoryTier):
    """A memory tier that counts something of its own."""

    def stats(self) -> Mapping[str, Any]:
        return {**super().stats(), "seen_blocks_total": {"new": 3}}


class Engine(Scheduler):  # type: ignore[misc]  # found beside this program when it runs
    """A scheduler and two workers, or one for each pipeline stage; each device block holds random bytes."""

    def __init__(
        self, stack: object, *, enable_events: bool = False, stages: Sequence[int] = (), attach: str = ""
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"engine_id": f"test-{uuid.uuid4().hex}", "enable_events": enable_events}
        ranks = [0, *range(len(stages) or WORKERS)]
        configs = [config_of(stack, rank, **options) for rank in ranks]
        if stages:
            configs = [stage_of(config, rank, stages) for config, rank in zip(configs, ranks, strict=True)]
        if attach:
            extra = {**OUR_SPEC, "attach": attach}
            configs = [dataclasses.replace(config, extra_config=extra) for config in configs]
        self.specs = [OffloadingSpecFactory.create_spec(config) for config in configs]
        self.caches = [
            [torch.randint(-128, 128, (DEVICE_BLOCKS, PAGE_BYTES), dtype=torch.int8) for _ in range(layers)]
            for layers in stages or [LAYERS] * WORKERS
        ]
        # As in vLLM: the workers come first, and at the same time.
        with ThreadPoolExecutor(len(self.caches)) as pool:
            self.workers = list(
                pool.map(
                    lambda spec, layers: spec.get_worker(canonical([layers], PAGE_BYTES)), self.specs[1:], self.caches
                )
            )
        self.spec = self.specs[0]
        self.manager = self.spec.get_manager()

    def transfer(self, verb: str, source: object, destination: object) -> None:
        job = next(self.numbers)
        for worker in self.workers:
            getattr(worker, verb)(job, *deepcopy((source, destination)))
        for worker in self.workers:
            worker.wait({job})
            (result,) = wait_for(worker.get_finished)
            assert result.success
            assert result.job_id == job

    def store(self, keys: Sequence[bytes], first: int) -> None:
        """A request whose blocks lie on the device from `first` on."""
        context = self.begin(keys)
        output = wait_for(lambda: self.prepare_store(keys, context))
        blocks = [first + keys.index(key) for key in output.keys_to_store]
        if blocks:
            self.transfer("submit_store", GPULoadStoreSpec(blocks, [len(blocks)], [0]), output.store_spec)
            self.manager.complete_store(set(output.keys_to_store), context)
        self.finish(context)

    def load(self, keys: Sequence[bytes], first: int) -> int:
        """A request that loads what it can of `keys` to the device's blocks from `first` on; returns how many."""
        context = self.begin(keys)
        hits: int = self.find(keys, context)
        if hits:
            source = self.manager.prepare_load(list(keys[:hits]), context)
            blocks = list(range(first, first + hits))
            self.transfer("submit_load", source, GPULoadStoreSpec(blocks, [hits], [0]))
            self.manager.complete_load(set(keys[:hits]), context)
        self.finish(context)
        return hits

    def is_busy(self) -> bool:
        return any(values.get("jobs_in_flight") for values in self.manager.counters().values())

    def blocks(self, first: int, count: int) -> list[torch.Tensor]:
        return [layer[first : first + count].clone() for layers in self.caches for layer in layers]

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.manager.shutdown()


def engine_with(stack: object, **options: Any) -> contextlib.closing[Engine]:
    return contextlib.closing(Engine(stack, **options))


class Checks(ChecksIn):
    def _stack(self, name: str, **more: object) -> dict[str, Any]:
        row_bytes = WORKERS * LAYERS * PAGE_BYTES
        budgets = {"store_budget": PRIMARY_BLOCKS * row_bytes, "load_budget": PRIMARY_BLOCKS * row_bytes}
        nvme = {"type": "nvme", "path": str(self.directory / name), "capacity": "64MiB", **budgets}
        return {"primary": {"capacity": PRIMARY_BLOCKS * row_bytes}, "secondary": [nvme], **more}

    def store_evict_restart_load(self) -> None:
        stack = self._stack("restart")
        keys = keys_of("first", 8)
        with engine_with(stack) as engine:
            engine.store(keys, 0)
            expected = engine.blocks(0, 8)
            engine.settle()
            for number in range(3):
                engine.store(keys_of(f"other-{number}", 8), 8)
                engine.settle()
            assert engine.load(keys, 40) == 8
            assert all(map(torch.equal, engine.blocks(40, 8), expected))
            assert engine.manager.counters()["nvme"]["loaded_blocks_total"] == 8
        with engine_with(stack) as engine:
            assert engine.load(keys, 16) == 8
            assert all(map(torch.equal, engine.blocks(16, 8), expected))

    def pipeline_stages_of_unequal_layers_read_back_their_own_bytes(self) -> None:
        digests, keys = set(), keys_of("stages", 4)
        for stages in ((4, 1, 3), (4, 3, 1)):  # what the scheduler sees of them is the same
            # A multiple of the rows that each stage would compute by itself, so that the sizes of the regions agree.
            stack = {"primary": {"capacity": 1 << 20}}
            with engine_with(stack, stages=stages) as engine:
                engine.store(keys, 0)
                expected = engine.blocks(0, 4)
                for layer in itertools.chain(*engine.caches):
                    layer.zero_()
                assert engine.load(keys, 20) == 4
                assert all(map(torch.equal, engine.blocks(20, 4), expected))
                known = {
                    (each._shared.config.block.bytes, each._shared.config.identity.digest) for each in engine.specs
                }
            ((row_bytes, digest),) = known
            assert row_bytes == len(stages) * max(stages) * PAGE_BYTES, "room for the largest stage, in every process"
            digests.add(digest)
        assert len(digests) == 2, "no other cut of the model has the same namespace"

    def pipeline_stages_find_in_a_host_s_cache_what_they_stored_before_a_restart(self) -> None:
        keys, stages, expected = keys_of("stages", 4), (3, 1), list[torch.Tensor]()
        with serving(self.directory, {"primary": {"capacity": 2 << 20}, "prefill": "off"}, namespaces=2) as served:
            for hits in (0, 4):
                with engine_with(None, stages=stages, attach=served.address) as engine:
                    wait_for(lambda: engine.step() or engine.manager.counters()["host"]["connection_state"])
                    assert engine.load(keys, 20) == hits
                    if not hits:
                        engine.store(keys, 0)
                        expected = engine.blocks(0, 4)
            assert all(map(torch.equal, engine.blocks(20, 4), expected))
            with engine_with(None, stages=stages[::-1], attach=served.address) as engine:
                wait_for(lambda: engine.step() or engine.manager.counters()["host"]["connection_state"])
                assert engine.load(keys, 20) == 0, "no other cut of the model has the same namespace"

    def a_reset_forgets_all_and_keeps_rows_until_the_workers_let_go(self) -> None:
        keys = keys_of("reset", 4)
        with engine_with(self._stack("reset")) as engine:
            engine.store(keys, 0)
            engine.settle()
            context = engine.begin(keys_of("writing", 4))
            output = engine.prepare_store(keys_of("writing", 4), context)
            reading = engine.begin(keys)
            engine.find(keys, reading)
            rows = {
                *output.store_spec.block_ids.tolist(),
                *engine.manager.prepare_load(keys, reading).block_ids.tolist(),
            }
            engine.manager.reset_cache()
            assert engine.load(keys, 0) == 0, "a reset reaches every tier"
            others = engine.begin([])
            while (given := engine.manager.prepare_store([keys_of(f"fill-{len(rows)}", 1)[0]], others)) is not None:
                rows |= set(given.store_spec.block_ids.tolist())
            assert len(rows) == PRIMARY_BLOCKS, "no row was given away twice"
            for _ in range(16):
                engine.step()
            if hasattr(OffloadingManager, "on_reset_flushed"):
                early = engine.manager.prepare_store(keys_of("early", 8), others)
                assert early is None, "the workers' rows were given away before vLLM said that they let go"
                engine.manager.on_reset_flushed()
            again = engine.manager.prepare_store(keys_of("again", 8), others)
            assert again is not None, "the workers' rows were not given back"
            for ended in (context, reading, others):
                engine.finish(ended)

    def tails_of_all_groups_go_before_heads(self) -> None:
        with engine_with({"primary": {"capacity": PRIMARY_BLOCKS * WORKERS * LAYERS * PAGE_BYTES}}) as engine:
            ends = range(1, PRIMARY_BLOCKS // 2 + 1)
            keys = {(end, group): make_offload_key(b"%d" % end, group) for group in range(2) for end in ends}
            context = engine.begin([])
            for (end, _), key in keys.items():
                context.set_offload_key_position(key, 16 * end)
            assert engine.prepare_store(list(keys.values()), context) is not None
            engine.manager.complete_store(set(keys.values()), context)
            engine.finish(context)
            output = engine.prepare_store(keys_of("other", 6), engine.begin(keys_of("other", 6)))
            assert set(output.evicted_keys) == {key for (end, _), key in keys.items() if end > ends[-1] - 3}

    def a_request_that_wants_no_storage_gets_none(self) -> None:
        keys = keys_of("filter", 4)
        with engine_with(self._stack("filter")) as engine:
            engine.store(keys, 0)
            engine.settle()
        with engine_with(self._stack("filter")) as engine:
            context = engine.begin(keys, load_tier_filter=TierFilter((TierMatcher(medium=Medium.CPU),)))
            assert engine.find(keys, context) == 0
            engine.finish(context)
            context = engine.begin(keys)
            assert engine.find(keys, context) == 4
            assert engine.manager.get_load_source(keys[0], context) is CacheHitSource.DISK
            engine.finish(context)

    def a_router_s_hints_come_in_vllm_s_envelope(self) -> None:
        keys = keys_of("envelope", 4)
        with engine_with(self._stack("envelope")) as engine:
            for name, payload in (("tiered_kv.hints", {"skip": "store"}), ("kv.fetch", {"block_hashes": [1]})):
                action = {"action_id": "a", "action_type": name, "action_version": "1.0", "payload": payload}
                options = {"kv_transfer_params": {"kv_hint": {"actions": [action]}}}  # as Dynamo sends them
                with contextlib.suppress(ImportError):  # 0.32
                    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

                    options = {"kv_hints": KvHintsEnvelope("0.1", "m", [KvHintAction(**action)])}
                context = engine.begin(keys, **options)
                output = engine.prepare_store(keys, context)
                assert len(output.keys_to_store) == (0 if name == "tiered_kv.hints" else 4)
                engine.finish(context)
            counted = engine.manager.counters()["cpu"]
            assert (counted["hinted_requests_total"], counted["ignored_hint_actions_total"]) == (1, 1)

    def a_copy_that_fails_ends_the_engine_and_nothing_is_stored(self) -> None:
        stack, keys = self._stack("failing"), keys_of("failing", 4)
        with engine_with(stack) as engine:
            context = engine.begin(keys)
            output = engine.prepare_store(keys, context)
            device = GPULoadStoreSpec([0, 1, 2, 3], [4], [0])
            with mock.patch("tiered_kv.worker.cpu.copy_runs", side_effect=OSError("no copy")):
                for job, worker in enumerate(engine.workers):
                    worker.submit_store(job, device, output.store_spec)
                    worker.wait({job})
            for worker in engine.workers:
                message = refusal_of(worker.get_finished, TieredKVError)
                assert "from GPU to CPU" in message, message
            # vLLM's worker raises this as well, so its scheduler hears of no job that has ended.
        with engine_with(stack) as engine:
            assert engine.load(keys, 0) == 0

    def the_rest_of_vllm_s_summary_is_in_the_namespace(self) -> None:
        config = config_of(self._stack("namespace"), engine_id="e")
        parallel, cache = config.parallel, config.cache
        others = [  # what no engine of vllm_namespace_program.py has
            dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="fp8_e4m3")),
            dataclasses.replace(config, worker_kv_bytes_per_block=2 * config.worker_kv_bytes_per_block),
            dataclasses.replace(config, cache=dataclasses.replace(cache, blocks_per_chunk=2)),
            dataclasses.replace(config, cache=dataclasses.replace(cache, tokens_per_hash=8)),
            dataclasses.replace(config, parallel=dataclasses.replace(parallel, tp_size=1, pp_size=2)),
        ]
        digests = [stack_config(each).identity.digest for each in (config, *others)]
        assert len(set(digests)) == len(digests), digests
        replica = dataclasses.replace(config, parallel=dataclasses.replace(parallel, data_parallel_index=1))
        assert stack_config(replica).identity.digest == digests[0], "replicas share their blocks"

    def a_store_that_does_not_fill_its_rows_is_refused(self) -> None:
        config = config_of(self._stack("partial"), engine_id=f"test-{uuid.uuid4().hex}")
        parallel = dataclasses.replace(config.parallel, world_size=1, tp_size=1)
        config = dataclasses.replace(
            config, parallel=parallel, cache=dataclasses.replace(config.cache, blocks_per_chunk=2)
        )
        spec = OffloadingSpecFactory.create_spec(config)
        layers = [torch.zeros(DEVICE_BLOCKS, PAGE_BYTES, dtype=torch.int8) for _ in range(LAYERS)]
        worker, manager = spec.get_worker(canonical([layers], PAGE_BYTES)), spec.get_manager()
        try:
            # As vLLM's connector does where a window has passed the first block of a chunk.
            device, row = GPULoadStoreSpec([5], [1], [1]), CPULoadStoreSpec([0])
            message = refusal_of(lambda: worker.submit_store(1, device, row), ValueError)
            assert "expected a store of whole offloaded blocks" in message, message
        finally:
            worker.shutdown()
            manager.shutdown()

    def pipeline_stages_are_refused_below_vllm_s_tiering(self) -> None:
        config = config_of(self._stack("stages"), engine_id="e")
        extra = {**config.extra_config, "spec_name": "TieredKVTieringSpec", "cpu_bytes_to_use": 1 << 20}
        parallel = dataclasses.replace(config.parallel, tp_size=1, pp_size=2)
        config = dataclasses.replace(config, extra_config=extra, parallel=parallel)
        message = refusal_of(functools.partial(OffloadingSpecFactory.create_spec, config), ConfigError)
        assert "use TieredKVOffloadingSpec" in message, message
        view = memoryview(bytearray(4096)).cast("b", (1, 4096))
        tier = {"type": "memory", "capacity": "1MiB"}
        offloading_spec = SimpleNamespace(config=config)
        message = refusal_of(lambda: TieredKVTier(offloading_spec, view, "TieredKVTier", tier=tier), ConfigError)
        assert "use TieredKVOffloadingSpec" in message, message

    def metrics_tell_every_tier(self) -> None:
        with engine_with(self._stack("metrics")) as engine:
            engine.store(keys_of("metrics", 4), 0)
            engine.settle()
            stats = all_stats(engine.manager.get_stats).data
            values = stats["data"]["tiered_kv_stored_blocks_total"]
            assert values == {("cpu",): 4, ("nvme",): 4}
            self._is_what_a_stack_shows(engine, stats)
            engine.store(keys_of("more", 2), 8)
            engine.settle()
            changed = all_stats(engine.manager.get_stats).data["data"]
            assert changed["tiered_kv_stored_blocks_total"] == {("cpu",): 2, ("nvme",): 2}, "what it has grown by"
            assert ("nvme",) not in changed.get("tiered_kv_store_budget_bytes", {}), "this has not changed"
            (info,) = engine.manager.config_info()
            assert tuple(info) == type(engine.spec).config_info_keys({})

    def what_a_third_party_tier_declares_is_a_metric(self) -> None:
        class Plugin:
            @hookimpl
            def tiered_kv_register_tiers(self) -> list[TierType]:
                return [TierType("counted", MemorySettings, lambda: CountedTier, metrics=(SEEN,))]

        tier_plugins().register(Plugin(), "counted")
        with engine_with({**self._stack("counted"), "secondary": [{"type": "counted", "capacity": "1MiB"}]}) as engine:
            engine.store(keys_of("counted", 4), 0)
            engine.settle()
            stats = all_stats(engine.manager.get_stats).data
            assert stats["data"]["tiered_kv_tier_seen_blocks_total"] == {("counted", "new"): 3}
            definitions = type(engine.spec).build_metric_definitions(engine.spec.extra_config)
            assert stats["data"].keys() <= definitions.keys()
            assert definitions["tiered_kv_tier_seen_blocks_total"].documentation == SEEN.help
            self._is_what_a_stack_shows(engine, stats)
        tier_plugins().unregister("counted")

    def a_tier_s_numbers_may_have_any_form(self) -> None:
        report, numbers = CounterReport(set()), {"loads": 1, "sizes": torch.zeros(3)}
        for loads in (1, 2):
            numbers = {**numbers, "loads": loads}
            snapshot = Snapshot({"odd": TierSeries({}, OwnStats(numbers, {}))})
            assert wait_for(lambda: report.take(lambda: snapshot)), "a comparison of its sizes raises"  # noqa: B023
            while report.take(Snapshot) is not None:
                pass

    def _is_what_a_stack_shows(self, engine: Engine, stats: Any) -> None:
        """Let vLLM show what two engines sent, and compare it with the exposition of the stack."""
        transfer = SimpleNamespace(kv_connector_extra_config=engine.spec.extra_config)
        kinds = {kind: kind for kind in (Gauge, Counter, Histogram)}
        labels = {number: ["m", str(number)] for number in range(2)}
        for _ in range(2):  # another engine of the process declares them anew
            unregister_vllm_metrics()  # as vLLM does
            arguments = (SimpleNamespace(kv_transfer_config=transfer), kinds, ["model_name", "engine"], labels)
            shown = TieredKVConnector.build_prom_metrics(*arguments)
        for number in labels:
            shown.observe(stats, number)
        ours = CollectorRegistry()
        ours.register(StackCollector(engine.manager.counters, labels={"model_name": "m", "engine": "1"}))
        found, expected = samples_of(REGISTRY), samples_of(ours)
        assert len(expected) > 100
        for identity, value in expected.items():
            shown_value = found.get(identity, 0.0)  # a histogram without values is not there
            # A sample, and what nvme does in the background between the two looks.
            if not any(part in identity[0] for part in ("step_seconds", "tier_used_bytes", "segments")):
                assert math.isclose(shown_value, value, rel_tol=1e-6, abs_tol=1e-9), (identity, value, shown_value)
        assert {dict(labels).get("engine") for name, *labels in found if name.startswith("tiered_kv_")} == {"0", "1"}

    def a_file_says_what_vllm_does_not_know(self) -> None:
        path = self.directory / "stack.yaml"
        kv = self.directory / "replica-${TIERED_KV_REPLICA}"
        text = f"""
            namespace: {{model: meta-llama/Llama-3.1-8B, revision: main, tenant: a}}
            primary: {{capacity: 1MiB}}
            secondary: [{{type: nvme, path: "{kv}", capacity: 64MiB}}]
        """
        path.write_text(text)
        spec = OffloadingSpecFactory.create_spec(config_of(str(path), engine_id="e", replica=3))
        config = spec._shared.config
        assert config.secondary[0].path.endswith("replica-3")
        assert config.namespace.model == "meta-llama/Llama-3.1-8B"
        assert config.namespace.dtype == "bfloat16"
        assert config.block.bytes == WORKERS * LAYERS * PAGE_BYTES
        path.write_text(text.replace("tenant: a", "dtype: float16"))
        assert "namespace.dtype: unknown key" in self._refusal_of(str(path))
        path.write_text(text.replace("primary:", "block: {bytes: 4KiB}\n            primary:"))
        assert "vLLM sets the size of a block" in self._refusal_of(str(path))
        path.write_text(text.replace("capacity: 64MiB", "capacty: 64MiB"))
        assert "capacty" in self._refusal_of(str(path))
        assert str(path) in self._refusal_of(str(path))
        assert "expected the path" in self._refusal_of(None)

    def an_option_without_effect_is_refused(self) -> None:
        stack = self._stack("options")
        for name, instead in {
            "cpu_bytes_to_use": "--kv-offloading-size",
            "eviction_policy": "policy",
            "cache_policy_module_path": "module:Class",
            "secondary_tiers": "secondary",
            "store_threshold": "admit_after",
            "max_tracker_size": "admit_after",
            "backpressure": "store_budget",
            "tier_poll_interval_s": "leave it out",
        }.items():
            message = self._refusal_of(stack, **{name: 1})
            assert message.startswith(f"kv_connector_extra_config.{name}: "), message
            assert instead in message, message
        assert "did you mean 'blocks_per_chunk'?" in self._refusal_of(stack, block_per_chunk=2)
        for options in ({"offload_prompt_only": False}, {"self_describing_kv_events": True}, {"blocks_per_chunk": 1}):
            OffloadingSpecFactory.create_spec(self._config(stack, **options))
        view = memoryview(bytearray(4096)).cast("b", (1, 4096))
        tier = {"type": "memory", "capacity": "1MiB"}
        written = SimpleNamespace(config=SimpleNamespace(extra_config={"secondary_tiers": [{"root_dir": "/x"}]}))
        attempt = functools.partial(TieredKVTier, written, view, "TieredKVTier", tier=tier, root_dir="/x")
        assert "secondary_tiers.root_dir: unknown option of TieredKVTier" in refusal_of(attempt, ConfigError)

    def keywords_of_a_newer_release_are_warnings(self) -> None:
        stack = {"primary": {"capacity": "1MiB"}}
        view = memoryview(bytearray(4096)).cast("b", (1, 4096))
        nothing = SimpleNamespace(config=SimpleNamespace(extra_config={}))
        with mock.patch("tiered_kv.engines.keywords._log.warning") as warning:
            TieredKVOffloadingSpec(self._config(stack), newer=1)
            with contextlib.suppress(AttributeError):  # of the configuration, which this check leaves out
                TieredKVTier(nothing, view, "TieredKVTier", tier={"type": "memory", "capacity": "1MiB"}, newer=1)
        told = [call.args[1:3] for call in warning.call_args_list]
        assert told == [("TieredKVOffloadingSpec", "newer"), ("TieredKVTier", "newer")], told

    def _config(self, stack: object, **options: object) -> Any:
        config = config_of(stack, engine_id="e")
        return dataclasses.replace(config, extra_config={**config.extra_config, **options})

    def _refusal_of(self, stack: object, **options: object) -> str:
        attempt = functools.partial(OffloadingSpecFactory.create_spec, self._config(stack, **options))
        return str(refusal_of(attempt, ConfigError))


def main() -> None:
    torch.manual_seed(0)
    run_checks(Checks(Path(sys.argv[1])), sys.argv[2:])


if __name__ == "__main__":
    with small_engine(Path(sys.argv[1])):
        main()
