"""A trace's fields mean what its publisher says: units of time, sessions; and what cannot be read is named."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workload.test_simulation import stack_of
from tiered_kv.cpu.policies import CachePolicy
from tiered_kv.errors import ConfigError
from tiered_kv.workload.hit_rates import hit_curve, hit_rate
from tiered_kv.workload.request import ChatWorkload, Request, hints_from_sessions
from tiered_kv.workload.simulation import Fleet, routes, simulate
from tiered_kv.workload.trace import read_trace


def read(path: Path, *lines: dict[str, object], time_unit: str = "") -> list[Request]:
    path.write_text("\n".join(json.dumps({"input_length": 1, "hash_ids": [1], **line}) for line in lines))
    return list(read_trace(path, time_unit=time_unit))


@pytest.mark.parametrize(
    ("line", "time_unit", "milliseconds"),
    [
        ({}, "", 7),
        ({}, "s", 7250),
        ({}, "ms", 7),
        ({"session_id": "a"}, "", 7),
        ({"chat_id": 5}, "", 7),
        ({"chat_id": 5, "parent_chat_id": -1}, "", 7250),
        ({"chat_id": 5, "parent_chat_id": -1}, "ms", 7),
    ],
)
def test_the_unit_of_time_is_the_option_s_or_that_of_the_trace(
    tmp_path: Path, line: dict[str, object], time_unit: str, milliseconds: int
) -> None:
    (request,) = read(tmp_path / "trace", {"timestamp": 7.25, **line}, time_unit=time_unit)
    assert request.timestamp_ms == milliseconds


def test_a_session_is_named_by_a_field_or_by_the_first_chat_of_a_chain(tmp_path: Path) -> None:
    named: list[dict[str, object]] = [
        {"session": "s", "session_id": "other"},
        {"session_id": 3},
        {"chat_id": 10, "parent_chat_id": -1},
        {"chat_id": 11, "parent_chat_id": 10},
        {"chat_id": 12, "parent_chat_id": 11},
        {"chat_id": 13, "parent_chat_id": 99},
        {},
    ]
    requests = read(tmp_path / "trace", *({"timestamp": 1, **each} for each in named))
    assert [request.session for request in requests] == ["s", "3", "10", "10", "10", "13", ""]


def test_a_named_session_stays_on_its_server_and_returns_as_such() -> None:
    requests = [
        Request(1000 * turn + number, 512, 1, (0, *range(100 * number, 100 * number + turn)), f"session {number}")
        for turn in range(1, 4)
        for number in range(1, 25)
    ]
    servers = list(routes("sticky", requests, 4))
    assert all(
        len({server for server, each in zip(servers, requests, strict=True) if each.session == name}) == 1
        for name in {each.session for each in requests}
    )
    assert len(set(servers)) == 4, "although all share their first block"
    assert [each.hints for each in hints_from_sessions(requests)].count({"ttl": 0}) == 24, "each session ends once"


@given(seed=st.integers(0, 1000), size=st.integers(60, 400))
def test_lru_hits_what_the_shortest_lru_hits(seed: int, size: int) -> None:
    requests = list(ChatWorkload(seed=seed, chats=12, turns=4, active_chats=4).requests())
    held, hits = OrderedDict[int, None](), 0
    for request in requests:
        known = next((at for at, each in enumerate(request.hash_ids) if each not in held), len(request.hash_ids))
        hits += known
        for each in reversed(request.hash_ids):  # the head is the newest
            held[each] = None
            held.move_to_end(each)
        while len(held) > size:
            held.popitem(last=False)
    curve = hit_curve(requests)
    assert hit_rate("lru", size, requests, curve).hit_rate == pytest.approx(hits / curve.blocks, abs=1e-6)


class Failing(CachePolicy):
    """Does nothing, which a policy must not."""

    def __len__(self) -> int:
        return 0

    def add(self, rows: object) -> None:
        pass

    remove = add

    def use(self, rows: object, chain: object) -> None:
        pass

    def evict(self, count: int, step: int, spare: object = None) -> None:
        raise RuntimeError("a fault")


def test_the_figures_of_a_failed_policy_are_not_its_own() -> None:
    requests, name = list(ChatWorkload(chats=20).requests()), f"{__name__}:Failing"
    found = hit_rate(name, 60, requests, hit_curve(requests))
    assert found.policy_error.startswith("use raised ValueError: ")
    assert hit_rate("arc", 60, requests, hit_curve(requests)).policy_error == ""
    config = stack_of(blocks=60)
    config = config.model_copy(update={"primary": config.primary.model_copy(update={"policy": name})})
    assert simulate(config, requests, Fleet(servers=2)).policy_error == found.policy_error


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"timestamp": 1_700_000_000}, "like seconds since 1970.*--time-unit s"),
        ({"timestamp": 1_700_000_000.5, "session_id": "a"}, "like seconds since 1970.*--time-unit s"),
        ({"timestamp": 1_700_000_000_000_000}, "timestamp: expected seconds or milliseconds: divide"),
        ({"timestamp": 1_700_000_000_000_000_000}, "timestamp: expected seconds or milliseconds: divide"),
        ({"timestamp": 1, "delay": 1e18}, "delay: expected seconds or milliseconds: divide"),
    ],
)
def test_a_time_of_another_unit_is_an_error_that_says_what_to_do(
    tmp_path: Path, line: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(tmp_path / "trace", line)


def test_seconds_since_1970_are_read_where_the_unit_is_known_or_given(tmp_path: Path) -> None:
    since: dict[str, object] = {"timestamp": 1_700_000_000}
    assert read(tmp_path / "trace", since, time_unit="ms")[0].timestamp_ms == 1_700_000_000
    for line, unit in ((since, "s"), ({**since, "chat_id": 1, "parent_chat_id": -1}, "")):
        assert read(tmp_path / "trace", line, time_unit=unit)[0].timestamp_ms == 1_700_000_000_000
    long = read(tmp_path / "trace", {"timestamp": 0}, since)
    assert long[1].timestamp_ms == 1_700_000_000, "a trace of 20 days"


def test_what_turns_add_has_to_come_in_the_order_of_time(tmp_path: Path) -> None:
    later: dict[str, object] = {"session_id": "a", "timestamp": 2000, "hash_ids": [1]}
    earlier: dict[str, object] = {"session_id": "a", "timestamp": 1000, "hash_ids": [2]}
    with pytest.raises(ConfigError, match="turns of a session in the order of their times"):
        read(tmp_path / "trace", later, earlier)
    whole: dict[str, object] = {"context_mode": "message_array_with_responses"}
    assert len(read(tmp_path / "trace", {**later, **whole}, {**earlier, **whole})) == 2


def test_a_text_of_a_number_beyond_64_bits_is_an_id(tmp_path: Path) -> None:
    ids = ["99999999999999999999", "18446744073709551616", "18446744073709551615"]
    (request,) = read(tmp_path / "trace", {"timestamp": 0, "hash_ids": ids})
    assert len(set(request.hash_ids)) == 3
    assert request.hash_ids[2] == 2**64 - 1
