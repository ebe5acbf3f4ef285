"""`tiered-kv check`: validates a stack's file, and opens every tier."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field

from tiered_kv._cli.arguments import describe_use
from tiered_kv._cli.output import Status, print_json, print_table, print_text, progress
from tiered_kv.config.redaction import error_text, scrub
from tiered_kv.config.settings import TierSettings
from tiered_kv.config.units import format_bytes, rounded_bytes
from tiered_kv.cpu.policies import make_policy
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.limits import Need, refuse, shared_memory_need
from tiered_kv.stack import needs_of, open_region, open_tier, shut_down
from tiered_kv.stack_config import StackConfig, load_config

_PROBE_BLOCKS = 2
"""Size of a region for the secondary tiers, if the primary tier cannot be opened."""


@dataclass(frozen=True, slots=True)
class TierCheck:
    """Why a tier cannot be opened, or how it describes itself."""

    name: str
    type: str
    ok: bool
    error: str = ""
    details: dict[str, object] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Validate a stack's file, open all of its tiers together, and show what each can do here. It opens them for "
        "real: nvme makes its directory, and a segment or two in it, which stay."
    )
    parser.add_argument("stack", metavar="STACK", help="the stack's YAML file")
    describe_use(
        parser,
        ("tiered-kv check stack.yaml", "before an engine is started with it"),
        ("tiered-kv check stack.yaml --json", "for a script; `ok` tells whether everything opens"),
        found="a tier does not open",
    )


def run(args: argparse.Namespace) -> Status:
    config = load_config(args.stack)
    needs = needs_of(config)
    if config.primary.shared is not None:
        needs.append(shared_memory_need(config.primary_blocks * config.block.bytes, "primary.capacity"))
    checks = _check_all(config, needs)
    ok = all(check.ok for check in checks)
    if args.json:
        print_json(
            {
                "stack": args.stack,
                "ok": ok,
                "identity": dict(config.identity.described),
                "namespace_digest": config.identity.digest.hex(),
                "block_bytes": config.block.bytes,
                "tiers": [asdict(check) for check in checks],
                "limits": [asdict(need) for need in needs],
            }
        )
    else:
        _show(args.stack, config, checks, needs)
    return Status.OK if ok else Status.FOUND


def _check_all(config: StackConfig, needs: list[Need]) -> list[TierCheck]:
    """Open all tiers together, as a stack does: two of them may exclude each other."""
    with progress("opening cpu", 1 + len(config.secondary)) as advance, ExitStack() as opened:
        primary, region = _check_primary(config, needs)
        opened.callback(region.close)
        checks = [primary]
        for tier in config.secondary:
            advance(len(checks), f"opening {tier.name}")
            checks.append(_check_tier(config, tier, region, opened))
        advance(len(checks), "closing")
        return checks


def _check_primary(config: StackConfig, needs: list[Need]) -> tuple[TierCheck, PrimaryRegion]:
    settings = config.primary
    try:
        refuse(needs)
        make_policy(settings.policy, config.primary_blocks)
        region = open_region(config)
    except Exception as error:  # a third-party policy may raise anything
        reason = error_text(error, config.secret_texts())
        return TierCheck("cpu", "cpu", False, reason), PrimaryRegion(_PROBE_BLOCKS, config.block.bytes)
    details: dict[str, object] = {
        "capacity_bytes": region.num_blocks * region.block_bytes,
        "blocks": region.num_blocks,
        "policy": settings.policy,
        "huge_pages": region.has_huge_pages,
    }
    return TierCheck("cpu", "cpu", True, details=details), region


def _check_tier(config: StackConfig, settings: TierSettings, region: PrimaryRegion, opened: ExitStack) -> TierCheck:
    secrets = settings.secret_texts()
    try:
        tier = open_tier(config, settings, region.kv_view)
        opened.callback(shut_down, [tier], config)
        details = {name: _scrubbed(each, secrets) for name, each in tier.describe().items()}
        return TierCheck(settings.name, settings.type, True, details=details)
    except Exception as error:  # a third-party tier may raise anything
        return TierCheck(settings.name, settings.type, False, error_text(error, secrets))


def _scrubbed(value: object, secrets: set[str]) -> object:
    if isinstance(value, (list, tuple)):
        return [_scrubbed(each, secrets) for each in value]
    return value if value is None or isinstance(value, (int, float)) else scrub(str(value), secrets)


def _show(stack: str, config: StackConfig, checks: list[TierCheck], needs: list[Need]) -> None:
    print_text(f"{stack}: blocks of {format_bytes(config.block.bytes)}, {config.block.tokens} tokens")
    print_text(f"namespace {config.identity.digest.hex()}\n")
    rows = [[check.name, check.type, "ok" if check.ok else "FAILED", _details(check)] for check in checks]
    print_table(["tier", "type", "opens", "what it can do here"], rows, numbers=False)
    limits = [
        [need.what, *need.shown, need.where, ("REFUSED" if need.is_refused else "WARNING") if need.problem else "ok"]
        for need in needs
    ]
    print_table(["limit of", "the stack takes", "there is", "by", "verdict"], limits, numbers=False)
    for need in needs:
        if need.problem and not need.is_refused:  # what is refused is the error of the primary tier
            print_text(f"{need.setting}: {need.problem}")


def _details(check: TierCheck) -> str:
    return check.error or "\n".join(_detail(name, value) for name, value in check.details.items())


def _detail(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"{name}: {'yes' if value else 'no'}"
    if isinstance(value, int) and name.endswith("_bytes"):
        return f"{name.removesuffix('_bytes')}: {rounded_bytes(value)}"
    return f"{name}: {value}"
