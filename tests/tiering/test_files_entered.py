"""How many files a block crosses in its life, and a step's end with nothing to do: a reader has to follow them all."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tests.support.stacks import stack_of
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.stack.facade import rows_of
from tiered_kv.stack.open import EngineStack, open_engine_stack
from tiered_kv.testing.rig import make_keys

ROOT = Path(__file__).parents[2]
ROOMS = tuple(f"{ROOT / room}/" for room in ("tiered_kv", "plugins"))
AT_AN_IDLE_STEP_S_END = 7
IN_THE_SCHEDULER_S_THREAD = 30
IN_ALL_THREADS = 48
(KEY,) = make_keys(1)


class Files:
    """The files of this project whose functions were called while it was on, by thread."""

    def __init__(self) -> None:
        self.is_on = False
        self.by_thread: dict[int, set[str]] = {}

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        if self.is_on and event == "call" and frame.f_code.co_filename.startswith(ROOMS):
            self.by_thread.setdefault(threading.get_ident(), set()).add(frame.f_code.co_filename)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what is called meanwhile, in this thread and in those that begin meanwhile."""
        before = threading.getprofile()
        threading.setprofile(self.note)
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(before)

    def of(self, call: Callable[..., object], *arguments: object) -> object:
        self.is_on = True
        try:
            return call(*arguments)
        finally:
            self.is_on = False

    @property
    def own(self) -> set[str]:
        return self.by_thread.get(threading.get_ident(), set())


def opened(directory: Path) -> EngineStack:
    return open_engine_stack(stack_of({"type": "nvme", "path": str(directory), "capacity": "64MiB"}, blocks=64))


def end_jobs(stack: EngineStack, files: Files) -> None:
    while stack.manager.jobs_in_flight:
        files.of(stack.manager.on_schedule_end)


def test_a_step_s_end_with_nothing_to_do_enters_few_files(tmp_path: Path) -> None:
    with opened(tmp_path) as stack:
        store(stack, Files(), [KEY])
        stack.manager.on_schedule_end()
        files = Files()
        with files.noted():
            files.of(stack.manager.on_schedule_end)
        assert len(files.own) <= AT_AN_IDLE_STEP_S_END, sorted(files.own)


def store(stack: EngineStack, files: Files, keys: list[OffloadKey]) -> None:
    manager, request = stack.manager, ReqContext("first")
    files.of(manager.on_new_request, request)
    assert files.of(manager.lookup, keys[0], request) is False
    output = files.of(manager.prepare_store, keys, request)
    stack.region.array[rows_of(output.store_spec)] = 7  # type: ignore[attr-defined]  # as `prepare_store` returns
    files.of(manager.complete_store, keys, request)
    end_jobs(stack, files)
    files.of(manager.on_request_finished, request)


def load(stack: EngineStack, files: Files, keys: list[OffloadKey]) -> None:
    manager, request = stack.manager, ReqContext("second")
    files.of(manager.on_new_request, request)
    assert files.of(manager.lookup, keys[0], request) is None
    files.of(manager.on_schedule_end)
    end_jobs(stack, files)
    assert files.of(manager.lookup, keys[0], request) is True
    spec = files.of(manager.prepare_load, keys, request)
    assert (stack.region.array[rows_of(spec)] == 7).all()
    files.of(manager.complete_load, keys, request)
    files.of(manager.on_request_finished, request)


def test_a_block_s_whole_life_crosses_few_files(tmp_path: Path) -> None:
    files = Files()
    for act in (store, load):
        with files.noted(), opened(tmp_path) as stack:
            act(stack, files, [KEY])
    assert len(files.own) <= IN_THE_SCHEDULER_S_THREAD, sorted(files.own)
    everywhere = set[str]().union(*files.by_thread.values())
    assert len(everywhere) <= IN_ALL_THREADS, sorted(everywhere)
