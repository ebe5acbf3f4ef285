"""One worker at a time in the interpreter."""

from __future__ import annotations

import threading

import pytest

from tiered_kv.toolkit.turn import Turn

WAIT_S = 30.0


def test_only_one_thread_has_its_turn_and_a_pause_lets_others_in() -> None:
    turn = Turn()
    paused, entered, may_leave = threading.Event(), threading.Event(), threading.Event()
    order: list[str] = []

    def first() -> None:
        with turn:
            order.append("first begins")
            with turn.paused():
                paused.set()
                assert entered.wait(WAIT_S)
            order.append("first goes on")

    def second() -> None:
        assert paused.wait(WAIT_S)
        with turn:
            entered.set()
            order.append("second begins")
            assert may_leave.wait(WAIT_S)
            order.append("second ends")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    assert entered.wait(WAIT_S)
    may_leave.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert order == ["first begins", "second begins", "second ends", "first goes on"]


def test_a_thread_without_a_turn_pauses_nothing() -> None:
    turn = Turn()
    with turn.paused(), turn:
        pass
    with turn:
        other = threading.Thread(target=lambda: turn.paused().__enter__())
        other.start()
        other.join(WAIT_S)
        assert turn._lock.locked(), "it is not the other thread's to give up"


def test_an_error_gives_the_turn_up() -> None:
    turn = Turn()
    with pytest.raises(OSError, match="disk"), turn, turn.paused():
        raise OSError("disk")
    assert not turn._lock.locked()
