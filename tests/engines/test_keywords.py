"""A keyword that a newer engine passes is a warning, and reaches the engine's own class if that takes it."""

from __future__ import annotations

from abc import ABC
from typing import Any

import pytest

from tiered_kv.engines.keywords import known_to_base


class Plain(ABC):  # noqa: B024 - as SGLang's class, without a constructor
    """A base without a constructor."""


class Named:
    """A base of a newer release, which takes one keyword more."""

    def __init__(self, config: object, newer: int = 0) -> None:
        self.newer = newer


class Open:
    """A base that takes any keyword."""

    def __init__(self, **named: Any) -> None:
        self.named = named


@pytest.mark.parametrize(("base", "passed_on"), [(Plain, {}), (Named, {"newer": 1}), (Open, {"newer": 1, "other": 2})])
def test_an_unknown_keyword_is_a_warning(
    base: type, passed_on: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    ours = type("Ours", (base,), {})
    unknown = {"newer": 1, "other": 2}
    found = known_to_base(ours, unknown)
    assert found == passed_on
    for name in unknown:
        where = f"passed on to {base.__name__}" if name in found else "without effect"
        assert f"Ours got the keyword '{name}', which this tiered_kv does not know: {where}" in caplog.text


def test_the_keywords_of_today_are_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert known_to_base(type("Ours", (Named,), {}), {}) == {}
    assert caplog.text == ""
