"""Followers of events: the example's router is right after a restart of the publisher, and after lost messages."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.support.event_subscriber import CLEARED, Subscriber
from tests.support.server_process import free_port
from tiered_kv.base import OffloadingEvent, OffloadKey
from tiered_kv.config.stack_config import EventSettings
from tiered_kv.stack.exporters.event_messages import MESSAGE_KEYS_MAX, hashes_of
from tiered_kv.stack.exporters.events import EventPublisher
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import make_keys

EXAMPLES = Path(__file__).parents[3] / "examples"

Follow = Callable[[EventPublisher], Any]  # Any: the example's Router


@pytest.fixture
def settings() -> EventSettings:
    """Addresses that stay the same in a restart."""
    return EventSettings(publish=f"tcp://127.0.0.1:{free_port()}", replay=f"tcp://127.0.0.1:{free_port()}")


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Follow]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("events")
    routers = []

    def follow_it(publisher: EventPublisher) -> Any:
        routers.append(example.Router(publisher.publish_address, publisher.replay_address))
        return routers[-1]

    yield follow_it
    zmq.Context.instance().destroy(linger=0)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv.stack.exporters.events.STEP_WAITS_MAX", 0)


def stored(keys: Sequence[OffloadKey], medium: str = "CPU") -> OffloadingEvent:
    return OffloadingEvent(list(keys), 1, medium, removed=False)


def hashes(keys: Sequence[OffloadKey]) -> set[int]:
    return set(hashes_of(list(keys))[0].tolist())


def assert_follows(router: Any, expected: dict[str, set[int]]) -> None:
    router.follow(lambda: router.tiers == expected, 60.0)
    assert router.tiers == expected


@pytest.mark.parametrize("set_back_s", [0, 3600])
def test_a_router_notices_a_restart(
    set_back_s: int, settings: EventSettings, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = make_keys(20, "before"), make_keys(3, "after")
    with contextlib.closing(EventPublisher(settings)) as publisher:
        router = follow(publisher)
        for key in before:
            publisher.publish([stored([key]), stored([key], "disk")])
        assert_follows(router, {"CPU": hashes(before), "disk": hashes(before)})
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() - set_back_s * 10**9)
    with contextlib.closing(EventPublisher(settings)) as publisher:
        publisher.publish([stored(after)])
        assert_follows(router, {"CPU": hashes(after)})


@pytest.mark.parametrize("set_back_s", [0, 3600])
def test_a_replay_tells_of_a_restart_before_any_block_is_stored(
    set_back_s: int, settings: EventSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(EventPublisher(settings)) as publisher, Subscriber(publisher) as subscriber:
        publisher.publish([stored(make_keys(4))])
        last = subscriber.replay_until(lambda messages: len(messages) == 2)[-1].number
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() - set_back_s * 10**9)
    with contextlib.closing(EventPublisher(settings)) as publisher, Subscriber(publisher) as subscriber:
        assert [message.events for message in subscriber.replay(last + 1)] == [[CLEARED]]


def test_a_subscriber_without_a_replay_socket_hears_of_a_restart(settings: EventSettings) -> None:
    """It connects again within the second that the first message waits for it."""
    alone = settings.model_copy(update={"replay": None})
    with contextlib.closing(EventPublisher(alone)) as publisher, Subscriber(publisher) as subscriber:
        subscriber.connect(lambda: publisher.publish([stored(make_keys(1))]))
        publisher.close()
        with contextlib.closing(EventPublisher(alone)):
            while (message := subscriber.receive(60.0)) is not None and message.events != [CLEARED]:
                pass
            assert message is not None


def test_numbers_go_on_above_those_of_publishers_that_ended_just_now(settings: EventSettings) -> None:
    last = 0
    for _ in range(3):
        with contextlib.closing(EventPublisher(settings)) as publisher, Subscriber(publisher) as subscriber:
            publisher.publish([stored(make_keys(1))] * 20)
            numbers = [each.number for each in subscriber.replay_until(lambda messages: len(messages) > 1)]
            assert last < numbers[0] < 2**53, "some programs read numbers as a double"
            last = numbers[-1]


def test_a_router_is_right_after_a_burst(
    settings: EventSettings, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv.stack.exporters.event_queue.QUEUE_BATCHES_MAX", 4)
    monkeypatch.setattr("tiered_kv.stack.exporters.event_queue.MERGED_KEYS_MAX", 10_000)
    monkeypatch.setattr("tiered_kv.stack.exporters.events.SUBSCRIBER_MESSAGES_MAX", 4)  # and the socket drops messages
    with contextlib.closing(EventPublisher(settings)) as publisher:
        router = follow(publisher)
        first, keys = make_keys(200, "first"), make_keys(2000)
        publisher.publish([stored(first)])
        assert_follows(router, {"CPU": hashes(first)})
        publisher.publish([OffloadingEvent(first[:150], 1, "CPU", removed=True)])
        for key in keys:
            publisher.publish([stored([key])])
        assert_follows(router, {"CPU": hashes(first[150:]) | hashes(keys)})


MESSAGES = 1200  # together more than the system buffers for a peer


@pytest.fixture
def full(settings: EventSettings, closing: ExitStack, monkeypatch: pytest.MonkeyPatch) -> EventPublisher:
    """A publisher whose replay is long."""
    monkeypatch.setattr("tiered_kv.stack.exporters.events.SUBSCRIBER_MESSAGES_MAX", 100)
    publisher = closing.enter_context(contextlib.closing(EventPublisher(settings)))
    publisher.publish([stored(make_keys(MESSAGE_KEYS_MAX) * MESSAGES)])
    wait_until(lambda: publisher.snapshot()["event_messages_total"] == 1 + MESSAGES)
    return publisher


def ask_and_read_nothing(publisher: EventPublisher, closing: ExitStack) -> None:
    stuck = closing.enter_context(closing.enter_context(zmq.Context()).socket(zmq.DEALER))
    stuck.linger, stuck.rcvhwm, stuck.rcvbuf = 0, 1, 4096
    stuck.connect(publisher.replay_address)
    requests = publisher.snapshot()["event_replay_requests_total"]
    stuck.send_multipart([b"", bytes(8)])
    wait_until(lambda: publisher.snapshot()["event_replay_requests_total"] > requests)


def test_a_subscriber_that_reads_no_replay_delays_no_other(full: EventPublisher, closing: ExitStack) -> None:
    for _ in range(3):
        ask_and_read_nothing(full, closing)
    with Subscriber(full) as subscriber:
        assert len(subscriber.replay()) == 1 + MESSAGES
        full.publish([stored(make_keys(1, "later"))])
        message = subscriber.replay_until(lambda messages: len(messages) == 2 + MESSAGES)[-1]
        assert set(message.events[0]["block_hashes"]) == hashes(make_keys(1, "later"))


def test_an_answer_that_nobody_reads_ends(
    full: EventPublisher, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Subscriber(full) as subscriber:
        *_, last = subscriber.replay()
        monkeypatch.setattr("tiered_kv.stack.exporters.event_replay.ANSWERS_MAX", 1)
        monkeypatch.setattr("tiered_kv.stack.exporters.event_replay.STALLED_S", 0.0)
        ask_and_read_nothing(full, closing)
        assert subscriber.replay(last.number + 1) == []
