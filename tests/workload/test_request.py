"""The built-in workload: reproducible chats that share what they should."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from tiered_kv.errors import ConfigError
from tiered_kv.workload.request import BLOCK_TOKENS, ChatWorkload, Request

SMALL = ChatWorkload(chats=10, turns=4, active_chats=3, turn_blocks=2, system_prompts=2, system_blocks=5)


def chats_of(workload: ChatWorkload) -> dict[int, list[Request]]:
    """The requests of each chat, by the first block after the system prompt."""
    chats: dict[int, list[Request]] = {}
    for request in workload.requests():
        chats.setdefault(request.hash_ids[workload.system_blocks], []).append(request)
    return chats


def test_another_process_gives_the_same_requests() -> None:
    program = "from tiered_kv.workload.request import ChatWorkload as W; print(list(W(chats=3).requests()))"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.strip() == str(list(ChatWorkload(chats=3).requests()))


def test_another_seed_shares_no_block() -> None:
    def blocks(seed: int) -> set[int]:
        return {id for request in ChatWorkload(seed=seed, chats=5).requests() for id in request.hash_ids}

    assert not blocks(0) & blocks(1)


def test_there_are_as_many_requests_as_announced() -> None:
    requests = list(SMALL.requests())
    assert len(requests) == SMALL.requests_total == 40
    chats = chats_of(SMALL)
    assert len(chats) == 10
    assert {len(turns) for turns in chats.values()} == {4}


def test_each_turn_has_the_one_before_as_prefix() -> None:
    for turns in chats_of(SMALL).values():
        for earlier, later in itertools.pairwise(turns):
            assert later.hash_ids[: len(earlier.hash_ids)] == earlier.hash_ids
            assert 1 <= len(later.hash_ids) - len(earlier.hash_ids) <= 3
            assert later.timestamp_ms > earlier.timestamp_ms
            assert later.input_length == len(later.hash_ids) * BLOCK_TOKENS


def test_chats_share_system_prompts_and_nothing_else() -> None:
    last_turns = [turns[-1].hash_ids for turns in chats_of(SMALL).values()]
    assert len({ids[:5] for ids in last_turns}) == 2
    own = [id for ids in last_turns for id in ids[5:]]
    assert len(own) == len(set(own))


def test_as_many_chats_are_active_as_asked_for() -> None:
    seen: dict[int, int] = {}
    for request in SMALL.requests():
        seen[request.hash_ids[5]] = seen.get(request.hash_ids[5], 0) + 1
        assert sum(turns < SMALL.turns for turns in seen.values()) <= 3


@pytest.mark.parametrize("name", ["chats", "turns", "active_chats", "turn_blocks", "system_prompts"])
def test_a_number_out_of_its_range_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: expected at least 1, found 0"):
        ChatWorkload(**{name: 0})
