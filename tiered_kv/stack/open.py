"""Opening a stack: it wires everything from one configuration.

A program or an engine calls `open_stack` or `open_engine_stack`, on any thread. Everything that an opening has begun is
closed again if a later step fails. After `close` no thread, descriptor or mapping of the stack is left.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from tiered_kv.base import OffloadKey
from tiered_kv.config.limits import TenantLimits
from tiered_kv.config.secrets import error_text
from tiered_kv.config.settings import TierSettings
from tiered_kv.config.stack_config import StackConfig, load_config
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.cpu.shared_rows import primary_rows
from tiered_kv.errors import ConfigError, MissingExtraError, needing_resources
from tiered_kv.metrics.series import CounterView, Snapshot
from tiered_kv.stack.calls import StackCalls
from tiered_kv.stack.history import open_history
from tiered_kv.stack.manager_type import manager_type
from tiered_kv.stack.order_steps import OrderSteps
from tiered_kv.stack.values import ValueFacade
from tiered_kv.stack.warm import WarmStart
from tiered_kv.system.interrupts import CallThread
from tiered_kv.system.limits import Need, Take, compare, require
from tiered_kv.tiering.base import SecondaryTierManager, TierSpec
from tiered_kv.tiering.factory import SecondaryTierFactory
from tiered_kv.tiering.manager import TieringOffloadingManager
from tiered_kv.tiering.requests import ManagerLimits

if TYPE_CHECKING:  # modules that only some stacks use are imported when they use them
    from tiered_kv.stack.exporters.events import EventPublisher
    from tiered_kv.stack.exporters.server import StatusServer
    from tiered_kv.stack.exporters.status import Explanation, Observed

_log = logging.getLogger(__name__)

_Source: TypeAlias = "str | os.PathLike[str] | Mapping[str, object] | StackConfig"
_Kind = TypeVar("_Kind", bound="AnyStack")


def open_stack(source: _Source) -> Stack:
    """Open a stack to put and get blocks; close it with `Stack.close`, or use it as a context manager.

    Args:
        source: The path of a YAML file, a mapping of the same form, or a configuration.

    Raises:
        ConfigError: The configuration cannot be used.
        TierError: A tier cannot be opened. All that was opened before it is closed again.
        ResourceError: The system refuses a thread, a descriptor or memory.
    """
    return _open(source, Stack)


def open_engine_stack(source: _Source, *, enable_events: bool = False) -> EngineStack:
    """Open a stack for an engine of one process: its scheduler calls the `manager`. Otherwise see `open_stack`.

    With `enable_events`, `take_events` of the manager reports stored and removed blocks, if the configuration has no
    publisher of events.
    """
    return _open(source, partial(EngineStack, enable_events=enable_events))


def _open(source: _Source, kind: Callable[..., _Kind]) -> _Kind:
    with needing_resources("the stack cannot be opened"):
        config = load_config(source)
    if config.must_measure_prefill:
        message = "only vLLM's connector measures it; write how many tokens your engine computes in a second"
        raise ConfigError(message, location="prefill.tokens_per_s")
    require(needs_of(config))
    # The memory is pinned on the caller's thread, where CUDA knows the program's device.
    backend = CPUBackend(open_region(config))
    opening = CallThread("tiered-kv-open")
    return opening.run(lambda: kind(config, backend=backend, is_checked=True), undo=lambda stack: stack.close())


class AnyStack(StackCalls[TieringOffloadingManager]):
    """The base of `Stack` and `EngineStack`. Any thread may call the methods.

    A stack belongs to the process that opened it. In a child that is forked the threads of its tiers do not run: there
    these methods raise ShutdownError, `close` does nothing, and the parent's work is not disturbed.

    Args:
        backend: Rows of an existing region with the sizes of `config`; the stack closes the region.
        enable_events: Whether `EngineStack.manager.take_events` reports stored and removed blocks, if the configuration
            has no publisher of events.
        is_checked: Whether the configuration was compared with the limits of the process (`require`).
        on_finished: As of `TierSpec`: called on any thread when a job has ended or lookups were answered.
        has_idle_caller: Whether the caller calls `history.work` while it is idle. Otherwise the history has a thread.

    Attributes:
        region: The primary tier's memory, for workers that map it.
        secondary_tiers: In the order they are searched.
        opened_s: When it was opened, by `time.monotonic`.
        server: The server of `metrics`; None without that setting.
        history: Reasons of misses; None if `config.history` is 0.
        events: The publisher of events; None without that setting.
    """

    _is_program = False
    """Whether a program calls `put` and `get`, and no engine."""

    def __init__(
        self,
        config: StackConfig,
        *,
        backend: CPUBackend,
        enable_events: bool = False,
        is_checked: bool = False,
        on_finished: Callable[[], None] | None = None,
        has_idle_caller: bool = False,
    ) -> None:
        self.config = config
        self.opened_s = time.monotonic()
        with needing_resources("the stack cannot be opened"), ExitStack() as undo:
            undo.callback(backend.region.close)
            if not is_checked:
                require(needs_of(config, has_rows=not backend.region.is_reserved))
            self.server = open_server(config)
            if self.server is not None:
                undo.callback(self.server.close)
            kv_view = backend.region.kv_view
            self.events = open_publisher(config)
            if self.events is not None:
                undo.callback(self.events.close)
            reports_events = enable_events or self.events is not None
            primary = primary_rows(backend, config.primary.policy, config.limits, enable_events=reports_events)
            self.secondary_tiers: list[SecondaryTierManager] = []
            undo.callback(shut_down, self.secondary_tiers, config)
            for settings in config.secondary:
                self.secondary_tiers.append(
                    open_tier(config, settings, kv_view, wants_events=reports_events, on_finished=on_finished)
                )
            self.tier_names = [tier.name for tier in config.secondary]
            has_listener = config.metrics is not None or has_idle_caller  # a server's stack is behind its listener
            self.history = open_history(config, self.events, has_thread=not has_idle_caller, has_names=has_listener)
            if self.history is not None:
                undo.callback(self.history.close)
            manager = manager_type(config, self.events, undo, is_program=self._is_program)(
                primary,
                self.secondary_tiers,
                settings=config.secondary,
                limits=limits_of(config),
                hints=config.hints,
                block_tokens=config.block.tokens,
                compute_block_s=config.compute_block_s,
                history=self.history,
                event_sink=self.events,
            )
            undo.callback(self.secondary_tiers.clear)  # the manager shuts them down, and ends their threads
            undo.callback(manager.shutdown, 0.0)
            super().__init__(manager, backend.region)
            self._warm = None if config.warm is None else WarmStart(config, config.warm, manager)
            if self.server is not None and config.metrics is not None:
                from tiered_kv.stack.exporters.server import prefetch_of, routes_of

                observed = {config.identity.digest.hex(): self.observed()}
                self.server.start(routes_of(lambda: observed), prefetch_of(lambda: observed, config.metrics))
            if self._warm is not None:
                self._warm.begin()
            undo.pop_all()
            self.secondary_tiers = manager.secondary_tiers  # a removal takes a tier's place in this list

    def _close(self, timeout: float) -> None:
        if self.server is not None:
            self.server.close(timeout)
        if self._warm is not None and not self._is_shut_down:
            self._warm.end()
        super()._close(timeout)

    def counters(self) -> CounterView:
        """Return the counters by tier; the primary tier is "cpu". See docs/reference/counters.md.

        A counter is a number, or a dictionary by label. `tiered_kv.metrics.counters.count_of` reads them.
        """
        return CounterView(self.snapshot())

    def snapshot(self) -> Snapshot:
        """Return the counters as series, each with its metric, tier and labels; `counters` is a view of them."""
        return self._run(self._snapshot)

    def observed(self) -> Observed:
        """Return the objects that exporters read. Of the manager they call only methods that any thread may call."""
        from tiered_kv.stack.exporters.status import Observed

        return Observed(self.config, self.history, self._manager, self.opened_s, self.snapshot)

    def _snapshot(self) -> Snapshot:
        with self._call():  # no lock is held: calls that move blocks would wait for it
            return self._manager.registry.snapshot()

    def _explain(self, keys: Sequence[OffloadKey]) -> list[Explanation]:
        if self.history is None:
            raise ConfigError("the stack keeps no history: its setting is 0", location="history")
        history = self.history

        def answer() -> list[Explanation]:
            from tiered_kv.stack.exporters.status import explain  # here, since an interrupted import may keep its lock

            return explain(history, self._manager.primary, keys)

        return self._call_thread.run(answer)


class Stack(AnyStack, ValueFacade[TieringOffloadingManager]):
    """An open stack of a program that stores and loads blocks itself: `open_stack` opens it. Any thread may call it."""

    _is_program = True

    def __init__(self, config: StackConfig, *, backend: CPUBackend, is_checked: bool = False) -> None:
        self._batch_blocks = _batch_blocks(config)
        super().__init__(config, backend=backend, is_checked=is_checked)
        self._order_steps = OrderSteps(self._manager.orders, self._manager.removals, self._step)

    def _close(self, timeout: float) -> None:
        self._order_steps.close()
        super()._close(timeout)

    def explain(self, keys: Sequence[bytes]) -> list[Explanation]:
        """Return for each block and tier whether the tier has the block, or why not.

        The answer comes from the history in memory; no tier is asked. "stored" means that no miss was noted since.

        Args:
            keys: Block hashes, as of `put`.

        Raises:
            TypeError: A key is not a block hash.
            ConfigError: The stack keeps no history.
            ShutdownError: Another process opened the stack before a fork.
        """
        hashes = list(keys)
        found = self._explain(self._keys_of(hashes))
        return [replace(explanation, key=key) for explanation, key in zip(found, hashes, strict=True)]


class EngineStack(AnyStack):
    """An open stack of an engine; its scheduler uses the manager: `open_engine_stack` opens it."""

    @property
    def manager(self) -> TieringOffloadingManager:
        """The whole offloading interface. It belongs to one thread."""
        return self._manager

    @property
    def primary(self) -> PrimaryRows:
        """The primary tier. It belongs to the same thread."""
        return self._manager.primary

    @property
    def kv_view(self) -> memoryview:
        """The primary tier's memory, of shape (num_blocks, block_bytes)."""
        return self.region.kv_view

    def explain(self, keys: Sequence[OffloadKey]) -> list[Explanation]:
        """Return the explanations of blocks by their whole keys; see `Stack.explain`."""
        return self._explain(keys)


def open_tier(
    config: StackConfig,
    settings: TierSettings,
    kv_view: memoryview,
    **more: Any,  # Any: of `TierSpec`
) -> SecondaryTierManager:
    """Open a secondary tier over `kv_view`, of shape (num_blocks, block_bytes); the caller shuts it down.

    Raises:
        ConfigError, TierError: The tier cannot be opened.
    """
    identity = config.identity
    more.setdefault("limits", TenantLimits.of_entry(settings))
    spec = TierSpec(settings.name, config.block.bytes, identity.digest, identity.described, **more)
    with located(config, settings):
        return SecondaryTierFactory.create(spec, kv_view, settings)


def needs_of(config: StackConfig, *, has_rows: bool = True) -> list[Need]:
    """Return a stack's needs of this process's limits; without `has_rows`, its rows are reserved huge pages."""
    region_bytes = config.primary_blocks * config.block.bytes
    takes = [Take("memory", region_bytes, "primary.capacity")] if has_rows else []
    for index, tier in enumerate(config.secondary):
        own = tier.takes(config.block.bytes)
        takes += [replace(take, setting=f"secondary.{index}.{take.setting}") for take in own]
    return compare(takes, numa_node=config.primary.numa_node)


@contextmanager
def located(config: StackConfig, settings: TierSettings) -> Iterator[None]:
    """Add the tier's place in the stack's file to errors: a tier names only its own setting."""
    try:
        yield
    except MissingExtraError:
        raise
    except ConfigError as error:
        location = ".".join(filter(None, ("secondary", str(config.secondary.index(settings)), error.location)))
        raise ConfigError(error.message, location=location) from error


def limits_of(config: StackConfig) -> ManagerLimits:
    """Return the limits of all secondary tiers of a stack together."""
    budget_bytes, prefetch_bytes = config.primary.promotion_budget, config.primary.prefetch_budget
    return ManagerLimits(
        promotion_blocks_max=None if budget_bytes is None else budget_bytes // config.block.bytes,
        prefetch_blocks_max=None if prefetch_bytes is None else prefetch_bytes // config.block.bytes,
        hold_s=config.primary.promotion_hold,
        wait_max_s=config.primary.request_wait,
    )


def open_region(config: StackConfig) -> PrimaryRegion:
    """Return the primary tier's memory, pinned if this process has a GPU; the caller closes it."""
    settings = config.primary
    settings.refuse_without_server()
    region = PrimaryRegion(
        config.primary_blocks,
        config.block.bytes,
        huge_pages=settings.wants_huge_pages,
        prefault=bool(settings.prefault),
        numa_node=settings.numa_node,
    )
    try:
        region.pin()
    except BaseException:
        region.close()
        raise
    return region


def shut_down(tiers: list[SecondaryTierManager], config: StackConfig) -> None:
    """Close tiers that no manager owns, and empty the list: their views keep the primary tier's memory mapped."""
    while tiers:
        tier = tiers.pop()
        try:
            tier.shutdown()
        except Exception as error:  # of a third-party tier, as text: a traceback would keep the tier alive
            text = error_text(error, config.secret_texts())
            _log.warning("a '%s' tier failed to shut down: %s", tier.tier_type, text)


def open_server(config: StackConfig) -> StatusServer | None:
    """Return the server of `metrics`, which listens and does not answer yet; None without that setting."""
    if config.metrics is None:
        return None
    from tiered_kv.stack.exporters.metrics import StackCollector
    from tiered_kv.stack.exporters.server import StatusServer

    StackCollector(Snapshot)  # a check of a stack opens no more than this server: a missing extra is reported here
    return StatusServer(*config.metrics.address)


def open_publisher(config: StackConfig) -> EventPublisher | None:
    """Return the publisher of `events`; None without that setting."""
    if config.events is None:
        return None
    from tiered_kv.stack.exporters.events import EventPublisher

    return EventPublisher(config.events)


def _batch_blocks(config: StackConfig) -> int:
    """Return how many blocks the facade moves at a time: no more than the smallest budget in flight."""
    budgets = [config.primary_blocks * config.block.bytes // 4, config.primary.promotion_budget]
    budgets += [budget for tier in config.secondary for budget in (tier.store_budget, tier.load_budget)]
    return max(1, min(budget for budget in budgets if budget is not None) // config.block.bytes)
