"""Runs in an environment with vLLM: what our connector does for requests before they are scheduled.

    python vllm_queue_program.py DIRECTORY

The connector is the scheduler's, of a small model; the test is the scheduler. Prints one line of JSON for each check:
its name, and an error or nothing.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_program_parts import (  # type: ignore[import-not-found]  # found beside this program when it runs
    OUR_SPEC,
    canonical,
    described_model,
    run_checks,
    stand_in_for_a_device,
    vllm_config_of,
    wait_for,
)

from tests.engines.program_checks import ChecksIn
from tiered_kv.base import ReqContext, make_offload_key

stand_in_for_a_device()

import torch  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config  # noqa: E402
from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402

from tiered_kv.system.step import STEP  # noqa: E402
from tiered_kv_vllm import TieredKVConnector  # noqa: E402 - which asks for the device
from tiered_kv_vllm.engine import configured  # noqa: E402

TOKENS = 32
SHAPE = {"block_size": TOKENS, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)


class Queue:
    """A scheduler's connector, and the requests that wait before it. It is also the GPU's pool of blocks."""

    num_gpu_blocks = 8

    def __init__(self, directory: Path, specs: Sequence[Any], **stack: object) -> None:
        nvme = {"type": "nvme", "path": str(directory / "kv"), "capacity": "64MiB"}
        extra = {**OUR_SPEC, "stack": {"primary": {"capacity": "4MiB"}, "secondary": [nvme], **stack}}
        config = vllm_config_of(described_model(directory), extra, load_format="dummy", block_size=TOKENS)
        groups = [KVCacheGroupSpec([f"layer.{at}"], spec) for at, spec in enumerate(specs)]
        layers = [torch.zeros((self.num_gpu_blocks, FULL.page_size_bytes), dtype=torch.int8) for _ in specs]
        cache = KVCacheConfig(num_blocks=self.num_gpu_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.connector = TieredKVConnector(config, KVConnectorRole.SCHEDULER, cache)
        with configured(config, cache):
            spec = OffloadingSpecFactory.create_spec(build_offloading_config(config, cache))
        caches = canonical([[layer] for layer in layers], FULL.page_size_bytes)
        self.worker = spec.get_worker(caches)  # without which nothing is promoted
        self.on_gpu: set[bytes] = set()
        self.free_gpu_blocks = self.num_gpu_blocks - 1  # all but the null block
        self.connector._kv_cache_manager = SimpleNamespace(
            block_pool=self,
            coordinator=SimpleNamespace(single_type_managers=[SimpleNamespace(block_pool=self)]),
            enable_caching=True,
        )
        self.stack = self.connector.connector_scheduler.manager._stack

    def get_num_free_blocks(self) -> int:
        return self.free_gpu_blocks

    def get_cached_block(self, block_hash: bytes, _: object) -> list[int] | None:
        return [0] if block_hash in self.on_gpu else None

    def come(self, name: str, hashes: Sequence[bytes], **more: object) -> Any:
        request = Request(name, [1] * (TOKENS * len(hashes)), SamplingParams(max_tokens=1), None)
        request.block_hashes = list(hashes)
        for each, value in more.items():
            setattr(request, each, value)
        self.connector.on_new_request(request)
        return request

    def step(self, *aborted: Any, tokens: int = 0, scheduled: dict[str, int] | None = None) -> None:
        output = SchedulerOutput.make_empty()
        for request in aborted:
            request.status = RequestStatus.FINISHED_ABORTED
        output.finished_req_ids = {request.request_id for request in aborted}
        output.num_scheduled_tokens = scheduled or {"running": tokens}
        self.connector.build_connector_meta(output)
        self.connector.get_kv_connector_stats()

    def settled(self) -> bool:
        self.step()
        return not self.stack.manager.jobs_in_flight

    def store(self, keys: Sequence[bytes]) -> None:
        """Store blocks without a worker, and let them reach the disk."""
        context = ReqContext("store")
        output = self.stack.manager.prepare_store(keys, context)
        self.stack.manager.complete_store(output.keys_to_store, context)
        self.stack.manager.on_request_finished(context)
        wait_for(self.settled)

    def ready(self, keys: Sequence[bytes]) -> list[bool]:
        blocks = self.stack.primary.blocks
        return [key in blocks and blocks[key].ref_cnt >= 0 for key in keys]


@contextmanager
def queue_of(directory: Path, specs: Sequence[Any] = (FULL,), **stack: object) -> Iterator[Queue]:
    queue = Queue(directory, specs, **stack)
    try:
        yield queue
    finally:
        queue.worker.shutdown()
        queue.connector.shutdown()


@contextmanager
def restarted_queue_of(directory: Path, stored: Sequence[bytes], specs: Sequence[Any] = (FULL,)) -> Iterator[Queue]:
    """Yield a queue whose tier has some blocks, and whose primary tier has none."""
    with queue_of(directory, specs) as queue:
        queue.store(stored)
    with queue_of(directory, specs) as queue:
        yield queue


def hashes_of(name: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{name}-{index}".encode()).digest() for index in range(count)]


class Checks(ChecksIn):
    def what_a_request_lacks_is_promoted_while_it_waits(self) -> None:
        hashes = hashes_of("waits", 6)
        keys = [make_offload_key(each, 0) for each in hashes]
        with restarted_queue_of(self.directory / "waits", keys[:5]) as queue:
            queue.on_gpu = set(hashes[:2])
            request = queue.come("a", hashes)
            queue.step()
            wait_for(queue.settled)
            assert queue.ready(keys) == [False, False, True, True, True, False]
            assert min(queue.stack.primary.blocks[key].ref_cnt for key in keys[2:5]) == 1, "held for it"
            queue.step(request)
            assert max(queue.stack.primary.blocks[key].ref_cnt for key in keys[2:5]) == 0, "it was aborted"

    def a_request_that_is_scheduled_asks_for_itself(self) -> None:
        hashes = hashes_of("asks", 4)
        keys = [make_offload_key(each, 0) for each in hashes]
        with restarted_queue_of(self.directory / "asks", keys) as queue:
            request = queue.come("a", hashes)
            assert queue.connector.get_num_new_matched_tokens(request, 2 * TOKENS) == (None, False)
            queue.step()
            wait_for(queue.settled)
            assert queue.ready(keys) == [False, False, True, True], "and not for what the GPU has"
            assert queue.connector.get_num_new_matched_tokens(request, 2 * TOKENS) == (2 * TOKENS, True)

    def a_request_that_asks_is_told_what_it_got_and_others_get_vllm_s_answer(self) -> None:
        hashes = hashes_of("told", 5)
        keys = [make_offload_key(each, 0) for each in hashes]
        with restarted_queue_of(self.directory / "told", keys[:4]) as queue:
            asked = {"tiered_kv_report": True, "do_remote_decode": False}
            request = queue.come("a", hashes, kv_transfer_params=dict(asked))
            assert queue.connector.get_num_new_matched_tokens(request, 0) == (None, False)
            queue.step()
            wait_for(queue.settled)
            assert queue.connector.get_num_new_matched_tokens(request, 0) == (4 * TOKENS, True)
            manager, context = queue.connector.connector_scheduler.manager, ReqContext("a")
            manager.prepare_load(keys[:4], context)
            manager.complete_load(set(keys[:4]), context)
            request.status = RequestStatus.FINISHED_STOPPED
            delayed, answer = queue.connector.request_finished_all_groups(request, ([],))
            assert delayed is False
            assert answer is not None
            report = answer["tiered_kv_report"]
            assert 0 < report.pop("waited_seconds") < 60
            assert report == {"blocks": {"nvme": 4}, "tokens": {"nvme": 4 * TOKENS}, "computed_tokens": TOKENS}
            assert queue.connector.request_finished(request, []) == (False, None), "a second connector repeats it not"
            for params in (None, {"do_remote_decode": True}, {"tiered_kv_report": "yes"}):
                other = queue.come("b", hashes, kv_transfer_params=params)
                other.status = RequestStatus.FINISHED_STOPPED
                assert queue.connector.request_finished(other, []) == (False, None), params

    def requests_that_choose_their_tiers_or_want_none_are_left_alone(self) -> None:
        hashes = hashes_of("chooses", 4)
        keys = [make_offload_key(each, 0) for each in hashes]
        with restarted_queue_of(self.directory / "chooses", keys) as queue:
            queue.come("a", hashes, kv_transfer_params={"kv_load_tiers": [{"medium": "CPU"}]})
            queue.come("b", hashes, skip_reading_prefix_cache=True)
            queue.step()
            wait_for(queue.settled)
            assert queue.ready(keys) == [False] * 4

    def a_reset_that_vllm_s_own_cache_did_not_follow_keeps_requests_out(self) -> None:
        hashes = hashes_of("kept", 4)
        keys = [make_offload_key(each, 0) for each in hashes]
        with queue_of(self.directory / "kept") as queue:
            queue.come("running", hashes)
            queue.free_gpu_blocks = 5
            queue.connector.reset_cache()
            queue.come("later", hashes)
            assert queue.stack.manager.prepare_store(keys, ReqContext("later")).keys_to_store == []
            queue.step()  # in which workers are told to flush
            queue.free_gpu_blocks = 7
            queue.connector.reset_cache()
            queue.come("last", hashes)
            for name, stored in (("running", []), ("later", []), ("last", keys)):
                assert queue.stack.manager.prepare_store(keys, ReqContext(name)).keys_to_store == stored

    def groups_with_full_attention_are_promoted_together(self) -> None:
        hashes = hashes_of("groups", 3)
        specs = (FULL, SlidingWindowSpec(**SHAPE, sliding_window=TOKENS), FULL)
        keys = [make_offload_key(each, group) for each in hashes for group in range(3)]
        with restarted_queue_of(self.directory / "groups", keys[:8], specs) as queue:
            queue.come("a", hashes)
            queue.step()
            wait_for(queue.settled)
            assert queue.ready(keys) == [True, False, True] * 2 + [True, False, False]

    def a_window_is_loaded_whole(self) -> None:
        hashes = hashes_of("window", 14)
        keys = [make_offload_key(each, 0) for each in hashes]
        window = (SlidingWindowSpec(**SHAPE, sliding_window=12 * TOKENS),)
        with restarted_queue_of(self.directory / "window", keys, window) as queue:
            request = queue.come("a", hashes)
            assert queue.connector.get_num_new_matched_tokens(request, 0) == (None, False)
            wait_for(queue.settled)
            found, _ = queue.connector.get_num_new_matched_tokens(request, 0)
            assert found == 14 * TOKENS - 1, "all of them, but one token is always computed"
            assert queue.ready(keys) == [False] * 2 + [True] * 12

    def a_load_that_ended_during_a_step_is_found_before_the_end_of_the_next(self) -> None:
        hashes = hashes_of("during", 4)
        with restarted_queue_of(self.directory / "during", [make_offload_key(each, 0) for each in hashes]) as queue:
            request = queue.come("a", hashes)
            assert queue.connector.get_num_new_matched_tokens(request, 0) == (None, False)
            queue.step()
            assert queue.stack.manager.jobs_in_flight == 1
            (tier,) = queue.stack.secondary_tiers
            wait_for(lambda: tier._job_results)
            assert queue.connector.get_num_new_matched_tokens(request, 0) == (4 * TOKENS, True)

    def a_request_that_waits_is_looked_up_again_once_something_has_changed(self) -> None:
        hashes = hashes_of("again", 4)
        keys = [make_offload_key(each, 0) for each in hashes]
        with restarted_queue_of(self.directory / "again", keys) as queue:
            request, manager = queue.come("a", hashes), queue.stack.manager
            looked_up: list[bytes] = []
            lookup = manager.lookup

            def noted(key: bytes, context: Any) -> Any:
                looked_up.append(key)
                return lookup(key, context)

            manager.lookup = noted
            for _ in range(3):
                assert queue.connector.get_num_new_matched_tokens(request, 0) == (None, False)
            assert len(looked_up) == len(keys)
            wait_for(queue.settled)
            assert queue.connector.get_num_new_matched_tokens(request, 0) == (4 * TOKENS, True)
            assert len(looked_up) == 2 * len(keys)

    def a_request_that_waits_for_an_answer_is_looked_up_in_each_step(self) -> None:
        hashes = hashes_of("answer", 4)
        keys = [make_offload_key(each, 0) for each in hashes]
        with restarted_queue_of(self.directory / "answer", keys) as queue:
            (tier,) = queue.stack.secondary_tiers
            lookup, late = tier.lookup, {keys[3]}
            tier.lookup = lambda key, context: None if key in late else lookup(key, context)
            request = queue.come("a", hashes)
            for promoting in (3, 4):
                assert queue.connector.get_num_new_matched_tokens(request, 0) == (None, False)
                assert queue.stack.manager.promoting(ReqContext("a")) == promoting
                late.clear()

    def stores_that_are_prepared_at_the_end_of_a_step_do_not_mark_the_next(self) -> None:
        with queue_of(self.directory) as queue:
            manager: Any = queue.connector._tiered_kv
            keys = [make_offload_key(each, 0) for each in hashes_of("late", 2)]
            end = manager.on_schedule_end

            def end_and_prepare(context: Any) -> None:  # in the order of vLLM's scheduler
                end(context)
                output = manager.prepare_store(keys, ReqContext("late"))
                assert output is not None
                assert output.keys_to_store == keys
                assert STEP.pauses_left > 0

            manager.on_schedule_end = end_and_prepare
            queue.step()
            assert STEP.pauses_left == 0
            manager.complete_store(keys, ReqContext("late"))

    def steps_tell_what_computing_costs(self) -> None:
        with queue_of(self.directory / "measured") as queue:
            cost = queue.stack.manager.cost
            queue.step(tokens=16)
            assert cost.block_s == 0, "only the loads from which a tier's times are learned are worth their wait"
            queue.step(tokens=4096)
            assert 0 < cost.block_s < 1, "of one step, which took no time"
            assert cost.backlog_s == 0
            tokens = [self._computes(queue, name, 4) for name in "ab"]
            assert cost.backlog_s == sum(tokens) / TOKENS * cost.block_s
            queue.step(scheduled={"a": tokens[0], "b": TOKENS})
            assert cost.backlog_s == (tokens[1] - TOKENS) / TOKENS * cost.block_s, "b has a step to go"
            assert cost.stalled == 1, "the other one"
        with queue_of(self.directory / "written", prefill={"tokens_per_s": 1000}) as queue:
            tokens = [self._computes(queue, name, 4) for name in "ab"]
            queue.step(scheduled={"a": tokens[0], "b": TOKENS})
            assert queue.stack.manager.cost.backlog_s == (tokens[1] - TOKENS) / 1000, "as if it were measured"
            queue.step(scheduled={"b": tokens[1] - TOKENS})
            assert queue.stack.manager.cost.backlog_s == 0, "although both still generate"
        with queue_of(self.directory / "again", prefill={"tokens_per_s": 1000}) as queue:
            request, backlogs = queue.come("a", hashes_of("a", 4)), []
            manager = queue.stack.manager
            lookup = manager.lookup

            def lookup_beside(*arguments: Any) -> Any:
                backlogs.append(manager.cost.backlog_s)
                return lookup(*arguments)

            manager.lookup = lookup_beside
            for _ in range(2):  # it got no blocks of the GPU
                queue.connector.get_num_new_matched_tokens(request, 0)
            assert backlogs == [0, 0], "a request does not wait for itself"
            assert manager.cost.backlog_s == 4 * TOKENS / 1000
        with queue_of(self.directory / "off", prefill="off") as queue:
            queue.step(tokens=4096)
            assert queue.stack.manager.cost.block_s == float("inf")

    @staticmethod
    def _computes(queue: Queue, name: str, blocks: int) -> int:
        """Have a request come that no tier has blocks of; return how many tokens it computes."""
        request = queue.come(name, hashes_of(name, blocks))
        assert queue.connector.get_num_new_matched_tokens(request, 0) == (0, False)
        return blocks * TOKENS


def main() -> None:
    run_checks(Checks(Path(sys.argv[1])), sys.argv[2:])


if __name__ == "__main__":
    main()
