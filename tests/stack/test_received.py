"""What a request got: the tiers that served it, what did not come, and how long it waited."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.event_subscriber import Message, Subscriber
from tests.support.host_server import serving
from tests.support.host_server import stack_of as served_stack_of
from tests.support.stacks import forget_memory, manager_of, stack_of
from tiered_kv import AsyncStack, Received, Stack, connect, open_stack
from tiered_kv.base import OffloadKey, ReqContext, make_offload_key
from tiered_kv.errors import ConfigError
from tiered_kv.received import LoadCounts, count_load, groups_of, received_of
from tiered_kv.testing.control import wait_until

BLOCK_BYTES = 4096
ANY_PORT = "tcp://127.0.0.1:*"


def hashes(count: int, label: str = "block") -> list[bytes]:
    return [f"{label}-{number}".encode() for number in range(count)]


def requests_of(stack: Stack) -> list[dict[str, Any]]:
    assert stack.server is not None
    with urllib.request.urlopen(f"http://127.0.0.1:{stack.server.port}/status", timeout=60.0) as answer:
        shown: list[dict[str, Any]] = json.load(answer)["requests"]
    return shown


def put(stack: Stack, keys: list[bytes]) -> None:
    assert stack.put(keys, np.zeros((len(keys), BLOCK_BYTES), np.uint8)) == len(keys)
    assert stack.flush(60.0)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    tier = {"type": "nvme", "name": "disk", "path": str(tmp_path / "kv"), "capacity": "8MiB"}
    settings = stack_of(
        tier,
        blocks=16,
        block={"bytes": BLOCK_BYTES, "tokens": 16},
        metrics={"listen": "127.0.0.1:0"},
        events={"publish": ANY_PORT, "requests": "requests"},
    )
    with open_stack(settings) as stack:
        yield stack


def test_a_get_says_which_tier_served_it_and_what_did_not_come(stack: Stack) -> None:
    put(stack, hashes(6))
    forget_memory(manager_of(stack))
    assert len(stack.get(hashes(2), timeout=30.0)) == 2
    received = Received()
    assert len(stack.get(hashes(9), timeout=30.0, received=received)) == 6
    assert received.blocks == {"cpu": 2, "disk": 4}
    assert received.tokens == {"cpu": 32, "disk": 64}
    assert received.missed_blocks == 3
    assert 0 < received.waited_s < 30


def test_a_used_answer_keeps_nothing_of_the_call_before(stack: Stack) -> None:
    put(stack, hashes(3))
    received = Received()
    stack.get(hashes(4), received=received)
    stack.get(hashes(2, "others"), received=received)
    assert received == Received(missed_blocks=2, waited_s=received.waited_s)


def test_an_asynchronous_get_says_it_too(stack: Stack) -> None:
    put(stack, hashes(3))
    received = Received()
    assert len(asyncio.run(AsyncStack(stack).get(hashes(4), received=received))) == 3
    assert (received.blocks, received.missed_blocks) == ({"cpu": 3}, 1)


def test_the_status_has_what_the_last_requests_got(stack: Stack) -> None:
    put(stack, hashes(4))
    forget_memory(manager_of(stack))
    stack.get(hashes(6), timeout=30.0)
    for _ in range(20):
        stack.get(hashes(1))
    shown = requests_of(stack)
    assert len(shown) == 16, "the list is bounded"
    assert shown[0]["blocks"] == {"cpu": 1}
    assert shown[0]["waited_seconds"] == 0
    assert [each["age_seconds"] for each in shown] == sorted(each["age_seconds"] for each in shown)
    stack.get(hashes(2, "none"))
    first = requests_of(stack)[0]
    del first["age_seconds"], first["request"]
    assert first == {
        "blocks": {},
        "tokens": {},
        "missed_blocks": 2,
        "missed_tokens": 32,
        "waited_seconds": first["waited_seconds"],
    }


def test_without_a_history_the_status_has_no_requests() -> None:
    with open_stack(stack_of(metrics={"listen": "127.0.0.1:0"}, history=0)) as stack:
        stack.get(hashes(1))
        assert requests_of(stack) == []


def test_ended_requests_are_published_under_a_topic_of_their_own(stack: Stack) -> None:
    assert stack.events is not None
    put(stack, hashes(4))
    forget_memory(manager_of(stack))
    with Subscriber(stack.events, "requests") as subscriber, Subscriber(stack.events, "kv") as of_blocks:

        def publish() -> None:
            stack.get(hashes(5), timeout=30.0)
            assert stack.history is not None
            stack.history.settle()

        message = subscriber.connect(publish)
        event = message.events[-1]
        assert (message.topic, event["type"]) == (b"requests", "RequestEnded")
        assert sum(event["blocks"].values()) == 4
        assert sum(event["tokens"].values()) == 64
        assert (event["missed_blocks"], event["missed_tokens"]) == (1, 16)
        assert event["request"].startswith("get-")
        later = None
        while later is None:
            publish()
            later = subscriber.receive(0.05)
        assert later.number > message.number
        while (block := of_blocks.receive(0.05)) is not None:
            assert block.topic == b"kv", "a subscriber of blocks gets no requests"


def test_a_stack_publishes_no_request_unless_it_is_told_to() -> None:
    with open_stack(stack_of(events={"publish": ANY_PORT})) as stack, contextlib.ExitStack() as closing:
        assert stack.events is not None
        subscriber = closing.enter_context(Subscriber(stack.events))
        stack.get(hashes(2))
        assert stack.history is not None
        stack.history.settle()

        def publish() -> None:
            stack.put(hashes(1), bytes(BLOCK_BYTES))
            stack.reset_cache()

        message: Message | None = subscriber.connect(publish)
        while message is not None:
            assert all(event["type"] != "RequestEnded" for event in message.events)
            message = subscriber.receive(0.2)


@pytest.mark.parametrize(
    ("events", "history", "named"),
    [
        ({"requests": "kv-requests"}, 1024, "begins with none of 'kv'"),
        ({"requests": "requests", "topic": ["a", "req"]}, 1024, "begins with none of 'a', 'req'"),
        ({"requests": "requests"}, 0, "a 'history' above 0"),
    ],
)
def test_a_topic_that_cannot_be_served_is_refused(events: dict[str, object], history: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        open_stack(stack_of(events={"publish": ANY_PORT, **events}, history=history))


def test_a_program_of_a_host_s_cache_gets_the_server_s_tiers(tmp_path: Path) -> None:
    nvme = {"type": "nvme", "name": "disk", "path": str(tmp_path / "nvme"), "capacity": "8MiB"}
    settings = served_stack_of(secondary=[nvme])
    keys, received = hashes(4), Received()
    with serving(tmp_path, settings) as served, connect(served.address) as program:
        assert program.put(keys, np.zeros((4, program.region.block_bytes), np.uint8), timeout=60.0) == 4
        assert program.flush(60.0)
    with serving(tmp_path, settings) as served, connect(served.address) as program:
        assert len(program.get([*keys, b"none"], timeout=60.0, received=received)) == 4
    assert received.blocks == {"disk": 4}
    assert received.missed_blocks == 1
    assert received.waited_s > 0


KEYS = st.lists(st.tuples(st.binary(min_size=1, max_size=4), st.integers(0, 2)), unique=True, max_size=8).map(
    lambda pairs: [make_offload_key(*pair) for pair in pairs]
)


@given(
    st.lists(st.tuples(KEYS, st.dictionaries(st.integers(0, 7), st.sampled_from(["disk", "far"])))), st.integers(0, 4)
)
def test_blocks_and_tokens_add_up(loads: list[tuple[list[OffloadKey], dict[int, str]]], block_tokens: int) -> None:
    counts: LoadCounts = {}
    for keys, places in loads:
        sources = {keys[place]: tier for place, tier in places.items() if place < len(keys)}
        count_load(counts, groups_of(keys), keys, sources)
    received = received_of(counts, 1.5, block_tokens)
    assert sum(received.blocks.values()) == sum(len(keys) for keys, _ in loads)
    groups = [group for keys, _ in loads for group in groups_of(keys)]
    assert sum(received.tokens.values()) == max(map(groups.count, groups), default=0) * block_tokens
    assert received.tokens.keys() <= received.blocks.keys()


def test_an_engine_s_request_is_told_of_each_load_and_forgotten_at_its_end(stack: Stack) -> None:
    put(stack, hashes(4))
    forget_memory(manager_of(stack))
    manager, context = manager_of(stack), ReqContext("engine")
    keys = [make_offload_key(each, 0) for each in hashes(4)]
    manager.on_new_request(context)

    def are_found() -> bool:
        answers = manager.lookup_many(keys, context)
        manager.on_schedule_end()
        return answers == [True] * 4

    wait_until(are_found)
    assert manager.lookup_many(keys, context) == [True] * 4
    manager.prepare_load(keys, context)
    manager.complete_load(keys, context)
    assert manager.received(context).blocks == {"disk": 4}
    manager.on_request_finished(context)
    assert manager.received(context) == Received()
