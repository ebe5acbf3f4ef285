"""`tiered-kv purge`: remove the bytes of a namespace, or of a tenant, from every tier of a stack.

`main` calls `run` on the main thread. `run` looks into every tier, asks the user, and purges one tier after the other.
A `TimeLimit` calls each storage on another thread. What must stay true: nothing is removed with `--dry-run`, or before
the user has agreed. A tier that fails is reported, and does not keep the others from their purge.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Final

from tiered_kv.cli.arguments import describe_use, seconds
from tiered_kv.cli.ask import fetch, read_status
from tiered_kv.cli.output import Status, one_line, print_json, print_table, print_text, progress
from tiered_kv.cli.stacks import add_stack_arguments, administer, digest, operated_stack
from tiered_kv.cli.time_limit import TimeLimit
from tiered_kv.config.settings import TierSettings
from tiered_kv.config.stack_config import StackConfig
from tiered_kv.config.units import rounded_bytes
from tiered_kv.errors import ConfigError, TieredKVError
from tiered_kv.toolkit.administration import TierAdministration

_TIMEOUT_S = 600.0
_ASK_S: Final = 1.0
_WARNING: Final = "processes that have this open may store again: stop them first"


@dataclass(slots=True)
class NamespacePurge:
    """One namespace in one tier; `docs/reference/command.md` describes each field."""

    namespace: str
    tenant: str | None
    blocks: int | None
    size_bytes: int | None
    purged: bool = False
    left: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class TierPurge:
    """The result for one tier; `docs/reference/command.md` describes each field."""

    name: str
    type: str
    where: str = ""
    error: str = ""
    namespaces: list[NamespacePurge] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not (self.error or self.unknown or any(each.left for each in self.namespaces))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Remove the bytes of the stack's namespace, or of those that you name, from every secondary tier, and look "
        "whether any are left. Stacks that are open go on, and may store again: stop those of the tenant first."
    )
    describe_use(
        parser,
        ("tiered-kv purge stack.yaml --dry-run", "show what is stored of the stack's namespace"),
        ("tiered-kv purge stack.yaml --tenant acme --yes", "remove all of a tenant without asking"),
        found="something was left, or a tier cannot be purged",
    )
    add_stack_arguments(parser, namespace=False)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--tenant", metavar="NAME", help="every namespace of this tenant in those tiers")
    about = "the namespace with this digest"  # a namespace of any stack; other verbs take only this stack's
    which.add_argument("--namespace", metavar="DIGEST", type=digest, dest="digest", help=about)
    parser.add_argument("--dry-run", action="store_true", help="show what would be removed")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--timeout", metavar="TIME", type=seconds, default=_TIMEOUT_S, help="for each tier (10m)")


def run(args: argparse.Namespace) -> Status:
    is_named = args.tenant is not None or args.digest is not None
    if is_named and args.block_bytes is not None:
        raise ConfigError("it does not narrow --tenant or --namespace; leave it out", location="--block-bytes")
    stack = operated_stack(args, looks=not is_named)
    config = stack.config
    chosen = None if args.tenant is not None else args.digest or stack.digest
    meant = f"tenant '{args.tenant}'" if chosen is None else f"namespace {chosen}"
    if chosen is None and args.tenant is None:
        if stack.stored:
            raise stack.ambiguous()
        # The digest without a block size, which no stored namespace has. With None, `_look` would find all namespaces.
        chosen, meant = config.identity.digest.hex(), "no stored namespace fits the file, which has no block.bytes"
    tiers: list[TierPurge] = []
    with progress("looking", len(config.secondary)) as advance:
        for settings in config.secondary:
            advance(len(tiers), f"looking into {settings.name}")
            tiers.append(_look(settings, chosen, args.tenant, args.timeout))
    running = _running(config, tiers)
    said: set[str] = set()
    if not args.json:
        print_text(f"{args.stack}: {meant}\n")
        _show(tiers, "stored", said)
        if any(tier.namespaces for tier in tiers):
            print_text(running or _WARNING)
    if not args.dry_run and any(tier.namespaces for tier in tiers):
        if not args.yes:
            _ask(tiers)
        with progress("removing", len(tiers)) as advance:
            for done, (settings, tier) in enumerate(zip(config.secondary, tiers, strict=True)):
                advance(done, f"removing from {tier.name}")
                _purge(settings, tier, args.timeout)
        if not args.json:
            print_text("")
            _show(tiers, "removed", said)
    ok = all(tier.ok for tier in tiers)
    if args.json:
        described = [{**asdict(tier), "ok": tier.ok} for tier in tiers]
        found = {"stack": args.stack, "of": meant, "dry_run": args.dry_run, "running": running}
        print_json({**found, "ok": ok, "tiers": described})
    return Status.OK if ok else Status.FOUND


def _running(config: StackConfig, tiers: Sequence[TierPurge]) -> str:
    """Return which process to stop first, if one answers at the file's `metrics.listen`."""
    url = "" if config.metrics is None else f"http://{config.metrics.listen}"
    with suppress(TieredKVError):  # nothing listens there, or another program does
        status = read_status(fetch(url, "/status", _ASK_S)) if url else None
        if status and any(each.namespace == status.namespace for tier in tiers for each in tier.namespaces):
            has = f"process {status.pid}, which answers at {url}, has {status.namespace} open"
            return f"{has} and may store again: stop it first"
    return ""


def _look(settings: TierSettings, digest: str | None, tenant: str | None, timeout_s: float) -> TierPurge:
    """Find the namespace with this digest, or the namespaces of the tenant, in one tier."""
    tier = TierPurge(settings.name, settings.type)

    def look(administration: TierAdministration) -> None:
        tier.where = administration.where
        for stored in administration.survey(time.monotonic() + timeout_s, digest).namespaces:
            if tenant is None or stored.tenant == tenant:
                tier.namespaces.append(NamespacePurge(stored.digest, stored.tenant, stored.blocks, stored.size_bytes))
            elif stored.tenant is None:
                tier.unknown.append(stored.digest)

    _, error = administer(settings, look, TimeLimit(timeout_s))
    tier.error = f"tiers of type '{settings.type}' cannot be purged by this command" if error is None else error
    return tier


def _purge(settings: TierSettings, tier: TierPurge, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    stored = [found.blocks for found in tier.namespaces]
    for found in tier.namespaces:  # if the removal fails, the numbers are unknown
        found.blocks = found.size_bytes = None

    def purge(administration: TierAdministration) -> None:
        for found, blocks in zip(tier.namespaces, stored, strict=True):
            removed = administration.purge(found.namespace, deadline)
            # A tier that does not count has removed all blocks that were found before, if it has left nothing.
            is_counted = removed.blocks is not None or removed.left
            found.blocks, found.size_bytes = removed.blocks if is_counted else blocks, removed.size_bytes
            found.left, found.notes = removed.left, removed.notes
            found.purged = not removed.left

    if tier.namespaces:
        tier.error = administer(settings, purge, TimeLimit(timeout_s))[1] or tier.error


def _ask(tiers: Sequence[TierPurge]) -> None:
    """Ask at the terminal whether to go on; raise ConfigError unless the answer is yes."""
    if not sys.stdin.isatty():
        raise ConfigError("this removes what is listed for good; give --yes, since nobody can be asked here")
    count = sum(len(tier.namespaces) for tier in tiers)
    print(
        f"Remove {count} stored namespace{'s' if count != 1 else ''} for good? Type 'yes': ",
        end="",
        file=sys.stderr,
        flush=True,
    )
    if sys.stdin.readline().strip() != "yes":
        raise ConfigError("nothing was removed")


def _show(tiers: Sequence[TierPurge], verb: str, said: set[str]) -> None:
    """Show the tiers, with the lines about them that were not `said` before."""
    rows = [row for tier in tiers for row in _rows(tier)]
    print_table(["tier", "namespace", "tenant", "blocks", verb], rows, numbers=False)
    for tier in tiers:
        for line in (one_line(f"{tier.name}: {each}") for each in _remarks(tier)):
            if line not in said:
                print_text(line)
            said.add(line)


def _rows(tier: TierPurge) -> Iterator[list[str]]:
    for each in tier.namespaces:
        blocks = "-" if each.blocks is None else str(each.blocks)
        size = "-" if each.size_bytes is None else rounded_bytes(each.size_bytes)
        yield [tier.name, each.namespace, each.tenant or "?", blocks, size]
    if not tier.namespaces:
        yield [tier.name, "-", "-", "-", "-" if tier.error or tier.unknown else "nothing stored"]


def _remarks(tier: TierPurge) -> Iterator[str]:
    if tier.where:
        yield f"looked at {tier.where}"
    for each in tier.namespaces:
        yield from (f"LEFT of {each.namespace}: {text}" for text in each.left)
        yield from each.notes
    for unknown in tier.unknown:
        yield f"the tenant of the namespace {unknown} is not known; give --namespace {unknown} if it is meant"
    if tier.error:
        yield f"FAILED: {tier.error}"
