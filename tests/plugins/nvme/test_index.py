"""The index's answers outlive changes of other blocks, and none outlives a change of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tiered_kv.base import OffloadKey
from tiered_kv.cpu.key_table import KeyTable
from tiered_kv.testing.rig import make_keys
from tiered_kv_nvme.index import BlockIndex


class ChangedMeanwhile(KeyTable):
    """A table that another thread changes after a reader has looked, and before it keeps the answer."""

    __slots__ = ("change",)

    def __init__(self) -> None:
        super().__init__()
        self.change: Callable[[], object] = list

    def __contains__(self, key: bytes) -> bool:
        found = super().__contains__(key)
        change, self.change = self.change, list
        change()
        return found


def test_an_answer_is_kept_until_its_block_is_added_or_removed() -> None:
    index, (first, second) = BlockIndex(), make_keys(2)
    assert not index.answers[first]
    assert not index.answers[second]
    index.add([first], 7)
    assert dict(index.answers) == {second: False}
    assert index.answers[first]
    assert index.drop(first, 7)
    assert not index.answers[first]
    index.clear()
    assert not dict(index.answers)


@pytest.mark.parametrize("is_added", [True, False])
def test_an_answer_from_before_a_change_is_not_kept(is_added: bool) -> None:
    index, table, (key,) = BlockIndex(), ChangedMeanwhile(), make_keys(1)
    index.use(table)

    def change() -> None:
        if is_added:
            index.add([key], 7)
        else:
            index.drop(key, 7)

    if not is_added:
        index.add([key], 7)
    table.change = change
    assert index.answers[key] is not is_added  # it was so when it was asked
    assert index.answers[key] is is_added


def test_answers_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv_nvme.index.ANSWERS_MAX", 4)
    index, keys = BlockIndex(), make_keys(9)
    assert not any(index.answers[OffloadKey(key)] for key in keys)
    assert len(index.answers) == 1
