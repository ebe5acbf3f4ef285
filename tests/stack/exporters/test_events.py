"""Published events: content, form, replays and limits."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from tests.support.event_subscriber import CLEARED, Index, Message, Subscriber, index_of
from tests.support.faulty import Gate
from tests.support.obedient import BLOCK_BYTES, put, stack_of
from tests.support.stacks import ReplaceModule, block_hashes, manager_of
from tiered_kv.base import OffloadingEvent, OffloadKey, ReqContext, make_offload_key
from tiered_kv.config.stack_config import EventSettings
from tiered_kv.errors import ConfigError, MissingExtraError
from tiered_kv.stack.exporters.event_messages import MESSAGE_KEYS_MAX, hashes_of
from tiered_kv.stack.exporters.event_queue import QUEUE_BATCHES_MAX
from tiered_kv.stack.exporters.event_replay import REPLAY_BYTES_MAX, REPLAY_MESSAGES_MAX
from tiered_kv.stack.exporters.events import PEER_MESSAGE_BYTES_MAX, SUBSCRIBER_MESSAGES_MAX, EventPublisher
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import make_keys

ANY_PORT = "tcp://127.0.0.1:*"
SETTINGS = EventSettings(publish=ANY_PORT, replay=ANY_PORT)

OpenStack = Callable[..., Stack]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publish without waiting for the scheduler's steps: there are none, or few."""
    monkeypatch.setattr("tiered_kv.stack.exporters.events.STEP_WAITS_MAX", 0)


@pytest.fixture
def open_with_events(closing: ExitStack) -> OpenStack:
    def open_it(*secondary: dict[str, object], blocks: int = 8) -> Stack:
        settings = stack_of(*secondary, blocks=blocks, events={"publish": ANY_PORT, "replay": ANY_PORT})
        return closing.enter_context(open_stack(settings))

    return open_it


@pytest.fixture
def publisher(closing: ExitStack) -> EventPublisher:
    return closing.enter_context(contextlib.closing(EventPublisher(SETTINGS)))


def publisher_of(stack: Stack) -> EventPublisher:
    assert stack.events is not None
    return stack.events


def hashes(keys: Iterable[OffloadKey]) -> set[int]:
    return {each for of_group in hashes_of(list(keys)).values() for each in of_group.tolist()}


def stored(*keys: OffloadKey, medium: str = "CPU") -> OffloadingEvent:
    return OffloadingEvent(list(keys), BLOCK_BYTES, medium, removed=False)


def settled(stack: Stack, subscriber: Subscriber, is_right: Callable[[Index], bool]) -> Index:
    """Return the sum of all events, once it is right; `flush` makes steps until then."""

    def is_enough(messages: list[Message]) -> bool:
        stack.flush(60.0)
        return is_right(index_of(messages))

    return index_of(subscriber.replay_until(is_enough))


# Content.


def test_stored_blocks_of_a_tier_without_events_are_published(open_with_events: OpenStack, tmp_path: Path) -> None:
    stack = open_with_events({"type": "fs", "name": "mine", "path": str(tmp_path / "kv"), "capacity": "16MiB"})
    keys = make_keys(6)
    with Subscriber(publisher_of(stack)) as subscriber:
        put(stack, keys)
        expected = {"CPU": hashes(keys), "mine": hashes(keys)}
        settled(stack, subscriber, lambda index: index == expected)
        places = {
            (event["medium"], event.get("ownership"))
            for each in subscriber.replay()
            for event in each.events
            if event != CLEARED
        }
        assert places == {("CPU", None), ("STORAGE", "mine")}


def test_the_events_of_tiers_that_evict_add_up_to_their_blocks(open_with_events: OpenStack, tmp_path: Path) -> None:
    nvme = {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": "2MiB", "segment": "256KiB"}
    stack = open_with_events({"type": "memory", "capacity": 40 * BLOCK_BYTES}, nvme, blocks=64)
    keys = make_keys(1200)
    with Subscriber(publisher_of(stack)) as subscriber:
        for start in range(0, len(keys), 60):
            put(stack, keys[start : start + 60])
            stack.get(block_hashes(keys[start : start + 10]), np.empty((10, BLOCK_BYTES), np.uint8))

        def is_right(index: Index) -> bool:
            held = {"CPU": set(manager_of(stack).primary.blocks)}
            for name, tier in zip(("memory", "nvme"), stack.secondary_tiers, strict=True):
                held[name] = {key for key in keys if tier.lookup(key, ReqContext())}
                assert 0 < len(held[name]) < len(keys)
            return index == {name: hashes(of_tier) for name, of_tier in held.items()}

        settled(stack, subscriber, is_right)


def test_a_reset_is_one_event_and_nothing_from_before_follows(open_with_events: OpenStack, tmp_path: Path) -> None:
    stack = open_with_events({"type": "nvme", "path": str(tmp_path / "kv"), "capacity": "16MiB"})
    keys = make_keys(6)
    with Subscriber(publisher_of(stack)) as subscriber:
        put(stack, keys)
        manager_of(stack).reset_cache()
        put(stack, keys[:2])
        again = {"CPU": hashes(keys[:2]), "nvme": hashes(keys[:2])}
        messages = subscriber.replay_until(lambda messages: len(cleared(messages)) > 1 and index_of(messages) == again)
    assert len(cleared(messages)) == 2, "one is the first message of the process"
    assert {event["type"] for message in messages for event in message.events} == {"BlockStored", "AllBlocksCleared"}
    assert index_of(messages[: cleared(messages)[1]]) == {"CPU": hashes(keys), "nvme": hashes(keys)}


def test_what_happened_before_the_stack_closes_is_published(open_with_events: OpenStack) -> None:
    stack = open_with_events({"type": "memory", "capacity": "1MiB"})
    with Subscriber(publisher_of(stack)) as subscriber:
        subscriber.connect(lambda: publisher_of(stack).publish([stored(*make_keys(1, "probe"))]))
        stack.put(block_hashes(make_keys(2)), np.zeros((2, BLOCK_BYTES), np.uint8))
        stack.close()
        received: list[Message | None] = []
        while index_of(filter(None, received)).get("memory") != hashes(make_keys(2)):
            received.append(subscriber.receive(20.0))
            assert received[-1] is not None, "no message came"


def test_a_stack_without_events_has_no_publisher() -> None:
    with open_stack(stack_of()) as stack:
        assert stack.events is None
        assert not manager_of(stack).primary.reports_events
        assert not [name for name in stack.counters()["cpu"] if name.startswith("event")]


# Form.


def test_a_message_has_topic_number_and_a_batch_in_vllm_s_form(publisher: EventPublisher) -> None:
    key = make_offload_key(bytes(24) + bytes([200, 0, 0, 0, 0, 0, 0, 7]), 3)
    publisher.publish([stored(key), OffloadingEvent([key], BLOCK_BYTES, "disk", removed=True)])
    with Subscriber(publisher) as subscriber:
        first, message = subscriber.replay_until(lambda messages: len(messages) > 1)
    assert first.events == [CLEARED]
    assert (message.topic, message.number, message.rank) == (b"kv", first.number + 1, 0)
    assert message.events == [
        {
            "type": "BlockStored",
            "block_hashes": [200 * 2**56 + 7],
            "parent_block_hash": None,
            "token_ids": [],
            "block_size": 0,
            "lora_id": None,
            "medium": "CPU",
            "lora_name": None,
            "group_idx": 3,
        },
        {
            "type": "BlockRemoved",
            "block_hashes": [200 * 2**56 + 7],
            "medium": "STORAGE",
            "group_idx": 3,
            "ownership": "disk",
        },
    ]


def test_subscribers_choose_by_topic() -> None:
    settings = SETTINGS.model_copy(update={"topic": ("kv@pod-7@model",)})
    with (
        contextlib.closing(EventPublisher(settings)) as publisher,
        Subscriber(publisher, "kv@pod-7") as subscriber,
        Subscriber(publisher, "kv@pod-8") as other,
    ):
        message = subscriber.connect(lambda: publisher.publish([stored(*make_keys(1))]))
        assert message.topic == b"kv@pod-7@model"
        assert other.receive(0.05) is None


def test_a_cache_of_several_engines_is_published_for_each() -> None:
    """A router of llm-d credits the pod in the topic."""
    settings = EventSettings.model_validate({"publish": ANY_PORT, "topic": ["kv@pod-7@model", "kv@pod-8@model"]})
    with contextlib.closing(EventPublisher(settings)) as publisher, Subscriber(publisher) as subscriber:
        subscriber.connect(lambda: publisher.publish([stored(*make_keys(1, "probe"))]))
        publisher.publish([stored(*make_keys(2))])
        message: Message | None = None
        while message is None or len(message.events[0].get("block_hashes", ())) < 2:
            message = subscriber.receive(20.0)
        assert subscriber.receive(20.0) == message._replace(topic=b"kv@pod-8@model")


@pytest.mark.parametrize("lengths", [(32, 32, 32), (8, 8, 8), (7, 7, 7), (32, 16, 20)])
def test_a_block_is_known_by_the_last_64_bits_of_its_hash(lengths: tuple[int, ...]) -> None:
    parts = [bytes(range(number, number + length)) for number, length in enumerate(lengths, 200)]
    expected = [int.from_bytes(part[-8:], "big") for part in parts]
    assert lists_of([make_offload_key(part, 5) for part in parts]) == {5: expected}
    two_groups = [make_offload_key(part, number % 2) for number, part in enumerate(parts)]
    assert lists_of(two_groups) == {0: expected[::2], 1: expected[1::2]}


def lists_of(keys: list[OffloadKey]) -> dict[int, list[int]]:
    return {group: of_group.tolist() for group, of_group in hashes_of(keys).items()}


def test_no_message_is_large(publisher: EventPublisher) -> None:
    keys = make_keys(3 * MESSAGE_KEYS_MAX // 2)
    publisher.publish([stored(*keys), stored(*keys, medium="disk"), stored(*keys[:1])])
    with Subscriber(publisher) as subscriber:
        _, *messages = subscriber.replay_until(lambda messages: len(messages) == 5)
    sizes = [sum(len(event["block_hashes"]) for event in message.events) for message in messages]
    assert sizes == [MESSAGE_KEYS_MAX] * 3 + [1]
    assert index_of(messages) == {"CPU": hashes(keys), "disk": hashes(keys)}


# Late and slow subscribers.


def test_a_subscriber_gets_what_it_missed_from_the_replay_socket(publisher: EventPublisher) -> None:
    for number, key in enumerate(make_keys(10)):
        publisher.publish([stored(key)])
        assert publisher.snapshot()["dropped_event_batches_total"] == 0, number
    with Subscriber(publisher) as subscriber:
        everything = subscriber.replay_until(lambda messages: len(messages) == 11)
        first = everything[0].number
        assert [message.number for message in everything] == list(range(first, first + 11))
        assert index_of(everything) == {"CPU": hashes(make_keys(10))}
        assert subscriber.replay(first=first + 7) == everything[7:]
        assert subscriber.replay(first=first + 11) == []
        assert publisher.snapshot()["event_replay_requests_total"] >= 3


def test_a_late_subscriber_gets_a_snapshot_in_place_of_what_is_no_longer_kept(
    publisher: EventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv.stack.exporters.event_replay.REPLAY_MESSAGES_MAX", 3)
    monkeypatch.setattr("tiered_kv.stack.exporters.event_replay.SNAPSHOT_KEYS_MAX", 4)
    keys = make_keys(12)
    publisher.publish([stored(*keys[:1])])
    publisher.clear()
    publisher.publish([stored(*keys, medium="disk")])
    publisher.publish([stored(*keys[:2]), OffloadingEvent(keys[8:11], BLOCK_BYTES, "disk", removed=True)])
    for key in keys[2:5]:
        publisher.publish([stored(key)])
    wait_until_sent(publisher, 8)
    with Subscriber(publisher) as subscriber:
        snapshot, *kept = subscriber.replay(1)
        last = snapshot.number
        assert [message.number for message in kept] == [last + 1, last + 2, last + 3]
        assert (snapshot.topic, snapshot.rank) == (b"kv", 0)
        assert snapshot.events[0] == CLEARED
        assert index_of([snapshot]) == {"CPU": hashes(keys[:2]), "disk": hashes(keys[11:])}
        assert subscriber.replay(last + 1) == kept
        again, *kept_again = subscriber.replay(last - 1)
        assert (again.number, again.events, kept_again) == (last, snapshot.events, kept)


@pytest.mark.slow
def test_the_replay_has_a_limit(publisher: EventPublisher) -> None:
    with Subscriber(publisher) as subscriber:
        # A message of so many keys has more than nine bytes for each.
        publisher.publish([stored(*make_keys(MESSAGE_KEYS_MAX) * (2 * REPLAY_BYTES_MAX // (9 * MESSAGE_KEYS_MAX)))])
        wait_until_sent(publisher, 1 + 2 * REPLAY_BYTES_MAX // (9 * MESSAGE_KEYS_MAX))
        first, *kept = subscriber.replay()
        start = first.number + 1 - publisher.snapshot()["event_messages_total"] + len(kept)
        assert 0 < len(kept) * 9 * MESSAGE_KEYS_MAX <= REPLAY_BYTES_MAX
        sent = publisher.snapshot()["event_messages_total"]
        for number in range(REPLAY_MESSAGES_MAX + 3):
            publisher.clear()
            wait_until_sent(publisher, sent + number + 1 - QUEUE_BATCHES_MAX // 2)
        wait_until_sent(publisher, sent + REPLAY_MESSAGES_MAX + 3)
        snapshot, *kept = subscriber.replay()
        assert snapshot.number == start + sent + 2, "it stands for what is kept no longer"
        numbers = range(start + sent + 3, start + sent + 3 + REPLAY_MESSAGES_MAX)
        assert [message.number for message in kept] == list(numbers)


def test_a_request_for_a_replay_that_is_none_is_ignored(publisher: EventPublisher) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.connect(publisher.replay_address)
        for frames in ([b"x"], [b"", b"short"], [b"", bytes(8), b"more"]):
            peer.send_multipart(frames)
        assert not peer.poll(100)
    publisher.publish([stored(*make_keys(1))])
    with Subscriber(publisher) as subscriber:
        assert len(subscriber.replay_until(lambda messages: len(messages) > 1)) == 2


def test_a_peer_that_sends_a_large_message_is_disconnected_and_others_are_served(publisher: EventPublisher) -> None:
    """Otherwise it could fill this process's memory."""
    publisher.publish([stored(*make_keys(1))])
    large = bytes(PEER_MESSAGE_BYTES_MAX + 1)
    for kind, address in ((zmq.DEALER, publisher.replay_address), (zmq.SUB, publisher.publish_address)):
        with zmq.Context() as context, context.socket(kind) as peer:
            peer.linger = 0
            with peer.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
                peer.connect(address)
                if kind == zmq.SUB:
                    peer.subscribe(large)
                else:
                    peer.send(large)
                assert monitor.poll(60_000)
                peer.disable_monitor()
    with Subscriber(publisher) as subscriber:
        assert subscriber.replay_until(lambda messages: len(messages) == 2)


class HeldKeys(list[OffloadKey]):
    """Keys that nobody reads while a gate is closed."""

    def __init__(self, gate: Gate, keys: list[OffloadKey]) -> None:
        super().__init__(keys)
        self._gate = gate

    def __getitem__(self, place: Any) -> Any:  # Any: as a list's
        self._gate.pass_through()
        return super().__getitem__(place)


@contextlib.contextmanager
def stopped(publisher: EventPublisher) -> Iterator[None]:
    """Stop the publisher's thread meanwhile, after it has taken one event of the primary tier."""
    gate = Gate(is_open=False)
    publisher.publish([OffloadingEvent(HeldKeys(gate, make_keys(1, "held")), BLOCK_BYTES, "CPU", removed=False)])
    wait_until(lambda: gate.waiting == 1)
    yield
    gate.open()


HELD = hashes(make_keys(1, "held"))


def test_where_too_much_waits_the_oldest_steps_are_one_and_no_block_is_missing(
    publisher: EventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv.stack.exporters.event_queue.QUEUE_BATCHES_MAX", 2)
    keys = make_keys(8)
    with Subscriber(publisher) as subscriber:
        with stopped(publisher):
            publisher.publish([stored(*keys), stored(*keys[:4], medium="disk")])
            publisher.publish([OffloadingEvent(keys[:6], BLOCK_BYTES, "CPU", removed=True)])
            publisher.publish([stored(keys[0]), OffloadingEvent(keys[:1], BLOCK_BYTES, "disk", removed=True)])
            for key in make_keys(4, "late"):
                publisher.publish([stored(key)])
        messages = subscriber.replay_until(lambda messages: len(messages) == 5)
    expected = {"CPU": HELD | hashes([keys[0], *keys[6:], *make_keys(4, "late")]), "disk": hashes(keys[1:4])}
    assert index_of(messages) == expected
    assert publisher.snapshot()["dropped_event_batches_total"] == 0


def test_keys_that_are_none_among_merged_steps_hide_no_others(
    publisher: EventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv.stack.exporters.event_queue.QUEUE_BATCHES_MAX", 1)
    keys: list[Any] = make_keys(4)
    with Subscriber(publisher) as subscriber:
        with stopped(publisher):
            publisher.publish([stored(keys[0]), stored([], medium="disk"), stored(keys[1])])  # type: ignore[arg-type]
            for key in keys[2:]:
                publisher.publish([stored(key)])
        expected = {"CPU": HELD | hashes(keys)}
        subscriber.replay_until(lambda messages: index_of(messages) == expected)
    assert publisher.snapshot()["dropped_event_batches_total"] == 1


def test_where_too_many_blocks_are_merged_they_are_cleared_and_counted(
    publisher: EventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv.stack.exporters.event_queue.QUEUE_KEYS_MAX", 8)
    monkeypatch.setattr("tiered_kv.stack.exporters.event_queue.MERGED_KEYS_MAX", 10)
    keys = make_keys(40)
    with Subscriber(publisher) as subscriber:
        with stopped(publisher):
            for start in range(0, len(keys), 4):
                publisher.publish([stored(*keys[start : start + 4])])
        messages = subscriber.replay_until(lambda messages: len(messages) > 2 and CLEARED in messages[2].events)
        settled = subscriber.replay_until(lambda messages: hashes(keys[-4:]) <= index_of(messages).get("CPU", set()))
    assert index_of(messages[:2]) == {"CPU": HELD}
    known = index_of(settled)["CPU"]
    dropped = publisher.snapshot()["dropped_event_batches_total"]
    assert dropped == 6
    assert known == hashes(keys[4 * dropped :])


class WatchedKeys(list[OffloadKey]):
    """Keys that note which threads read them."""

    readers: set[int] = set()  # noqa: RUF012  # shared by all of them, and emptied by the test

    def __iter__(self) -> Iterator[OffloadKey]:
        self.readers.add(threading.get_ident())
        return super().__iter__()


def test_a_step_merges_nothing(publisher: EventPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv.stack.exporters.event_queue.QUEUE_BATCHES_MAX", 2)
    WatchedKeys.readers.clear()
    keys = make_keys(40)
    with Subscriber(publisher) as subscriber:
        with stopped(publisher):
            for key in keys:
                publisher.publish([OffloadingEvent(WatchedKeys([key]), BLOCK_BYTES, "CPU", removed=False)])
        subscriber.replay_until(lambda messages: index_of(messages) == {"CPU": HELD | hashes(keys)})
    assert WatchedKeys.readers
    assert threading.get_ident() not in WatchedKeys.readers


@pytest.mark.parametrize("limit", ["UNMERGED_KEYS_MAX", "UNMERGED_BATCHES_MAX"])
def test_what_waits_too_long_to_be_merged_is_cleared_and_counted(
    limit: str, publisher: EventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"tiered_kv.stack.exporters.event_queue.{limit}", 4)
    keys = make_keys(9)
    with Subscriber(publisher) as subscriber:
        with stopped(publisher):
            for key in keys[:8]:
                publisher.publish([stored(key)])
        subscriber.replay_until(lambda messages: index_of(messages) == {} and len(messages) > 2)
        assert publisher.snapshot()["dropped_event_batches_total"] == 8
        publisher.publish([stored(keys[8])])
        subscriber.replay_until(lambda messages: index_of(messages) == {"CPU": hashes(keys[8:])})


def test_a_reset_among_merged_steps_is_published(publisher: EventPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv.stack.exporters.event_queue.QUEUE_BATCHES_MAX", 2)
    keys = make_keys(8)
    with Subscriber(publisher) as subscriber:
        with stopped(publisher):
            publisher.publish([stored(keys[1])])
            publisher.clear()
            for key in keys[2:]:
                publisher.publish([stored(key)])
        expected = {"CPU": hashes(keys[2:])}
        subscriber.replay_until(lambda messages: index_of(messages) == expected)


@pytest.mark.slow
def test_a_slow_subscriber_loses_messages_and_slows_no_other(publisher: EventPublisher) -> None:
    with Subscriber(publisher, queue=1) as slow, Subscriber(publisher) as subscriber:
        slow.connect(lambda: publisher.publish([stored(*make_keys(1))]))
        sent = publisher.snapshot()["event_messages_total"]
        messages = 5 * SUBSCRIBER_MESSAGES_MAX  # of some 5 kB
        publisher.publish([stored(*make_keys(MESSAGE_KEYS_MAX) * messages)])
        wait_until_sent(publisher, sent + messages)
        numbers = [message.number for message in subscriber.replay()]
        # One of those by which the slow one was connected may have been on its way.
        assert len(numbers) >= messages
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), (
            "all were sent, with the slow one connected"
        )
        got: list[int] = []
        while not got or got[-1] < numbers[0] + sent + messages:  # it goes on once it has read what was kept for it
            got.append(slow.connect(lambda: publisher.publish([stored(*make_keys(1))])).number)
        assert len(set(numbers) - set(got)) > 0, "it lost some"
        assert got == sorted(got)


# Errors.


@pytest.mark.parametrize("address", ["127.0.0.1:5557", "tcp://127.0.0.1", "udp://127.0.0.1:1", "tcp://a b:1", 5557])
def test_an_address_that_is_none_is_refused(address: object) -> None:
    with pytest.raises(ConfigError, match=r"events\.publish"):
        open_stack(stack_of(events={"publish": address}))


@pytest.mark.parametrize("library", ["zmq", "msgspec"])
def test_without_its_libraries_it_names_the_extra(library: str, replace_module: ReplaceModule) -> None:
    replace_module(library)
    with pytest.raises(MissingExtraError, match=r"'events' needs a library .*\(the extra 'events'\): .*'pyzmq"):
        EventPublisher(SETTINGS)


def test_an_address_in_use_is_named_and_nothing_stays_open() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"events\.replay: cannot listen at '{address}': Address"):
            open_stack(stack_of(events={"publish": ANY_PORT, "replay": address}))


def test_events_may_be_published_at_a_socket_in_a_directory_and_by_ipv6(tmp_path: Path) -> None:
    addresses = [f"ipc://{tmp_path}/events"]
    if socket.has_ipv6 and Path("/proc/net/if_inet6").exists():
        addresses.append("tcp://[::1]:*")
    for address in addresses:
        opened = EventPublisher(EventSettings(publish=address))
        with contextlib.closing(opened) as publisher, Subscriber(publisher) as subscriber:
            assert subscriber.connect(functools.partial(publisher.publish, [stored(*make_keys(1))])).events


@pytest.mark.parametrize("key", ["a word", "a word of more than twelve letters", 5, None])
def test_events_of_keys_that_are_none_are_dropped_and_the_others_are_published(
    key: Any, publisher: EventPublisher
) -> None:
    """As a third-party tier may publish."""
    keys = make_keys(2 * MESSAGE_KEYS_MAX)
    publisher.publish([stored(keys[0]), stored(*[key] * len(keys), medium="disk"), stored(*keys[1:])])
    with Subscriber(publisher) as subscriber:
        wanted = {"CPU": hashes(keys)}
        messages = subscriber.replay_until(lambda messages: index_of(messages) == wanted)
    assert all(len(event["block_hashes"]) <= MESSAGE_KEYS_MAX for message in messages[1:] for event in message.events)
    assert publisher.snapshot()["dropped_event_batches_total"] > 0


def test_a_publisher_is_closed_once_and_takes_events_no_more(publisher: EventPublisher) -> None:
    publisher.close()
    publisher.publish([stored(*make_keys(1))])
    publisher.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "tiered-kv-events"]


def cleared(messages: list[Message]) -> list[int]:
    """Return which messages say that all blocks were removed."""
    return [number for number, message in enumerate(messages) if message.events == [CLEARED]]


def wait_until_sent(publisher: EventPublisher, count: int) -> None:
    wait_until(lambda: publisher.snapshot()["event_messages_total"] >= count)
