"""`tiered-kv inspect`: what each tier of a stack stores, by namespace, and whether its blocks are sound.

`main` calls `run` on the main thread. A `TimeLimit` inspects each storage on another thread, which fills the tier's
`TierInspection`. The thread of a storage that hangs may fill its `TierInspection` after the time limit. What must stay
true: the verb opens no tier, and without `--repair` it changes nothing. A tier that fails is reported, and the other
tiers are inspected all the same.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from tiered_kv.cli.arguments import describe_use, seconds, size
from tiered_kv.cli.output import Status, one_line, print_json, print_table, print_text, progress
from tiered_kv.cli.paced import paced
from tiered_kv.cli.stacks import (
    OperatedStack,
    add_stack_arguments,
    administer,
    chosen_tiers,
    operated_stack,
    tier_error_text,
)
from tiered_kv.cli.time_limit import TimeLimit
from tiered_kv.config.namespace import differences
from tiered_kv.config.settings import TierSettings
from tiered_kv.config.units import rounded_bytes, rounded_seconds
from tiered_kv.errors import ConfigError
from tiered_kv.toolkit.administration import (
    Ages,
    StoredNamespace,
    Survey,
    TierAdministration,
    Verification,
    block_bytes_in,
)

_TIMEOUT_S = 600.0
_RATE_BYTES = 100 << 20
"""Bytes a second that a check reads: a few percent of what an SSD reads, and less than a tenth of what a network of
10 Gbit/s carries."""
_TIMEOUT_FACTOR = 4
"""A check may take this many times as long as its rate needs."""
_CHECKED = ("ok", "blocks", "size_bytes", "damaged", "unreadable", "repaired", "checks_tags", "notes", "error")


@dataclass(slots=True)
class TierInspection:
    """The result for one tier."""

    name: str
    type: str
    where: str = ""  # the path or address of the storage
    error: str = ""
    unavailable: str = ""  # why tiers of this type show nothing
    survey: Survey = field(default_factory=Survey)
    checks: dict[str, Verification] = field(default_factory=dict)
    """The results of the checks, by digest of the namespace."""

    @property
    def ok(self) -> bool:
        return not self.error and all(check.ok for check in self.checks.values())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show what each secondary tier of a stack stores, by namespace, and check with --verify whether its blocks are "
        "sound. It opens no tier, and changes nothing without --repair: processes that use the storage go on."
    )
    describe_use(
        parser,
        ("tiered-kv inspect stack.yaml", "what each tier holds, by namespace"),
        ("tiered-kv inspect stack.yaml --tier nvme --verify --rate 200MiB/s", "check every block of one tier"),
        ("tiered-kv inspect stack.yaml --verify --repair", "drop the damaged blocks"),
        found="damage is left, or a tier could not be looked at",
    )
    add_stack_arguments(parser)
    parser.add_argument("--tier", metavar="NAME", help="this tier only")
    parser.add_argument("--verify", action="store_true", help="read and check every block")
    parser.add_argument("--repair", action="store_true", help="with --verify: delete damaged blocks")
    parser.add_argument("--rate", metavar="BYTES/s", type=size, help="how fast --verify reads (100MiB/s)")
    parser.add_argument(
        "--timeout",
        metavar="TIME",
        type=seconds,
        help="limit for the count of each tier (10m), and for its verification (four times what the rate needs)",
    )


def run(args: argparse.Namespace) -> Status:
    given = [f"--{name}" for name in ("repair", "rate") if getattr(args, name)]
    if given and not args.verify:
        raise ConfigError(f"{given[0]} needs --verify")
    stack = operated_stack(args)
    tiers = [_inspect(stack, settings, args) for settings in chosen_tiers(stack.config, args.tier)]
    ok = all(tier.ok for tier in tiers)
    if args.json:
        described = [_described(stack, tier) for tier in tiers]
        found = {"stack": args.stack, "namespace": stack.digest, "namespace_from": stack.source}
        print_json({**found, "verified": args.verify, "ok": ok, "tiers": described})
    else:
        _show(stack, tiers, args)
    return Status.OK if ok else Status.FOUND


def _inspect(stack: OperatedStack, settings: TierSettings, args: argparse.Namespace) -> TierInspection:
    tier = TierInspection(settings.name, settings.type)
    time_limit = TimeLimit(args.timeout or _TIMEOUT_S)

    def inspect(administration: TierAdministration) -> None:
        tier.where = administration.where
        with progress(f"counting {tier.name}", None):
            tier.survey = administration.survey(time.monotonic() + (args.timeout or _TIMEOUT_S))
        if args.verify:
            _verify(administration, stack, settings, tier, args, time_limit)

    _, error = administer(settings, inspect, time_limit)
    if error is None:
        tier.unavailable = f"tiers of type '{settings.type}' show nothing to other processes"
    tier.error = error or ""
    return tier


def _verify(
    administration: TierAdministration,
    stack: OperatedStack,
    settings: TierSettings,
    tier: TierInspection,
    args: argparse.Namespace,
    time_limit: TimeLimit,
) -> None:
    rate_bytes = args.rate or _RATE_BYTES
    total_bytes = sum(_size_bytes(each) for each in tier.survey.namespaces)
    limit_s = args.timeout or _TIMEOUT_S + _TIMEOUT_FACTOR * total_bytes / rate_bytes
    time_limit.begin(limit_s)
    deadline = time.monotonic() + limit_s
    with progress(f"verifying {tier.name}", total_bytes, in_bytes=True) as show:
        on_block = paced(rate_bytes, show, deadline)
        for each in tier.survey.namespaces:
            digest = each.digest
            block_bytes = block_bytes_in(each.described)
            if digest == stack.digest or (block_bytes is None and not stack.is_whole):
                block_bytes = stack.block_bytes or block_bytes
            found = tier.checks[digest] = Verification(block_bytes, args.repair, on_block)
            try:
                administration.verify(digest, found, deadline)
            except NotImplementedError:
                found.error = f"tiers of type '{settings.type}' cannot be verified"
            except Exception as problem:  # a third-party administration may raise anything
                found.error = tier_error_text(problem, settings)


def _size_bytes(found: StoredNamespace) -> int:
    """Return an estimate of the bytes that a check reads."""
    block_bytes = block_bytes_in(found.described)
    if found.blocks is not None and block_bytes is not None:
        return found.blocks * block_bytes
    return found.size_bytes or 0


def _described(stack: OperatedStack, tier: TierInspection) -> dict[str, object]:
    namespaces = []
    ours = stack.config.identity.described if stack.is_whole else {}
    for each in tier.survey.namespaces:
        known = asdict(each)
        digest = known.pop("digest")
        check = tier.checks.get(digest)
        namespaces.append(
            {
                "namespace": digest,
                "own": digest == stack.digest,
                "tenant": each.tenant,
                "differences": differences(ours, each.described) if ours else {},
                **known,
                "verification": check
                and {name: getattr(check, name) for name in _CHECKED}
                | {"named": [asdict(each) for each in check.named]},
            }
        )
    about: dict[str, object] = {"name": tier.name, "type": tier.type, "where": tier.where, "ok": tier.ok}
    return {
        **about,
        "error": tier.error,
        "unavailable": tier.unavailable,
        **asdict(tier.survey),
        "namespaces": namespaces,
    }


def _show(stack: OperatedStack, tiers: Sequence[TierInspection], args: argparse.Namespace) -> None:
    print_text(f"{args.stack}: {stack}\n")
    heads = ["tier", "namespace", "model", "tenant", "blocks", "stored", "written", "last used"]
    _print_rows(heads, [row for tier in tiers for row in _rows(tier, stack.digest)])
    print_text("* this stack's own; ages are from the oldest block to the newest; - is not known")
    if checks := [_checked(tier.name, *each, repairs=args.repair) for tier in tiers for each in tier.checks.items()]:
        print_text("")
        heads = ["tier", "namespace", "checked", "read", "by", "repaired", "damaged", "unreadable here"]
        _print_rows(heads, checks)
    for tier in tiers:
        for line in _remarks(stack, tier, repairs=args.repair):
            print_text(one_line(f"{tier.name}: {line}"))


def _print_rows(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table without its empty columns: each column after the first two that has only "-"."""
    known = [at for at in range(len(heads)) if at < 2 or any(row[at] != "-" for row in rows)]
    print_table([heads[at] for at in known], [[one_line(row[at]) for at in known] for row in rows], numbers=False)


def _rows(tier: TierInspection, own: str | None) -> Iterator[list[str]]:
    for each in tier.survey.namespaces:
        namespace = each.described.get("namespace")
        model = str(namespace.get("model", "-")) if isinstance(namespace, dict) else "-"
        blocks = "-" if each.blocks is None else str(each.blocks)
        size = "-" if each.size_bytes is None else rounded_bytes(each.size_bytes)
        digest = f"{each.digest}{'*' if each.digest == own else ''}"
        yield [tier.name, digest, model, each.tenant or "-", blocks, size, _ages(each.written), _ages(each.used)]
    if not tier.survey.namespaces:
        yield [tier.name, "-" if tier.error or tier.unavailable else "nothing stored", *["-"] * 6]


def _checked(tier: str, digest: str, check: Verification, *, repairs: bool) -> list[str]:
    by = "checksum, tag if encrypted" if check.checks_tags else "checksum"
    counts = [str(check.blocks), rounded_bytes(check.size_bytes), by, str(check.repaired) if repairs else "-"]
    unreadable = _reasons(check.unreadable) if check.unreadable else "-"
    return [tier, digest, *counts, _reasons(check.damaged), unreadable]


def _reasons(counted: Mapping[str, int]) -> str:
    detail = ", ".join(f"{reason} {count}" for reason, count in sorted(counted.items()))
    return f"{sum(counted.values())} ({detail})" if counted else "0"


def _remarks(stack: OperatedStack, tier: TierInspection, *, repairs: bool) -> Iterator[str]:
    survey = tier.survey
    if tier.where:
        yield f"looked at {tier.where}"
    ours = stack.config.identity.described
    for each in survey.namespaces if stack.is_whole else ():
        changed = differences(ours, each.described)
        if changed:
            fields = "; ".join(f"{name} is {theirs!r}, not {mine!r}" for name, (mine, theirs) in changed.items())
            yield f"{each.digest} is another namespace: {fields}"
        elif each.digest != stack.digest:
            yield f"{each.digest} is another namespace, without a readable form"
    if (segments := survey.segments) is not None:
        fill = f"{segments.filled_bytes / segments.size_bytes:.0%}" if segments.size_bytes else "-"
        size = rounded_bytes(segments.size_bytes)
        yield f"{segments.files} segments of {size} in all, {fill} filled; {segments.free} free"
        if segments.left_out:
            yield f"{segments.left_out} segments have a place that refused a write, which is left out"
        if segments.unusable:
            yield f"{segments.unusable} segments have no sound header"
    if survey.foreign is not None and survey.foreign.entries:
        entries, size = survey.foreign.entries, rounded_bytes(survey.foreign.size_bytes)
        yield f"{entries} foreign entries of {size}: {', '.join(survey.foreign.names)}"
    yield from survey.notes
    for digest, check in tier.checks.items():
        yield from check.notes
        for block in check.named:
            yield f"damaged: {block.name}{f', key {block.key}' if block.key else ''}: {block.reason}"
        if (more := check.damaged.total() - len(check.named)) and check.named:
            yield f"{more} more damaged blocks of {digest}"
        if check.error:
            deleted = f" after {check.repaired} damaged blocks were deleted" if check.repaired else ""
            yield f"the check of {digest} FAILED{deleted}: {check.error}"
        elif repairs and check.damaged:
            yield f"{check.repaired} of {check.damaged.total()} damaged blocks of {digest} were deleted"
    if tier.unavailable:
        yield tier.unavailable
    if tier.error:
        yield f"FAILED: {tier.error}"


def _ages(ages: Ages | None) -> str:
    return "-" if ages is None else " to ".join(dict.fromkeys(map(rounded_seconds, (ages.oldest_s, ages.newest_s))))
