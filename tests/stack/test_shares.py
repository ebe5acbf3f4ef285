"""Tenants' shares in a program's stack: named by each call, shown in the counters, and ignored without `limits`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import write_shown
from tiered_kv import ConfigError, Stack, open_stack
from tiered_kv.config.stack_config import load_config
from tiered_kv.cpu.policies import RequestChain
from tiered_kv.cpu.policies.recency import LRUPolicy
from tiered_kv.metrics.vocabulary import TENANTS
from tiered_kv.workload.request import Request
from tiered_kv.workload.simulation import simulate

BLOCK_BYTES = 4096


class Failing(LRUPolicy):
    """Breaks at its first eviction."""

    def evict(self, count: int, step: int, spare: RequestChain | None = None) -> list[int] | None:
        raise ZeroDivisionError


def opened(limits: dict[str, object] | None, **more: object) -> Stack:
    config: dict[str, object] = {
        "namespace": {"model": "m"},
        "block": {"bytes": BLOCK_BYTES},
        "primary": {"capacity": 100 * BLOCK_BYTES},
        **more,
    }
    return open_stack(config if limits is None else {**config, "limits": limits})


def keys_of(tenant: str, count: int, first: int = 0) -> list[bytes]:
    return [f"{tenant}-{number}".encode() for number in range(first, first + count)]


def put(stack: Stack, tenant: str, count: int, first: int = 0) -> None:
    hints = {"tenant": tenant} if tenant else None
    assert stack.put(keys_of(tenant, count, first), bytes(count * BLOCK_BYTES), hints=hints) == count


def test_a_program_names_a_tenant_whose_blocks_stay_beside_a_flood() -> None:
    with opened({"quiet": "20%", "default": "80%"}) as stack:
        put(stack, "quiet", 20)
        for first in range(0, 400, 20):
            put(stack, "", 20, first)
        assert stack.contains(keys_of("quiet", 20)) == 20
        counted = stack.counters()["cpu"]
        assert counted["tenant_used_bytes"] == {"quiet": 20 * BLOCK_BYTES, "default": 80 * BLOCK_BYTES}
        assert counted["tenant_share_bytes"] == {"quiet": 20 * BLOCK_BYTES, "default": 80 * BLOCK_BYTES}
        assert counted["tenant_evicted_blocks_total"] == {"quiet": 0, "default": 320}
        assert counted["evicted_blocks_total"] == 320
        assert counted["hinted_requests_total"] == 0


def test_one_long_call_stores_as_much_as_it_may_and_counts_only_what_stays() -> None:
    with opened({"quiet": "20%", "default": "80%"}) as stack:
        put(stack, "quiet", 20)
        keys = keys_of("long", 100)
        stored = stack.put(keys, bytes(100 * BLOCK_BYTES), timeout=0)
        assert stack.contains(keys) == stored > 0
        assert stack.contains(keys_of("quiet", 20)) == 20


def test_without_limits_a_tenant_changes_nothing() -> None:
    with opened(None) as stack:
        put(stack, "quiet", 20)
        put(stack, "flooding", 100)
        assert stack.contains(keys_of("quiet", 20)) == 0
        assert not TENANTS.keys() & stack.counters()["cpu"].keys()


def test_hints_that_are_off_leave_the_tenant_and_an_invalid_tenant_is_ignored_and_counted() -> None:
    with opened({"quiet": "20%"}, hints=[]) as stack:
        put(stack, "quiet", 5)
        assert stack.counters()["cpu"]["tenant_used_bytes"]["quiet"] == 5 * BLOCK_BYTES
        put(stack, "two words", 1)
        counted = stack.counters()["cpu"]
        assert counted["tenant_used_bytes"] == {"quiet": 5 * BLOCK_BYTES, "default": BLOCK_BYTES}
        assert counted["refused_hints_total"] == 1


def test_a_third_party_policy_that_fails_below_the_shares_is_replaced() -> None:
    with opened({"a": "50%"}, primary={"capacity": "1MiB", "policy": f"{__name__}:Failing"}) as stack:
        put(stack, "a", 256)
        put(stack, "b", 128)
        assert stack.contains(keys_of("a", 128)) == stack.contains(keys_of("b", 128)) == 128


def test_a_policy_that_does_not_exist_is_named_as_without_limits() -> None:
    with pytest.raises(ConfigError, match="cannot be made"):
        opened({"a": "50%"}, primary={"capacity": "1MiB", "policy": f"{__name__}:Nonesuch"})


def test_simulations_follow_the_limits() -> None:
    requests = []
    for turn in range(10):
        requests.append(Request(turn, 320, 16, tuple(range(20)), hints={"tenant": "quiet"}))
        requests += [
            Request(turn, 640, 16, tuple(range(first, first + 40)))
            for first in range(1000 * turn + 100, 1000 * turn + 300, 40)
        ]
    config = {"namespace": {"model": "m"}, "block": {"bytes": 4096}, "primary": {"capacity": 100 * 4096}}
    limits = {"quiet": "20%", "default": "80%"}
    assert simulate(load_config(config), requests).tiers["cpu"].hits < 90
    assert simulate(load_config({**config, "limits": limits}), requests).tiers["cpu"].hits == 9 * 20


def test_the_page_s_files_work(tmp_path: Path) -> None:
    assert write_shown("how-to/fair-shares.md", tmp_path) == ["stack.yaml", "tenants.py"]
    command = [sys.executable, "tenants.py"]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout == "{'default': 0, 'team-a': 65536, 'team-b': 0}\n"
