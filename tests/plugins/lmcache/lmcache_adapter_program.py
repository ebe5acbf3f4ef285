"""Runs in an environment with LMCache: drives our adapter as its controllers do, over memory of its own.

    python lmcache_adapter_program.py DIRECTORY [CHECK...|namespaces]

Prints a line of JSON for each check: its name, and what went wrong or "". Or for each case of `namespaces.toml`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache_program_parts import (  # type: ignore[import-not-found]  # found beside this program when it runs
    ALIGN_BYTES,
    FULL,
    MEMORY_BYTES,
    ODD,
    WAIT_S,
    Entry,
    Shape,
    host,
    keys_of,
)
from program_checks import run_checks  # type: ignore[import-not-found]  # as well

from tests.support.host_server import serving
from tests.support.namespaces import all_cases
from tiered_kv.direct import DirectTiers
from tiered_kv.errors import ConfigError
from tiered_kv.testing.control import wait_until
from tiered_kv_lmcache import LMCACHE_VERSION, TieredKVL2Adapter, tier_set
from tiered_kv_lmcache.adapter import in_prefix_order, object_key, offload_key


class Checks:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = itertools.count()

    def _tier(self, tier_type: str = "nvme", **settings: object) -> Entry:
        path = {} if tier_type == "memory" else {"path": str(self._directory / f"{next(self._numbers)}")}
        return {"type": tier_type, "capacity": "64MiB", **path, **settings}

    def objects_come_back_whatever_their_size(self) -> None:
        for tier_type in ("nvme", "fs", "memory"):
            with host(self._tier(tier_type), sets=2) as rig:
                keys = [*keys_of(20), *keys_of(20, object_group_id=1)]
                sources = [*rig.objects(20, FULL), *rig.objects(20, ODD)]
                targets = [*rig.objects(20, FULL), *rig.objects(20, ODD)]
                result = rig.store(keys, sources)
                assert result.is_successful()
                assert result.bytes_transferred() == 20 * (8192 + 4096)
                assert all(rig.lookup(keys, {0: FULL, 1: ODD}))
                assert all(rig.load(keys, targets))
                for source, target in zip(sources, targets, strict=True):
                    assert torch.equal(source.raw_data, target.raw_data)

    def no_other_object_s_bytes_go_with_an_odd_one(self) -> None:
        with host(self._tier()) as rig:
            (source,) = rig.objects(1, ODD)
            (target,) = rig.objects(1, ODD)
            assert rig.store(keys_of(1), [source]).is_successful()
            assert rig.load(keys_of(1), [target]) == [True]
            room = rig.memory[target.meta.address : target.meta.address + target.meta.phy_size]
            assert not room[ODD.used_bytes :].any()

    def keys_go_there_and_back(self) -> None:
        fields = itertools.product((0, 0x02010201, 1 << 40), (0, 7), ("", "a user", "ü"))
        for rank, group, salt in fields:
            for chunk_hash in (b"", b"\0", bytes(range(32)), b"x" * 64):
                key = ObjectKey(chunk_hash, "m", rank, group, salt)
                assert object_key(offload_key(key), "m") == key

    def a_prefix_is_searched_with_all_ranks_of_a_chunk(self) -> None:
        ranks = [keys_of(3, kv_rank=rank) for rank in (1, 2)]
        asked = [*ranks[0], *ranks[1]]
        assert [asked[place] for place in in_prefix_order(asked)] == [
            key for chunk in zip(*ranks, strict=True) for key in chunk
        ]

    def what_was_stored_is_found_after_a_restart(self) -> None:
        tier, keys = self._tier(), keys_of(8, cache_salt="tenant")
        with host(tier) as rig:
            sources = rig.objects(8)
            assert rig.store(keys, sources).is_successful()
            contents = [source.raw_data.clone() for source in sources]
            assert rig.adapter.get_usage().bytes_by_cache_salt == {"tenant": 8 * 8192}
        with host(tier) as rig:
            targets = rig.objects(9)
            assert rig.lookup([*keys, *keys_of(1)]) == [True] * 8 + [False]
            assert rig.load([*keys, *keys_of(1)], targets) == [True] * 8 + [False]
            assert all(torch.equal(*pair) for pair in zip(contents, [each.raw_data for each in targets], strict=False))
            # LMCache learns of them now: they count against the salt's quota.
            assert rig.listener.stored == rig.listener.accessed == keys
            assert rig.adapter.get_usage().bytes_by_cache_salt == {"tenant": 8 * 8192}

    def servers_share_the_cache_of_a_host(self) -> None:
        stack: dict[str, object] = {"primary": {"capacity": "4MiB"}, "secondary": [self._tier()]}
        with serving(self._directory, stack, namespaces=2) as served:
            tier = {"type": "host", "socket": served.address}
            with host(tier, sets=2) as first, host(tier, sets=2) as second:
                keys = [*keys_of(8, cache_salt="tenant"), *keys_of(8, object_group_id=1)]
                sources = [*first.objects(8), *first.objects(8, ODD)]
                targets = [*second.objects(8), *second.objects(8, ODD)]
                assert second.lookup(keys, {0: FULL, 1: ODD}) == [False] * 16
                assert first.store(keys, sources).is_successful()
                assert second.lookup(keys, {0: FULL, 1: ODD}) == second.load(keys, targets) == [True] * 16
                for source, target in zip(sources, targets, strict=True):
                    assert torch.equal(source.raw_data, target.raw_data)

    def without_a_layout_the_open_tiers_of_the_model_are_asked(self) -> None:
        with host(self._tier(), sets=2) as rig:
            keys = [*keys_of(2), *keys_of(2, object_group_id=1)]
            assert rig.lookup(keys, {}) == [False] * 4
            assert rig.store(keys, [*rig.objects(2), *rig.objects(2, ODD)]).is_successful()
            assert rig.lookup([*keys, *keys_of(1, model_name="other")], {}) == [True] * 4 + [False]

    def what_a_tier_loses_is_told(self) -> None:
        with host(self._tier("memory", capacity=10 * 9000)) as rig:
            keys = keys_of(30, cache_salt="u", object_group_id=3)
            for key in keys:
                assert rig.store([key], rig.objects(1)).is_successful()
            wait_until(lambda: len(rig.listener.deleted) == 20)
            assert rig.listener.deleted == keys[:20]
            assert rig.lookup(keys, {3: FULL}) == [False] * 20 + [True] * 10
            assert rig.adapter.get_usage().total_bytes_used == 10 * 8192
            # Stored again, it is counted once.
            assert rig.store(keys[-1:], rig.objects(1)).is_successful()
            assert rig.adapter.get_usage().total_bytes_used == 10 * 8192

    def what_another_tier_has_is_not_lost(self) -> None:
        small = self._tier("memory", capacity=10 * 9000, name="small")
        with host(small, self._tier()) as rig:
            keys = keys_of(30)
            for key in keys:
                assert rig.store([key], rig.objects(1)).is_successful()
            assert all(rig.lookup(keys))
            assert rig.listener.deleted == []

    def an_object_outside_of_the_memory_is_not_stored(self) -> None:
        with host(self._tier()) as rig, host(self._tier()) as other:
            assert not rig.store(keys_of(1), other.objects(1)).is_successful()
            assert rig.load(keys_of(1), other.objects(1)) == [False]
            assert rig.store(keys_of(1), rig.objects(1)).is_successful()

    def a_capacity_is_kept_whatever_layouts_there_are(self) -> None:
        tier = self._tier()
        with host(tier) as rig:
            assert rig.store(keys_of(1), rig.objects(1)).is_successful()
            assert not rig.store(keys_of(1), rig.objects(1, ODD)).is_successful()
            half = [*keys_of(1, "half"), *keys_of(1, object_group_id=1)]
            assert not rig.store(half, [*rig.objects(1), *rig.objects(1, ODD)]).is_successful()
            assert rig.lookup(half[:1]) == [True]
            (error,) = [each["error"] for each in rig.adapter.report_status()["sets"] if "error" in each]
            assert "raise adapter_params.sets" in error
            assert rig.lookup(keys_of(1)) == [True]
            assert rig.adapter.report_status()["is_healthy"]
        with host(tier, sets=2) as rig:
            assert rig.lookup(keys_of(1)) == [True]
            assert rig.store(keys_of(1), rig.objects(1, ODD)).is_successful()
            shown = [each["counters"]["nvme"]["tier"] for each in rig.adapter.report_status()["sets"]]
            assert sum(each["capacity_bytes"] for each in shown) == 64 << 20

    def a_lookup_of_what_was_never_stored_takes_no_place_in_own_storage(self) -> None:
        for entry in (self._tier("memory"), self._tier("nvme")):
            with host(entry) as rig:
                for number in range(3):
                    assert rig.lookup(keys_of(1, model_name=f"stranger {number}")) == [False]
                assert rig.load(keys_of(1, model_name="stranger 0"), rig.objects(1)) == [False]
                assert not any("counters" in each for each in rig.adapter.report_status()["sets"])
                assert not Path(str(entry.get("path"))).exists()
                assert rig.store(keys_of(1), rig.objects(1)).is_successful()
                assert not rig.store(keys_of(1, model_name="stranger 0"), rig.objects(1)).is_successful()
                assert "raise adapter_params.sets" in rig.adapter.report_status()["sets"][0]["error"]

    def tiers_that_all_share_their_storage_divide_nothing(self) -> None:
        places = tier_set.SHARED_SETS_MAX
        with host(self._tier("fs")) as rig:
            for number in range(places - 2):
                assert rig.lookup(keys_of(1, model_name=f"stranger {number}")) == [False]
            for model in ("one", "two"):
                assert rig.store(keys_of(1, model_name=model), rig.objects(1)).is_successful()
            assert rig.lookup(keys_of(1, model_name="three")) == [False]
            shown = rig.adapter.report_status()["sets"]
            assert sum("counters" in each for each in shown) == places
            assert "raise adapter_params.sets" in shown[-1]["error"]

    def tiers_that_open_slowly_hold_no_task_up(self) -> None:
        gate = threading.Event()

        def opens_late(*arguments: Any, **options: Any) -> DirectTiers:
            gate.wait(WAIT_S)
            return DirectTiers(*arguments, **options)

        with (
            mock.patch.object(tier_set, "OPEN_S_MAX", 0.05),
            mock.patch.object(tier_set, "DirectTiers", opens_late),
            host(self._tier()) as rig,
        ):
            try:
                source, target = rig.objects(2)
                assert not rig.store(keys_of(1), [source]).is_successful()
                assert rig.lookup(keys_of(1)) == [False]
                assert rig.load(keys_of(1), [target]) == [False]
                (shown,) = rig.adapter.report_status()["sets"]
                assert "have not opened" in shown["error"]
            finally:
                gate.set()
            wait_until(lambda: "counters" in rig.adapter.report_status()["sets"][0])
            assert rig.lookup(keys_of(1)) == [False]  # what was given up is not stored later
            assert rig.store(keys_of(1), [source]).is_successful()

    def tiers_that_open_after_the_close_are_closed(self) -> None:
        gate, made, before = threading.Event(), list[DirectTiers](), threading.active_count()

        def opens_late(*arguments: Any, **options: Any) -> DirectTiers:
            gate.wait(WAIT_S)
            made.append(DirectTiers(*arguments, **options))
            return made[0]

        with (
            mock.patch.object(tier_set, "CLOSE_TIMEOUT_S", 0.05),
            mock.patch.object(tier_set, "DirectTiers", opens_late),
        ):
            with host(self._tier()) as rig:
                rig.adapter.submit_store_task(keys_of(1), rig.objects(1))
            gate.set()
            wait_until(lambda: bool(made) and threading.active_count() <= before)
        assert not made[0].counters()[""].get("tasks_total"), "a task used memory that LMCache has taken back"

    def lmcache_is_told_of_so_many_objects(self) -> None:
        with mock.patch.object(tier_set, "KNOWN_MAX", 4), host(self._tier("fs")) as rig:
            keys = keys_of(8)
            for key in keys[:4]:
                assert rig.store([key], rig.objects(1)).is_successful()
            assert rig.load(keys[:1], rig.objects(1)) == [True]
            assert rig.store(keys[4:6], rig.objects(2)).is_successful()
            assert rig.listener.deleted == keys[1:3], "those that were used longest ago"
            assert rig.adapter.get_usage().total_bytes_used == 4 * 8192
            # It finds the others as before, and counts them again.
            assert rig.load(keys[1:2], rig.objects(1)) == [True]
            assert rig.listener.deleted == keys[1:4]
            assert rig.adapter.get_usage().total_bytes_used == 4 * 8192

    def an_object_that_is_offered_twice_is_counted_once(self) -> None:
        with host(self._tier()) as rig:
            (source,) = rig.objects(1)
            assert rig.store(keys_of(1) * 2, [source] * 2).is_successful()
            assert rig.listener.stored == keys_of(1)
            assert rig.adapter.get_usage().total_bytes_used == 8192

    def a_tier_that_cannot_be_opened_costs_hits_and_is_tried_again(self) -> None:
        tier = self._tier()
        with mock.patch.object(tier_set, "RETRY_S", 0.0), host(tier) as first, host(tier) as second:
            assert first.store(keys_of(1), first.objects(1)).is_successful()
            assert not second.store(keys_of(1), second.objects(1)).is_successful()
            assert second.lookup(keys_of(1)) == [False]
            first.adapter.close()
            assert second.lookup(keys_of(1)) == [True]

    def without_a_thread_to_open_them_the_tiers_are_opened_later(self) -> None:
        with host(self._tier()) as rig:
            for name in ("Thread.start", "Timer.start"):
                refuses = mock.patch(f"threading.{name}", side_effect=RuntimeError("can't start new thread"))
                with mock.patch.object(tier_set, "RETRY_S", 0.0), refuses as start:
                    assert rig.lookup(keys_of(1)) == [False]
                start.assert_called()
            assert rig.store(keys_of(1), rig.objects(1)).is_successful()

    def an_error_has_no_text_of_a_client_library(self) -> None:
        with (
            mock.patch.object(tier_set, "DirectTiers", side_effect=RuntimeError("redis://:secret@host")),
            host(self._tier()) as rig,
        ):
            assert not rig.store(keys_of(1), rig.objects(1)).is_successful()
            assert rig.lookup(keys_of(1, model_name="m" * 1025)) == [False]
            errors = [each["error"] for each in rig.adapter.report_status()["sets"]]
            assert errors[0] == "RuntimeError"
            assert errors[1].startswith("adapter_params.namespace.model: ")

    def after_the_close_nothing_is_done(self) -> None:
        with host(self._tier()) as rig:
            assert rig.store(keys_of(1), rig.objects(1)).is_successful()
            rig.adapter.close()
            rig.adapter.submit_store_task(keys_of(1), rig.objects(1))
            rig.adapter.submit_lookup_and_lock_task(keys_of(1), {})
            rig.adapter.submit_store_task(keys_of(1, model_name="another"), rig.objects(1))
            assert [each["model"] for each in rig.adapter.report_status()["sets"]] == ["m"]
            assert rig.adapter.pop_completed_store_tasks() == {}
            assert not rig.adapter.report_status()["is_healthy"]

    def a_serde_and_an_eviction_are_refused(self) -> None:
        params = {"tiers": [self._tier()], "namespace": {"revision": "1"}}
        told = {
            "type": "plugin",
            "module_path": "tiered_kv_lmcache",
            "class_name": "TieredKVL2Adapter",
            "adapter_params": params,
        }
        memory = torch.empty(MEMORY_BYTES, dtype=torch.uint8)
        l1 = L1MemoryDesc(memory.data_ptr(), MEMORY_BYTES, ALIGN_BYTES)
        entries = (told, {**told, "serde": {"type": "fp8"}}, {**told, "eviction": {"eviction_policy": "LRU"}})
        plain, wrapped, evicting = parse_args_to_l2_adapters_config(
            argparse.Namespace(l2_adapter=[json.dumps(entry) for entry in entries])
        ).adapters
        create_l2_adapter(plain, l1).close()
        for config, begin, remedy in (
            (wrapped, "serde: found a serde of type 'fp8'", "codec"),
            (evicting, "eviction: LMCache would evict from the tiers", "capacity"),
        ):
            message = ""
            try:
                create_l2_adapter(config, l1)
            except ConfigError as error:
                message = str(error)
            assert message.startswith(begin), message
            assert remedy in message, message

    def a_keyword_of_a_newer_release_is_a_warning(self) -> None:
        params = {"tiers": [self._tier()], "namespace": {"revision": "1"}}
        memory = torch.empty(MEMORY_BYTES, dtype=torch.uint8)
        l1 = L1MemoryDesc(memory.data_ptr(), MEMORY_BYTES, ALIGN_BYTES)
        TieredKVL2Adapter(params, l1_memory_desc=l1, newer=1).close()

    def memory_that_is_not_there_is_refused(self) -> None:
        try:
            TieredKVL2Adapter({"tiers": [self._tier()], "namespace": {"revision": "1"}}, l1_memory_desc=None)
        except ConfigError:
            return
        raise AssertionError("it was opened")


BY_HAND: dict[str, Mapping[str, Any]] = {
    "data type": {"shape": Shape(dtype=torch.float16)},
    "shape": {"shape": Shape(((4, 2, 16, 32),))},
    "arrays": {"shape": Shape(((2, 4, 16, 16), (2, 4, 16, 16)))},
    "tokens": {"name": "another prompt"},
    "lmcache version": {"version": "0.5.7"},
}
"""What data does not say of a second adapter, by the name of a case in `namespaces.toml`."""


def print_namespaces(directory: Path) -> None:
    """Print for each case which blocks of a first adapter a second one finds in a shared directory."""
    tier = {"type": "fs", "path": str(directory / "shared"), "capacity": "64MiB"}
    with host(tier) as rig:
        assert rig.store(keys_of(4), rig.objects(4)).is_successful()
    for name, case in all_cases("lmcache", BY_HAND).items():
        more = BY_HAND.get(name, {})
        keys = keys_of(4, more.get("name", "prompt"), **case.get("place", {}))
        params = {"namespace": {"revision": "1", **case.get("namespace", {})}, **case.get("options", {})}
        with (
            mock.patch("lmcache.__version__", more.get("version", LMCACHE_VERSION)),
            host({**tier, **case.get("settings", {}).get("tier", {})}, **params) as rig,
        ):
            found = rig.lookup(keys, {keys[0].object_group_id: more.get("shape", FULL)})
        print(json.dumps({"engine": name, "found": found}), flush=True)


def main() -> None:
    directory, names = Path(sys.argv[1]), sys.argv[2:]
    if names == ["namespaces"]:
        print_namespaces(directory)
    else:
        run_checks(Checks(directory), names)


if __name__ == "__main__":
    main()
