"""The thread that stores prompts: an interrupted call takes no room for good, and holds no lock."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.support.interrupt_cases import BLOCKS, CONTENT, WAIT_S, new_keys
from tests.support.interrupts import interrupts
from tests.support.stacks import stack_of
from tiered_kv.buffers import Blocks
from tiered_kv.integrations.transformers.saver import Saver
from tiered_kv.stack import open_stack


def copied(blocks: int) -> Blocks:
    return CONTENT[:blocks].copy()


def test_an_interrupted_save_takes_no_room_for_good_and_holds_no_lock() -> None:
    lost: list[bool] = []
    with open_stack(stack_of(blocks=BLOCKS)) as stack, ThreadPoolExecutor(1) as other:
        saver = Saver(stack, BLOCKS, WAIT_S)

        def save(blocks: int) -> int:
            return saver.save(new_keys(blocks), copied, lambda: lost.append(True), stack.epoch)

        def check() -> None:
            assert saver.wait(WAIT_S)
            before = saver.counts()
            assert save(BLOCKS) == BLOCKS, "room is taken"
            assert saver.wait(WAIT_S)
            assert saver.counts() == (before[0] + BLOCKS, before[1], 0)

        count = 0
        for _ in interrupts(lambda: lambda: save(2), where_handlers_run=True):
            other.submit(check).result(2 * WAIT_S)
            count += 1
        other.submit(check).result(2 * WAIT_S)
        assert count >= 10
        assert lost
        saver.stop(WAIT_S)
