"""Runs in an environment with vLLM: vLLM's own classes read our events, by our publisher and by vLLM's.

    python vllm_events_program.py DIRECTORY

Prints one line of JSON for each check: its name, and an error or nothing.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import zmq
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
    OffloadingEventGroupSpec,
    OffloadingEventsTracker,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_offload.base import Medium, OffloadingKVEventsConfig, get_offload_block_hash
from vllm_program_parts import (  # type: ignore[import-not-found]  # found beside this program when it runs
    keys_of,
    refusal_of,
    run_checks,
    small_engine,
    wait_for,
)
from vllm_spec_program import (  # type: ignore[import-not-found]  # the same
    LAYERS,
    PAGE_BYTES,
    PRIMARY_BLOCKS,
    WORKERS,
    config_of,
    engine_with,
)

from tests.engines.program_checks import ChecksIn
from tests.support.stacks import block_hashes, manager_of
from tiered_kv.errors import ConfigError
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv_vllm.spec import stack_config

ROW_BYTES = WORKERS * LAYERS * PAGE_BYTES
BLOCK_BYTES = 4096
WAIT_MS = 20_000
Held = dict[tuple[str, str | None], Counter[Any]]
"""The hashes that a router would know, by medium and ownership, with the tiers that have them."""


class Reader:
    """Subscribes as vLLM's users do, and decodes with vLLM's types."""

    def __init__(self, publish: str, replay: str) -> None:
        self._context = zmq.Context()
        self._decode = msgspec.msgpack.Decoder(type=KVEventBatch).decode
        self._live = self._context.socket(zmq.SUB)
        self._live.setsockopt_string(zmq.SUBSCRIBE, "kv")
        self._live.connect(publish)
        self._past = self._context.socket(zmq.DEALER)
        self._past.connect(replay)

    def live(self) -> tuple[int, KVEventBatch] | None:
        if not self._live.poll(50):
            return None
        topic, number, payload = self._live.recv_multipart()
        assert topic == b"kv"
        return int.from_bytes(number, "big"), self._decode(payload)

    def replay(self, first: int = 0) -> Iterator[tuple[int, KVEventBatch]]:
        self._past.send_multipart((b"", first.to_bytes(8, "big")))
        while True:
            assert self._past.poll(WAIT_MS), "the replay has no end"
            _, topic, number, payload = self._past.recv_multipart()
            if number == ZmqEventPublisher.END_SEQ:
                return
            assert topic == b"kv"
            yield int.from_bytes(number, "big"), self._decode(payload)

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def reading(publish: str, replay: str) -> Iterator[Reader]:
    reader = Reader(publish, replay)
    try:
        yield reader
    finally:
        reader.close()


@contextmanager
def dynamo_s_indexer() -> Iterator[Callable[..., Any]]:
    """Run the indexer of Dynamo's router, and give a function that asks it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [os.environ["TIERED_KV_DYNAMO_PYTHON"], "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:

        def ask(path: str, **body: object) -> Any:
            headers = {"content-type": "application/json"}
            request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), headers)
            with suppress(ConnectionError, urllib.error.URLError):  # it starts
                return json.load(urllib.request.urlopen(request, timeout=10))
            return None

        try:
            yield ask
        finally:
            process.terminate()


def held_after(events: Iterable[Any]) -> Held:
    """Return what a router would know after these events of vLLM's types."""
    held: Held = defaultdict(Counter)
    for event in events:
        if isinstance(event, AllBlocksCleared):
            held.clear()
        elif isinstance(event, BlockStored):
            assert (event.token_ids, event.parent_block_hash, event.group_idx) == ([], None, 0)
            held[event.medium, event.ownership].update(event.block_hashes)
        else:
            assert isinstance(event, BlockRemoved)
            assert event.group_idx == 0
            held[event.medium, event.ownership] -= Counter(event.block_hashes)
    return held


def hashes_of(keys: Iterable[bytes]) -> Counter[Any]:
    return Counter(maybe_convert_block_hash(get_offload_block_hash(key)) for key in keys)


def stack_over(*tiers: Mapping[str, object]) -> dict[str, object]:
    size = PRIMARY_BLOCKS * ROW_BYTES
    secondary = [{**tier, "store_budget": size, "load_budget": size} for tier in tiers]
    return {"primary": {"capacity": size}, "secondary": secondary}


class Checks(ChecksIn):
    def _open(self) -> Stack:
        return open_stack(
            {
                "namespace": {"model": "m"},
                "block": {"bytes": BLOCK_BYTES},
                "primary": {"capacity": 16 * BLOCK_BYTES},
                "secondary": [
                    {"type": "nvme", "path": str(self.directory / "published"), "capacity": "16MiB", "name": "disk"}
                ],
                "events": {"publish": "tcp://127.0.0.1:*", "replay": "tcp://127.0.0.1:*"},
            }
        )

    def vllm_s_decoder_reads_what_a_stack_publishes(self) -> None:
        keys: Any = keys_of("published", 24)
        began_s = time.time()  # the first batch may be from before the first store: all is cleared
        with self._open() as stack:
            assert stack.events is not None
            with reading(stack.events.publish_address, stack.events.replay_address) as reader:
                assert stack.put(block_hashes(keys), np.zeros((24, BLOCK_BYTES), np.uint8)) == 24
                assert stack.flush()
                expected = {
                    (MEDIUM_CPU, None): hashes_of(manager_of(stack).primary.blocks),
                    (MEDIUM_STORAGE, "disk"): hashes_of(keys),
                }
                wait_for(lambda: held_after(e for _, batch in reader.replay() for e in batch.events) == expected)
                for _, batch in reader.replay():
                    assert batch.data_parallel_rank == 0
                    assert began_s <= batch.ts <= time.time()
                numbers = [number for number, _ in reader.replay()]
                assert numbers == [*range(numbers[0], numbers[0] + len(numbers))], (
                    "the first is above an earlier life's"
                )
                assert [number for number, _ in reader.replay(numbers[-1])] == numbers[-1:]
                manager_of(stack).reset_cache()
                wait_for(lambda: [*reader.replay()][-1][1].events == [AllBlocksCleared()])
                # By now it is surely connected, so what follows comes live, after the rest.
                assert stack.put(block_hashes(keys[:1]), np.zeros((1, BLOCK_BYTES), np.uint8)) == 1
                assert stack.flush()

                def sees_the_block() -> bool:
                    message = reader.live()
                    stored = (
                        []
                        if message is None
                        else [each for each in message[1].events if getattr(each, "medium", "") == MEDIUM_STORAGE]
                    )
                    return any(Counter(each.block_hashes) == hashes_of(keys[:1]) for each in stored)

                wait_for(sees_the_block)

    def vllm_s_publisher_publishes_the_events_of_our_tiers(self) -> None:
        memory_tier = {"type": "memory", "capacity": 10 * (ROW_BYTES + 4096)}
        nvme = {"type": "nvme", "path": str(self.directory / "engine"), "capacity": "64MiB", "name": "disk"}
        everything: list[bytes] = []
        with engine_with(stack_over(memory_tier, nvme), enable_events=True) as engine:
            tracker = OffloadingEventsTracker(OffloadingKVEventsConfig(True, False))
            publisher = ZmqEventPublisher(0, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", topic="kv")
            endpoints = [each.getsockopt_string(zmq.LAST_ENDPOINT) for each in (publisher._pub, publisher._replay)]
            try:
                with reading(*endpoints) as reader:
                    for number in range(4):
                        keys = keys_of(f"engine-{number}", 6)
                        everything += keys
                        engine.store(keys, 0)
                        engine.settle()
                        events = list(tracker.take_events(engine.manager.take_events()))
                        publisher.publish(KVEventBatch(ts=time.time(), events=events))
                    memory = engine.manager._stack.secondary_tiers[0]
                    in_memory = hashes_of(key for key in everything if memory.lookup(key, None))
                    assert 0 < len(in_memory) < len(everything), "some were evicted"
                    expected = {
                        (MEDIUM_CPU, None): hashes_of(engine.manager._manager.primary.blocks),
                        (MEDIUM_STORAGE, None): in_memory + hashes_of(everything),
                    }
                    wait_for(lambda: len([*reader.replay()]) == 4)
                    held = held_after(event for _, batch in reader.replay() for event in batch.events)
                    assert held == expected
            finally:
                publisher.shutdown()

    def _dynamo_s_indexer_credits_a_worker_with_our_tiers(self) -> None:
        """By name only: the indexer has an environment of its own."""
        nvme = {"type": "nvme", "path": str(self.directory / "dynamo"), "capacity": "64MiB"}
        group = SimpleNamespace(hashes_per_chunk=1, tokens_per_chunk=16, tokens_per_block=16, group_idx=0)
        group.sliding_window_size_in_chunks = None
        group.kv_event_group_spec = OffloadingEventGroupSpec("full_attention", None)
        tracker = OffloadingEventsTracker(OffloadingKVEventsConfig(True, True))
        publisher = ZmqEventPublisher(0, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", topic="kv")
        live, past = (each.getsockopt_string(zmq.LAST_ENDPOINT) for each in (publisher._pub, publisher._replay))
        with engine_with(stack_over(nvme), enable_events=True) as engine, dynamo_s_indexer() as ask:

            def serve(number: int) -> list[int]:
                """Store a prompt of six blocks, and publish it; return its tokens."""
                keys, tokens = keys_of(f"routed-{number}", 6), [*range(1000 * number, 1000 * number + 6 * 16)]
                hashes = [get_offload_block_hash(key) for key in keys]
                request = SimpleNamespace(block_hashes=hashes, all_token_ids=tokens, lora_request=None)
                for index, key in enumerate(keys):
                    tracker.record_store(request, group, index, key)
                engine.store(keys, 0)
                engine.settle()
                events = list(tracker.take_events(engine.manager.take_events()))
                publisher.publish(KVEventBatch(ts=time.time(), events=events))
                return tokens

            def found(tokens: list[int]) -> tuple[int, int] | None:
                told = ask("/query", token_ids=tokens, model_name="m")["instances"].get("7")
                return told and (told["cpu"], told["disk"])

            def credits_what_each_tier_has() -> bool:
                newest = serve(next(numbers))  # and a message from which the indexer sees what it missed
                time.sleep(0.2)
                return (found(first), found(newest)) == ((0, 96), (96, 96))

            try:
                numbers = itertools.count()
                first = serve(next(numbers))
                worker = {"instance_id": 7, "model_name": "m", "block_size": 16}
                wait_for(lambda: ask("/register", endpoint=live, replay_endpoint=past, **worker))
                wait_for(credits_what_each_tier_has)
            finally:
                publisher.shutdown()

    def removals_are_expected_of_tiers_that_tell_them(self) -> None:
        fs = {"type": "fs", "path": str(self.directory / "fs"), "capacity": "64MiB"}
        with engine_with(stack_over({"type": "memory", "capacity": "16MiB"}, fs), enable_events=True) as engine:
            engine.store(keys_of("expected", 4), 0)
            engine.settle()
            told = {(event.medium, event.removal_expected) for event in engine.manager.take_events()}
            assert told == {(Medium.CPU, False), (Medium.STORAGE, True), (Medium.STORAGE, False)}

    def without_vllm_s_events_nothing_is_collected(self) -> None:
        with engine_with(stack_over({"type": "memory", "capacity": "16MiB"})) as engine:
            engine.store(keys_of("silent", 4), 0)
            engine.settle()
            assert list(engine.manager.take_events()) == []
            assert list(engine.manager._stack.secondary_tiers[0].take_events()) == []

    def a_publisher_of_our_own_is_refused(self) -> None:
        stack = {"primary": {"capacity": "1MiB"}, "events": {"publish": "tcp://127.0.0.1:*"}}
        attempt: Callable[[], object] = lambda: stack_config(config_of(stack, engine_id="e"))  # noqa: E731
        assert "--kv-events-config" in refusal_of(attempt, ConfigError)


if __name__ == "__main__":
    with small_engine(Path(sys.argv[1])):
        run_checks(Checks(Path(sys.argv[1])), sys.argv[2:])
