"""Hints in the envelope of vLLM 0.33, SGLang 0.5.23 and Dynamo."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tiered_kv.base import ReqContext
from tiered_kv.hints import ACTIONS_MAX, HintReader, Hints

RANGES = [
    {"end": 32, "priority": 90},
    {"start": 32, "priority": 50, "duration": 60.0},
    {"covers_output": True, "priority": 0},
]


@dataclass
class Action:
    """As the engines' KvHintAction."""

    action_type: str
    payload: Any = field(default_factory=dict)
    action_version: str = "1.0"
    action_id: str = "a"


@dataclass
class Envelope:
    """As the engines' KvHintsEnvelope."""

    actions: Any
    protocol_version: str = "0.1"
    message_id: str = "m"


@pytest.mark.parametrize(
    ("action", "meant"),
    [
        (Action("kv.retain", {"directives": RANGES}), Hints(priority=1, ttl_s=60.0)),
        (Action("kv.retain", {"directives": [{"priority": 0}]}), Hints(ttl_s=0)),
        (
            Action("kv.retain", {"directives": [{"start": None, "priority": 0}, {"start": 9, "priority": 1}]}),
            Hints(priority=1),
        ),
        (
            Action("kv.retain", {"directives": None, "priority": 5, "duration": None, "ttl_seconds": 60}),
            Hints(priority=1, ttl_s=60.0),
        ),
        (Action("kv.retain", {"directives": [{"priority": 0}, {"priority": 1}]}), Hints(priority=1)),
        (Action("kv.retain", {"priority": 7, "ttl_seconds": 30 * 86400}), Hints(priority=1, ttl_s=604_800)),
        (Action("kv.retain", {"priority": 7, "block_hashes": [1], "include_current_request": True}), Hints(priority=1)),
        (Action("kv.deref"), Hints(ttl_s=0)),
        (Action("kv.evict", {"block_hashes": [], "include_current_request": True}), Hints(ttl_s=0)),
        (Action("tiered_kv.hints", {"expect_return": 20, "skip": "load"}), Hints(expect_return_s=20, skips_load=True)),
    ],
)
def test_actions_of_an_envelope_mean_our_hints(action: Action, meant: Hints) -> None:
    unknown = [Action("kv.demote", {"session_id": "other"}), Action("kv.future"), Action("kv.deref", {}, "2.0")]
    json_form = {"actions": [vars(each) for each in [*unknown, action]]}
    for context in (
        ReqContext("a", kv_hints=Envelope([*unknown, action])),
        ReqContext("a", kv_hints=json_form),
        ReqContext("a", {"kv_hint": json_form}),
    ):
        reader = HintReader()
        assert reader.read(context) == meant
        assert (reader.hinted, reader.refused, reader.ignored_actions) == (1, 0, 3)


def test_an_envelope_without_a_known_action_is_no_hint_and_a_request_s_own_hints_come_first() -> None:
    reader = HintReader()
    fetch = Action("kv.fetch", {"source_control_endpoint": "tcp://peer:1", "block_hashes": [1]})
    others = Action("kv.evict", {"block_hashes": [1]})
    assert reader.read(ReqContext("a", kv_hints=Envelope([fetch, others, Action("kv.prefetch")]))) is None
    assert (reader.hinted, reader.refused, reader.ignored_actions) == (0, 0, 2)
    for ranges in ([], [{"covers_output": True, "priority": 90}]):  # of the prompt it says nothing
        assert reader.read(ReqContext("a", kv_hints=Envelope([Action("kv.retain", {"directives": ranges})]))) is None
    retained = Envelope([Action("kv.retain", {"priority": 1, "duration": 9})])
    assert reader.read(ReqContext("a", {"tiered_kv": {"ttl": 5}}, retained)) == Hints(priority=1, ttl_s=5)
    assert HintReader(["skip"]).read(ReqContext("a", kv_hints=retained)) == Hints()
    assert HintReader([]).read(ReqContext("a", kv_hints=retained)) is None


@pytest.mark.parametrize(
    "envelope",
    [
        "text",
        {"actions": 7},
        Envelope([Action("kv.deref")] * (ACTIONS_MAX + 1)),
        Envelope([Action("kv.retain", {"priority": "high"})]),
        Envelope([Action("kv.retain", {"priority": 1, "duration": "long"})]),
        Envelope([Action("kv.retain", {"directives": 7})]),
        Envelope([Action("kv.retain", {"directives": ["all"]})]),
        Envelope([Action("kv.deref", "none")]),
        Envelope([Action("tiered_kv.hints", {"expect_return": -1})]),
    ],
)
def test_an_envelope_that_cannot_be_read_is_refused(envelope: Any) -> None:
    reader = HintReader()
    assert reader.read(ReqContext("a", kv_hints=envelope)) is None
    assert (reader.hinted, reader.refused) == (0, 1)
