"""vLLM's offloading connector, which also passes on the engine's configuration, its requests and its steps.

vLLM calls it in the scheduler's process and in each worker's, on the engine's thread. vLLM's own connector gives an
offloading spec a summary without rotary embedding, revision, attention settings and adapters. It gives a manager the
keys of a request when the request is scheduled. This connector gives them when the request comes, so promotions run
while the request waits. The calls that vLLM makes of its own connector stay as they are.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import KV_LOAD_TIERS_KEY
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from tiered_kv.base import OffloadKey, make_offload_key
from tiered_kv.engines.keywords import known_to_base
from tiered_kv_vllm.engine import configured
from tiered_kv_vllm.groups import check_kinds
from tiered_kv_vllm.manager import TieredKVManager
from tiered_kv_vllm.metrics import forget_metrics

REPORT_KEY = "tiered_kv_report"
"""The key in `kv_transfer_params` by which a request asks what it got, and the key of the answer."""

_SPEC = {"spec_name": "TieredKVOffloadingSpec", "spec_module_path": "tiered_kv_vllm"}

_log = logging.getLogger(__name__)


class TieredKVConnector(OffloadingConnector):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Chosen by `"kv_connector": "TieredKVConnector", "kv_connector_module_path": "tiered_kv_vllm"`.

    It has the settings of vLLM's `OffloadingConnector` and of `TieredKVOffloadingSpec`. It uses that spec if the
    settings name no spec, but have `stack` or `attach`. Its specs and tiers can read the engine's configuration while
    they are made.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any, **unknown: object) -> None:
        _imply_spec(vllm_config)
        passed_on = known_to_base(TieredKVConnector, unknown)
        with configured(vllm_config, kv_cache_config):
            check_kinds()
            super().__init__(vllm_config, role, kv_cache_config, **passed_on)
        scheduler = self.connector_scheduler
        manager = None if scheduler is None else scheduler.manager
        self._tiered_kv: TieredKVManager | None = manager if isinstance(manager, TieredKVManager) else None
        self._gpu_is_outdated = False  # vLLM's own prefix cache has blocks from before the last reset

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        if self._tiered_kv is None:
            return
        chooses_tiers = KV_LOAD_TIERS_KEY in (request.kv_transfer_params or ())
        if self._gpu_is_outdated:
            self._tiered_kv.outdate(request.request_id)
            return
        self._tiered_kv.ask_known(request.request_id, partial(self._known_of, request, is_whole=chooses_tiers))
        if not chooses_tiers and not request.skip_reading_prefix_cache:
            self._tiered_kv.expect(request.request_id, self._prefix_of(request))

    def reset_cache(self) -> bool | None:
        """Forget every block in every tier; vLLM has reset its own prefix cache before, unless requests use it."""
        answer: bool | None = super().reset_cache()
        if self._tiered_kv is not None:
            pools = {each.block_pool for each in self._kv_cache_manager.coordinator.single_type_managers}
            in_use = sum(pool.num_gpu_blocks - pool.get_num_free_blocks() - 1 for pool in pools)  # but the null block
            self._gpu_is_outdated = self._kv_cache_manager.enable_caching and in_use > 0
            if self._gpu_is_outdated:
                _log.error(
                    "vLLM kept its own prefix cache at a reset, because requests use %d blocks of it. New requests may "
                    "take old blocks from there, so the tiers store and load nothing until another reset succeeds: "
                    "reset with reset_running_requests, or while no request runs",
                    in_use,
                )
        return answer

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        ours, name = self._tiered_kv, request.request_id
        if ours is not None:
            groups = self.connector_scheduler.config.kv_group_configs
            is_whole = len(groups) > 1 or groups[0].sliding_window_size_in_chunks is not None
            if not ours.was_scheduled(name, request.num_tokens, num_computed_tokens, is_whole=is_whole):
                return None, False
        answer: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if ours is not None:
            found = answer[0]
            if found and self.connector_scheduler.config.supports_partial_tail and ours.is_waited_for(name):
                # All whole blocks are ready. The blocks of a tail with its own key are not: vLLM would compute it.
                found, answer = None, (None, False)
            left = None if found is None else request.num_tokens - num_computed_tokens - found
            ours.was_looked_up(name, left)
        return answer

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._reported(request, super().request_finished(request, block_ids))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._reported(request, super().request_finished_all_groups(request, block_ids))

    def _reported(self, request: Any, answer: tuple[bool, dict[str, Any] | None]) -> tuple[bool, dict[str, Any] | None]:
        """Add to vLLM's answer what a request got, if the request asks for it.

        Only then: in a disaggregated setup these parameters go on to another engine. A question is taken out, since
        vLLM's `MultiConnector` raises if two connectors answer it.
        """
        asked, is_delayed, params = request.kv_transfer_params, *answer
        if self._tiered_kv is None or not isinstance(asked, dict) or asked.pop(REPORT_KEY, None) is not True:
            return answer
        return is_delayed, {**(params or {}), REPORT_KEY: self._tiered_kv.report_of(request.request_id)}

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        if self._tiered_kv is not None:
            self._tiered_kv.step_began(scheduler_output)
        return meta

    def _prefix_of(self, request: Any) -> Iterator[OffloadKey]:
        """Return the keys of a request's prefix that the GPU does not have, in order and lazily.

        Only groups with full attention count: which blocks of a window are needed depends on the prefix that is found.
        """
        hashes, groups = request.block_hashes, list(self._ends_of(request))
        if len(groups) == 1:  # hot path: a call for each key takes three times as long
            number, ends, first = groups[0]
            suffix = make_offload_key(b"", number)
            return cast("Iterator[OffloadKey]", (hashes[end - 1] + suffix for end in ends[first:]))
        lacking = [zip(ends[first:], itertools.repeat(number)) for number, ends, first in groups]
        return (make_offload_key(hashes[end - 1], number) for end, number in heapq.merge(*lacking))

    def _known_of(self, request: Any, *, is_whole: bool) -> list[OffloadKey]:
        """Return the keys of the prefix of a request that the GPU has, or all keys if `is_whole`."""
        hashes = request.block_hashes
        return [
            make_offload_key(hashes[end - 1], number)
            for number, ends, first in self._ends_of(request)
            for end in (ends if is_whole else ends[:first])
        ]

    def _ends_of(self, request: Any) -> Iterator[tuple[int, range, int]]:
        """Yield each group with full attention, the ends of a request's chunks, and how many chunks the GPU has."""
        hashes = request.block_hashes
        for group in self.connector_scheduler.config.kv_group_configs:
            if group.sliding_window_size_in_chunks is None:
                each, number = group.hashes_per_chunk, group.group_idx
                ends = range(each, len(hashes) + 1, each)
                yield number, ends, bisect_left(ends, True, key=partial(self._gpu_lacks, hashes, number))

    def _gpu_lacks(self, hashes: Sequence[bytes], group: int, end: int) -> bool:
        return not self._kv_cache_manager.block_pool.get_cached_block(hashes[end - 1], [group])

    @classmethod
    def build_prom_metrics(cls, *arguments: Any, **named: Any) -> Any:
        """Declare the metrics of vLLM's connector and ours. Before another engine, vLLM unregisters only its own."""
        forget_metrics()
        _imply_spec(arguments[0] if arguments else named["vllm_config"])
        return super().build_prom_metrics(*arguments, **named)


def _imply_spec(vllm_config: Any) -> None:
    """Add our spec's name to settings with `stack` or `attach`: vLLM's factory looks for it there in each process."""
    settings = vllm_config.kv_transfer_config.kv_connector_extra_config
    if "spec_name" not in settings and not settings.keys().isdisjoint(("stack", "attach")):
        settings.update(_SPEC)
