"""`tiered-kv check`: would the stack open here, and store?

`main` calls `run` on the main thread; a `TimeLimit` opens and tries each tier on another thread. What must stay true: a
tier that fails is reported, and the others are checked all the same. All tiers are open together until the end.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tiered_kv.cli.arguments import describe_use
from tiered_kv.cli.output import Status, print_json, print_table, print_text, progress, readable
from tiered_kv.cli.stacks import (
    OWN_MODEL,
    OperatedStack,
    add_stack_arguments,
    held_log,
    operated_stack,
    own_config,
    purge_own,
    tier_error_text,
)
from tiered_kv.cli.time_limit import TimeLimit
from tiered_kv.config.entries import tier_type_of
from tiered_kv.config.reading import from_source
from tiered_kv.config.secrets import error_text, scrub
from tiered_kv.config.settings import TierSettings
from tiered_kv.config.stack_config import PRIMARY_BLOCKS_MIN, StackConfig
from tiered_kv.config.units import format_bytes
from tiered_kv.config.validation import line_of
from tiered_kv.cpu.policies import RowTable, make_policy
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.errors import ConfigError, MissingExtraError
from tiered_kv.stack.open import needs_of, open_publisher, open_region, open_server, open_tier, shut_down
from tiered_kv.system.collapse import refusal
from tiered_kv.system.limits import Limits, Need, refuse, shared_memory_need
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv.tiering.recording.trace_file import check_place
from tiered_kv.toolkit.codecs import CodecSettings
from tiered_kv.toolkit.listing_administration import ListingAdministration
from tiered_kv.workload.bench import BenchSettings, bench_tier

_PROBE_S = 30.0
"""How long one block may take to be stored, found or loaded."""


@dataclass(frozen=True, slots=True)
class TierCheck:
    """The result for one tier: why it cannot open or store, or else the tier's description of itself."""

    name: str
    type: str
    ok: bool
    error: str = ""
    details: dict[str, object] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        return "FAILED" if not self.ok else "WARNING" if "warning" in self.details else "ok"


@dataclass(frozen=True, slots=True)
class ListenCheck:
    """Whether the stack can listen at an address; `error` says why it cannot, and is empty if it can."""

    setting: str
    address: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class StackCheck:
    tiers: list[TierCheck]
    listens: list[ListenCheck]
    limits: list[Need]

    @property
    def ok(self) -> bool:
        is_open = all(tier.ok for tier in self.tiers) and not any(each.error for each in self.listens)
        return is_open and not any(need.is_refused for need in self.limits)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Find out before an engine does whether a stack would open here, and store. It compares what the stack takes "
        "with what the machine has, listens where the stack would, opens all tiers together, and stores, finds and "
        "loads a block in each. It opens them for real: of nvme, a directory, a segment or two and this block stay."
    )
    describe_use(
        parser,
        ("tiered-kv check stack.yaml", "before an engine is started with it"),
        ("tiered-kv check stack.yaml --offline", "in CI: the file and the libraries, without opening anything"),
        ("tiered-kv check stack.yaml --json", "for a script; `ok` tells whether it would open and store"),
        found="the stack would not open, or would not store",
    )
    add_stack_arguments(parser)
    parser.add_argument(
        "--offline", action="store_true", help="open nothing, and leave out what this machine has: for another one"
    )


def run(args: argparse.Namespace) -> Status:
    if args.offline and args.block_bytes is not None:
        raise ConfigError("it is not with --offline, which stores no block", location="--block-bytes")
    stack = operated_stack(args, looks=not args.offline)
    if args.offline:
        config = stack.config
        found = _check_offline(config)
    else:
        config = stack.to_open()
        found = _check(stack, config)
    if args.json:
        print_json(
            {
                "stack": args.stack,
                "ok": found.ok,
                "offline": args.offline,
                "identity": dict(config.identity.described) if stack.is_whole else None,
                "namespace_digest": stack.digest,
                "namespace_from": stack.source,
                "block_bytes": config.block.bytes if stack.is_whole or not args.offline else None,
                **asdict(found),
            }
        )
    else:
        _show(args, stack, config, found)
    return Status.OK if found.ok else Status.FOUND


# Without opening anything.


def _check_offline(config: StackConfig) -> StackCheck:
    error = _error_of(lambda: make_policy(config.primary.policy, RowTable(PRIMARY_BLOCKS_MIN)), config)
    tiers = [TierCheck("cpu", "cpu", not error, error)]
    for settings in config.secondary:
        error = ""
        try:
            tier_type_of(settings).load()
            if isinstance(settings, CodecSettings):
                settings.open_codecs()
        except KeyboardInterrupt:
            raise
        except BaseException as problem:  # a third-party module may raise anything, SystemExit too
            error = tier_error_text(problem, settings)
        tiers.append(TierCheck(settings.name, settings.type, not error, error))
    return StackCheck(tiers, [*_without_libraries(config)], [])


def _without_libraries(config: StackConfig) -> Iterator[ListenCheck]:
    """Yield a failure for each server or publisher whose libraries are not installed."""
    for name, is_set, libraries in (
        ("metrics", config.metrics is not None, ("prometheus_client",)),
        ("events", config.events is not None, ("zmq", "msgspec")),
    ):
        if is_set and not all(map(importlib.util.find_spec, libraries)):
            yield ListenCheck(name, "", str(MissingExtraError(f"'{name}'", name)))


# By opening everything.


def _check(stack: OperatedStack, config: StackConfig) -> StackCheck:
    needs = needs_of(config)
    if config.primary.shared is not None or stack.is_engines:
        need = shared_memory_need(config.primary_blocks * config.block.bytes, "primary.capacity")
        if config.primary.shared is None and need.problem:  # only vLLM's workers share the primary tier
            need = replace(need, is_refused=False, problem=f"in vLLM, {need.problem}")
        needs.append(need)
    tiers: list[TierCheck] = []
    config = _required(config)
    try:
        with ExitStack() as opened:
            listens = _check_listens(config, opened)
            _check_tiers(config, needs, opened, tiers)
    finally:  # runs also after Ctrl-C
        closed = {tier.name for tier in tiers if tier.error and not tier.details}
        is_own = config.namespace.model == OWN_MODEL
        left = purge_own(config, [each for each in config.secondary if is_own and each.name not in closed])
    return StackCheck([_with_left(tier, left.get(tier.name, "")) for tier in tiers], listens, needs)


def _required(config: StackConfig) -> StackConfig:
    """Return the configuration with every tier required, and with little time to open."""
    tiers = [
        tier.model_copy(update={"required": True, "open_timeout": min(tier.open_timeout, _PROBE_S)})
        for tier in config.secondary
    ]
    return config.model_copy(update={"secondary": type(config.secondary)(tiers)})


def _with_left(tier: TierCheck, left: str) -> TierCheck:
    if not left:
        return tier
    warning = f"the block that was stored here could not be deleted: {left}"
    return replace(tier, details={"warning": warning, **tier.details})


def _check_listens(config: StackConfig, opened: ExitStack) -> list[ListenCheck]:
    def keep(made: Any) -> None:  # Any: a server or publisher, or None
        if made is not None:
            opened.callback(made.close)

    found = []
    if config.metrics is not None:
        error = _error_of(lambda: keep(open_server(config)), config)
        found.append(ListenCheck("metrics.listen", config.metrics.listen, error))
    if config.record is not None:
        path = Path(config.record.path)
        found.append(ListenCheck("record.path", str(path), _error_of(lambda: check_place(path), config)))
    if config.events is not None:
        addresses = ", ".join(filter(None, (config.events.publish, config.events.replay)))
        error = _error_of(lambda: keep(open_publisher(config)), config)
        found.append(ListenCheck("events.publish", addresses, error))
    return found


def _error_of(open_it: Callable[[], object], config: StackConfig) -> str:
    try:
        open_it()
    except Exception as error:  # a third-party policy may raise anything
        return error_text(error, config.secret_texts())
    return ""


def _check_tiers(config: StackConfig, needs: list[Need], opened: ExitStack, checks: list[TierCheck]) -> None:
    with progress("opening cpu", 1 + len(config.secondary)) as advance:
        primary, region = _check_primary(config, needs)
        opened.callback(region.close)
        checks.append(primary)
        for tier in config.secondary:
            advance(len(checks), f"opening {tier.name}")
            checks.append(_check_tier(config, tier, region, opened))
        advance(len(checks), "closing")


def _check_primary(config: StackConfig, needs: list[Need]) -> tuple[TierCheck, PrimaryRegion]:
    settings = config.primary
    try:
        refuse(needs)
        make_policy(settings.policy, RowTable(config.primary_blocks))
        region = open_region(config)
    except Exception as error:  # a third-party policy may raise anything
        reason = error_text(error, config.secret_texts())
        return TierCheck("cpu", "cpu", False, reason), PrimaryRegion(PRIMARY_BLOCKS_MIN, config.block.bytes)
    details: dict[str, object] = {
        "capacity_bytes": region.num_blocks * region.block_bytes,
        "blocks": region.num_blocks,
        "policy": settings.policy,
        "huge_pages": region.has_huge_pages,
        **_shared_memory(config),
    }
    return TierCheck("cpu", "cpu", True, details=details), region


def _shared_memory(config: StackConfig) -> dict[str, object]:
    """Try whether memory that processes share has huge pages: a server's, or that of an engine's processes."""
    if not config.primary.wants_huge_pages:
        return {}
    why = refusal(Limits().collapsed_size())
    return {"shared_huge_pages": f"no: {why}" if why else "yes"}


def _check_tier(config: StackConfig, settings: TierSettings, region: PrimaryRegion, opened: ExitStack) -> TierCheck:
    time_limit = TimeLimit(_PROBE_S)
    with held_log() as drop_log:
        try:
            check = time_limit.run(lambda: _open_and_store(config, settings, region, opened, time_limit), settings)
        except Exception as problem:  # a third-party tier may raise anything
            check = TierCheck(settings.name, settings.type, False, tier_error_text(problem, settings))
        if check.error or "warning" in check.details:  # the error and the warning say what the log says
            drop_log()
    return check


def _open_and_store(
    config: StackConfig, settings: TierSettings, region: PrimaryRegion, opened: ExitStack, time_limit: TimeLimit
) -> TierCheck:
    secrets, details, error = settings.secret_texts(), dict[str, object](), ""
    tier = open_tier(config, settings, region.kv_view)
    opened.callback(shut_down, [tier], config)
    time_limit.begin(_PROBE_S)
    try:
        details = _described(tier, secrets)
        left = _store_elsewhere(config, settings, region, time_limit) if _lists_entries(settings) else None
        if left is not None:
            return _with_left(TierCheck(settings.name, settings.type, True, details=details), left)
        time_limit.begin(2 * _PROBE_S)
        fault = _store_one(tier, settings, region)
        details = _described(tier, secrets)  # again: the store may have changed it
        if fault is not None:
            error = f"{fault}; {details['warning']}" if "warning" in details else fault
    except Exception as problem:  # a third-party tier may raise anything
        error = tier_error_text(problem, settings)
    return TierCheck(settings.name, settings.type, not error, error, details)


def _store_elsewhere(
    config: StackConfig, settings: TierSettings, region: PrimaryRegion, time_limit: TimeLimit
) -> str | None:
    """Store a block under the command's own namespace, delete it, and return why it is left, or "" if it is not.

    So no tier evicts or sweeps the stack's blocks because of a `capacity` that may be a mistake. Return None if nothing
    can be stored there: the tier is full, or its credentials are only for the stack's namespace.
    """
    is_stored = False
    with suppress(Exception), ExitStack() as opened:  # a third-party tier may raise anything
        tier = open_tier(own_config(config), settings, region.kv_view)
        opened.callback(shut_down, [tier], config)
        time_limit.begin(2 * _PROBE_S)
        is_stored = _store_one(tier, settings, region) is None
    time_limit.begin(2 * _PROBE_S)
    left = purge_own(config, [settings]).get(settings.name, "")
    return left if is_stored else None


def _lists_entries(settings: TierSettings) -> bool:
    load = tier_type_of(settings).administration
    return load is not None and issubclass(load(), ListingAdministration)


def _store_one(tier: SecondaryTierManager, settings: TierSettings, region: PrimaryRegion) -> str | None:
    """Store, find and load a block. Return why that is not possible; None if it is."""
    probe = BenchSettings(blocks=1, batch=1, rounds=1, timeout_s=_PROBE_S)
    end_s = time.monotonic() + _PROBE_S
    while True:
        found = bench_tier(tier, settings.name, region.kv_view, probe)
        if found.ok:
            return None
        if "allocating" not in found.reasons or time.monotonic() >= end_s:  # else a later try may succeed
            break
    done = "stored" if found.failed_stores else "loaded back" if found.failed_loads else "loaded back unchanged"
    return f"it opens, and a block cannot be {done}" + (f": {', '.join(found.reasons)}" if found.reasons else "")


def _described(tier: SecondaryTierManager, secrets: set[str]) -> dict[str, object]:
    return {name: _scrubbed(each, secrets) for name, each in tier.describe().items()}


def _scrubbed(value: object, secrets: set[str]) -> object:
    if isinstance(value, (list, tuple)):
        return [_scrubbed(each, secrets) for each in value]
    return value if value is None or isinstance(value, (int, float)) else scrub(str(value), secrets)


# For people.


def _show(args: argparse.Namespace, stack: OperatedStack, config: StackConfig, found: StackCheck) -> None:
    blocks = f"blocks of {format_bytes(config.block.bytes)}, " if stack.is_whole or not args.offline else ""
    print_text(f"{args.stack}: {blocks}{stack}\n")
    # Each row begins with its setting. The setting's line in the file is shown unless the row says ok.
    names = ["primary", *(f"secondary.{at}" for at in range(len(config.secondary)))]
    rows = [
        (setting, f"{each.name} ({each.type})", each.verdict, _details(each, found.limits))
        for setting, each in zip(names, found.tiers, strict=True)
    ]
    rows += [
        (each.setting, each.setting, "FAILED" if each.error else "ok", each.error or each.address)
        for each in found.listens
    ]
    for need in found.limits:
        wanted, available = need.shown
        verdict = ("FAILED" if need.is_refused else "WARNING") if need.problem else "ok"
        rows.append((need.setting, need.what, verdict, need.problem or f"{wanted} of {available}, {need.where}"))
    lines = from_source(args.stack, lambda _: [line_of(setting) for setting, *_ in rows])
    shown = [
        [what, verdict, f"line {line}: {text}" if line and verdict != "ok" else text]
        for line, (_, what, verdict, text) in zip(lines, rows, strict=True)
    ]
    print_table(["what", "verdict", "what it is, or what to do"], shown, numbers=False)
    if args.offline:
        print_text("nothing was opened, and what this machine has was not looked at")


def _details(check: TierCheck, limits: list[Need]) -> str:
    if check.error:
        said = next((need for need in limits if need.is_refused and need.problem in check.error), None)
        return check.error if said is None else f"{said.setting} is too much; see '{said.what}' below"
    warning = [f"{check.details['warning']};"] if "warning" in check.details else []
    shown = (readable(name, value) for name, value in check.details.items() if name != "warning")
    details = ", ".join(f"{name}: {text}" for name, text in shown)
    return " ".join([*warning, details])
