"""How many files a block crosses in its life, and a step's end with nothing to do: a reader has to follow them all."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from tests.support.stacks import stack_of
from tests.support.vllm_stand_in import TierFilter, vllm_stand_in
from tiered_kv.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadKey,
    ReqContext,
    get_offload_block_hash,
)
from tiered_kv.stack.open import EngineStack, open_engine_stack
from tiered_kv.testing.rig import make_keys
from tiered_kv.tiering import uses

ROOT = Path(__file__).parents[2]
ROOMS = tuple(f"{ROOT / room}/" for room in ("tiered_kv", "plugins"))
AT_AN_IDLE_STEP_S_END = 10
IN_ALL_THREADS = 62
"""vLLM's side, its worker's, and those of the threads of the tier included: as many of them as run meanwhile."""
BLOCKS = 16
BLOCK_TOKENS = 16
BLOCK_BYTES = 4096


class Files:
    """The files of this project whose functions are called: by `of` in the test's thread, and always in others."""

    def __init__(self) -> None:
        self.is_in_call = self.is_on = False
        self.own: set[str] = set()
        """Of the test's thread."""
        self.others: set[str] = set()
        self._thread = threading.get_ident()

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_code.co_filename
        if self.is_on and event == "call" and name.startswith(ROOMS):
            if threading.get_ident() != self._thread:
                self.others.add(name)
            elif self.is_in_call:
                self.own.add(name)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what is called meanwhile, in this thread and in those that begin meanwhile, once it `is_on`."""
        before = threading.getprofile()
        threading.setprofile(self.note)
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(before)

    def of(self, call: Callable[..., Any], *arguments: object) -> Any:
        self.is_in_call = self.is_on = True
        try:
            return call(*arguments)
        finally:
            self.is_in_call = False

    @property
    def all(self) -> list[str]:
        return sorted(name.removeprefix(f"{ROOT}/") for name in self.own | self.others)


class Request(ReqContext):
    """A request as vLLM's scheduler has it, and as its connector names it to a manager."""

    load_tier_filter = TierFilter.ALL
    skip_reading_prefix_cache = False
    block_tokens = BLOCK_TOKENS

    def __init__(self, name: str, keys: Sequence[OffloadKey]) -> None:
        super().__init__(name)
        self.request_id, self.keys = name, list(keys)
        self.block_hashes = [get_offload_block_hash(key) for key in keys]
        self.num_tokens = len(keys) * BLOCK_TOKENS


class Engine:
    """vLLM's scheduler and its worker, as far as they call our plugin."""

    def __init__(self, stack: EngineStack, files: Files) -> None:
        torch: Any = pytest.importorskip("torch")
        of_plugin = {
            name: importlib.import_module(f"tiered_kv_vllm.{name}") for name in ("manager", "connector", "spec")
        }
        self.stack, self.files = stack, files
        self.manager: Any = of_plugin["manager"].TieredKVManager(stack, has_events=False, flush_steps=None)
        self.device = torch.zeros((BLOCKS, BLOCK_BYTES), dtype=torch.uint8)
        handlers = importlib.import_module("tiered_kv.worker.handlers").open_handlers(
            CanonicalKVCaches(
                [CanonicalKVCacheTensor(self.device, BLOCK_BYTES)], [[CanonicalKVCacheRef(0, BLOCK_BYTES)]]
            ),
            stack.region,
        )
        self.worker: Any = of_plugin["spec"].HandlerWorker(handlers)
        group = SimpleNamespace(sliding_window_size_in_chunks=None, hashes_per_chunk=1, group_idx=0)
        connector_class: Any = of_plugin["connector"].TieredKVConnector
        self.connector: Any = connector_class.__new__(connector_class)
        config = SimpleNamespace(kv_group_configs=[group], supports_partial_tail=False)
        self.connector.connector_scheduler = SimpleNamespace(manager=self.manager, config=config)
        self.connector._tiered_kv, self.connector._gpu_is_outdated = self.manager, False
        pool = SimpleNamespace(get_cached_block=lambda *_: None)
        self.connector._kv_cache_manager = SimpleNamespace(block_pool=pool)
        self.jobs = 0

    def step(self) -> None:
        running = SimpleNamespace(req_ids=[], num_computed_tokens=[])
        output = SimpleNamespace(
            scheduled_cached_reqs=running,
            scheduled_new_reqs=[],
            num_scheduled_tokens={},
            finished_req_ids=set(),
            preempted_req_ids=(),
        )
        self.files.of(self.connector.build_connector_meta, output)

    def settle(self) -> None:
        while self.stack.manager.jobs_in_flight:
            self.step()
            time.sleep(0.0005)

    def find(self, request: Request) -> int:
        """Look a request's blocks up, step by step until none may still come; return how many tokens were found."""
        while True:
            found, _ = self.files.of(self.connector.get_num_new_matched_tokens, request, 0)
            if found is not None:
                return int(found)
            self.step()

    def copy(self, submit: str, source: object, destination: object) -> None:
        self.jobs += 1
        self.files.of(getattr(self.worker, submit), self.jobs, source, destination)
        self.files.of(self.worker.wait, {self.jobs})
        (result,) = self.files.of(self.worker.get_finished)
        assert result.success

    def store(self, name: str, keys: Sequence[OffloadKey]) -> None:
        """A request that finds nothing, computes its blocks, and stores them."""
        request = Request(name, keys)
        self.files.of(self.connector.on_new_request, request)
        self.step()
        assert self.find(request) == 0
        output = self.files.of(self.manager.prepare_store, request.keys, request)
        assert len(output.keys_to_store) == len(keys)
        blocks = list(range(len(keys)))
        self.copy("submit_store", GPULoadStoreSpec(blocks, [len(keys)]), output.store_spec)
        self.files.of(self.manager.complete_store, set(output.keys_to_store), request)
        self.step()
        self.files.of(self.manager.on_request_finished, request)
        self.settle()

    def load(self, name: str, keys: Sequence[OffloadKey]) -> None:
        """A request that finds its blocks, in whichever tier, and loads them."""
        request = Request(name, keys)
        self.files.of(self.connector.on_new_request, request)
        self.step()
        self.settle()
        assert self.find(request) == request.num_tokens
        spec = self.files.of(self.manager.prepare_load, request.keys, request)
        self.copy("submit_load", spec, GPULoadStoreSpec(list(range(len(keys))), [len(keys)]))
        self.files.of(self.manager.complete_load, set(request.keys), request)
        self.step()
        self.files.of(self.manager.on_request_finished, request)
        self.settle()

    def close(self) -> None:
        self.worker.shutdown()


@pytest.fixture
def files() -> Files:
    return Files()


@pytest.fixture
def engine(tmp_path: Path, files: Files) -> Iterator[Engine]:
    tier = {"type": "nvme", "path": str(tmp_path), "capacity": "64MiB"}
    config = stack_of(tier, blocks=BLOCKS, block={"tokens": BLOCK_TOKENS})
    with vllm_stand_in(), files.noted(), open_engine_stack(config) as stack:
        engine = Engine(stack, files)
        yield engine
        engine.close()


def test_a_step_s_end_with_nothing_to_do_enters_few_files(
    engine: Engine, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uses, "INTERVAL_S", 3600.0)  # its end would have something to do
    engine.store("first", make_keys(1))
    entered: list[set[str]] = []
    for _ in range(8):  # four times a second a step also tells the tiers which blocks were used
        files.own.clear()
        engine.step()
        entered.append(files.own.copy())
    fewest = min(entered, key=len)
    assert len(fewest) <= AT_AN_IDLE_STEP_S_END, sorted(fewest)


def test_a_block_s_whole_life_crosses_few_files(engine: Engine, files: Files) -> None:
    """Lookup, store, copy from the device, cascade, eviction, promotion, load, copy to the device."""
    first, *others = make_keys(1 + BLOCKS)
    engine.store("before", make_keys(BLOCKS, "before"))  # so that no row and no segment is new
    files.own.clear()
    files.others.clear()
    engine.device[:] = 7
    engine.store("first", [first])
    engine.store("others", others)
    assert not engine.stack.manager.has_row(first, ReqContext("first"))
    engine.device[:] = 0
    engine.load("second", [first])
    assert (engine.device[0] == 7).all()
    assert engine.stack.history is not None
    files.of(engine.stack.history.settle)
    assert len(files.all) <= IN_ALL_THREADS, files.all
