"""Hints are read strictly: a wrong one raises no error, and is counted once."""

from __future__ import annotations

import logging
import math

import pytest

from tests.support.stacks import stack_of
from tiered_kv.errors import ConfigError
from tiered_kv.hints import HINTS_KEY, SECONDS_MAX, HintReader, Hints
from tiered_kv.stack_config import load_config

STACK = stack_of()


def test_every_hint_is_read() -> None:
    said = {"priority": 1, "ttl": 600, "expect_return": 0.5, "skip": "store"}
    assert Hints.parse(said) == Hints(1, 600, 0.5, skips_store=True)
    assert Hints.parse({"skip": ["load", "store"]}) == Hints(skips_store=True, skips_load=True)
    assert Hints.parse({"ttl": None, "skip": []}) == Hints.parse({}) == Hints()


@pytest.mark.parametrize(
    "said",
    [
        "priority",
        ["priority"],
        {"prioritty": 1},
        {1: 1},
        {"priority": 2},
        {"priority": True},
        {"priority": 1.0},
        {"priority": "high"},
        {"ttl": -1},
        {"ttl": SECONDS_MAX + 1},
        {"ttl": math.nan},
        {"ttl": math.inf},
        {"expect_return": "5s"},
        {"expect_return": 10**400},
        {"expect_return": False},
        {"skip": "everything"},
        {"skip": {"store": True}},
        {"skip": [["store"]]},
        {"skip": True},
        {"priority": 1, "ttl": "soon"},
    ],
    ids=repr,
)
def test_hints_that_cannot_be_used_are_none_and_are_counted(said: object) -> None:
    reader = HintReader()
    assert reader.read({HINTS_KEY: said}) is None
    assert (reader.hinted, reader.refused) == (0, 1)


def test_only_the_first_refusal_is_logged_and_repeats_nothing_of_the_client(caplog: pytest.LogCaptureFixture) -> None:
    reader = HintReader()
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            reader.read({HINTS_KEY: {"my secret\n": "my secret\n"}})
    assert reader.refused == 3
    (record,) = caplog.records
    assert "secret" not in record.getMessage()


def test_other_parameters_are_ignored() -> None:
    reader = HintReader()
    assert reader.read(None) is reader.read({}) is reader.read({"do_remote_prefill": True, "ttl": "x"}) is None
    assert reader.read(["no mapping"]) is None  # type: ignore[arg-type]  # an engine may pass on whatever it got
    assert (reader.hinted, reader.refused) == (0, 0)


def test_the_stack_s_file_says_which_hints_count() -> None:
    said = {HINTS_KEY: {"priority": 1, "ttl": 60, "skip": "load"}}
    some, none = (load_config({**STACK, "hints": names}).hints for names in (["ttl", "skip"], []))
    assert HintReader(some).read(said) == Hints(0, 60, skips_load=True)
    assert HintReader(none).read(said) is None
    assert HintReader(load_config(STACK).hints).read(said) == Hints(1, 60, skips_load=True)
    with pytest.raises(ConfigError, match=r"hints\.0"):
        load_config({**STACK, "hints": ["lifetime"]})
