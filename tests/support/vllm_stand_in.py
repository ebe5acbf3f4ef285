"""A stand-in for vLLM: the names that our plugin imports, and as much behaviour as one block's life needs.

Tests that call `tiered_kv_vllm` without vLLM import it within `vllm_stand_in`. Whatever is asked of vLLM itself belongs
into the programs of `tests/plugins/vllm`, which run in environments that have it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

PLUGIN = "tiered_kv_vllm"
_DIRECTORY = Path(__file__).parents[2] / "plugins" / PLUGIN


class OffloadingConnector:
    """The base of our connector, which here does nothing of its own."""

    connector_scheduler: Any

    def on_new_request(self, request: Any) -> None:
        """As vLLM's, which tells the manager."""
        self.connector_scheduler.manager.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """As vLLM's, which looks the keys up: None while one of them may still come."""
        hits, keys = 0, request.keys[num_computed_tokens // request.block_tokens :]
        for key in keys:
            answer = self.connector_scheduler.manager.lookup(key, request)
            if answer.name == "MISS":
                break
            if answer.name != "HIT":
                return None, False
            hits += 1
        return hits * request.block_tokens, bool(hits)

    def build_connector_meta(self, scheduler_output: Any) -> None:
        """As vLLM's, which ends the manager's step."""
        self.connector_scheduler.manager.on_schedule_end(scheduler_output)


class TierFilter:
    """Which tiers a request may load from: all."""

    ALL: TierFilter


TierFilter.ALL = TierFilter()


class TransferResult(NamedTuple):
    """What a worker reports of a transfer."""

    job_id: int
    success: bool
    transfer_size: int
    transfer_time: float


class _Named:
    """A member of one of vLLM's enumerations."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Names(type):
    """Gives a class each member that it is asked for."""

    def __getattr__(cls, name: str) -> _Named:
        if name.startswith("_"):
            raise AttributeError(name)
        member = _Named(name)
        setattr(cls, name, member)
        return member


def _take_anything(_self: object, *_arguments: object, **_named: object) -> None:
    """Make an object of a class that only has to be there."""


_WITH_BEHAVIOUR = {each.__name__: each for each in (OffloadingConnector, TierFilter, TransferResult)}


class _StandIn(ModuleType):
    """A module that has each name: a class of that name."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _WITH_BEHAVIOUR.get(name) or _Names(name, (), {"__init__": _take_anything})
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    """Finds a stand-in for each of vLLM's modules."""

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "vllm" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: a stand-in makes its names when they are asked for."""


@contextmanager
def vllm_stand_in() -> Iterator[None]:
    """Let `tiered_kv_vllm` be imported without vLLM; afterwards neither has been imported."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ("vllm", PLUGIN)}
    for name in before:
        del sys.modules[name]
    plugin = ModuleType(PLUGIN)  # without its `__init__`, which asks for the installed version
    plugin.__path__ = [str(_DIRECTORY)]
    sys.modules[PLUGIN] = plugin
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("vllm", PLUGIN)]:
            del sys.modules[name]
        sys.modules.update(before)
