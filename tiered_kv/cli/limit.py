"""`tiered-kv limit`: the shares of tenants in a running stack, and changes of them.

`main` calls `run` on the main thread, which asks the process that has the stack open. What must stay true: without a
size it changes nothing, and an answer of another form is a `TierUnavailableError`.
"""

from __future__ import annotations

import argparse
import json
import urllib.parse
from collections.abc import Mapping
from typing import Annotated, Final, Self

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from tiered_kv.cli.arguments import describe_use, seconds
from tiered_kv.cli.ask import fetch, token_of, url_of
from tiered_kv.cli.output import Status, one_line, print_json, print_table, print_text, printable, progress
from tiered_kv.config.limits import check_limit
from tiered_kv.config.settings import PRIMARY_NAME
from tiered_kv.config.units import rounded_bytes
from tiered_kv.errors import ConfigError, TierUnavailableError

_TIMEOUT_S: Final = 10.0
_Text = Annotated[str, AfterValidator(printable)]
_Whole = Annotated[int, Field(strict=True, ge=0)]


class _Tenant(BaseModel):
    limit: _Text
    is_changed: bool
    share_bytes: _Whole
    used_bytes: _Whole
    evicted_blocks: _Whole


class _Tier(BaseModel):
    capacity_bytes: _Whole
    tenants: dict[_Text, _Tenant]
    removal: _Text = ""
    """Why it is not in use, such as "drained": then it has no capacity, and keeps nothing."""


class _Answer(BaseModel):
    """The answer of `/limits`, which `docs/how-to/fair-shares.md` describes."""

    capacity_bytes: _Whole | None = None
    tenants: dict[_Text, _Tenant] | None = None
    """This and `capacity_bytes` are the primary tier's, if it has shares."""
    tiers: dict[_Text, _Tier] = Field(default_factory=dict)
    """Of each other tier that has shares."""
    is_kept: bool | None = None

    @model_validator(mode="after")
    def _check_whole(self) -> Self:
        if (self.capacity_bytes is None) != (self.tenants is None) or not self.by_tier():
            raise ValueError("expected shares")
        return self

    def by_tier(self) -> dict[str, _Tier]:
        if self.capacity_bytes is None or self.tenants is None:
            return self.tiers
        return {PRIMARY_NAME: _Tier(capacity_bytes=self.capacity_bytes, tenants=self.tenants), **self.tiers}

    def fields(self, tier: str | None) -> dict[str, object]:
        """Return what `--json` prints: of all tiers, or of one in the same form."""
        if tier is None:
            return self.model_dump(exclude_unset=True)
        own = {"capacity_bytes": True, "tenants": True} if tier == PRIMARY_NAME else {"tiers": {tier: True}}
        return self.model_dump(exclude_unset=True, include={"is_kept": True, **own})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show the shares of tenants in a running stack and what each tenant holds, or change a share. A change counts "
        "from the next store on, and goes before the stack's file until it is taken back. The stack, or the entry "
        "of a tier that gives shares, needs 'limits'; and the stack metrics: {listen: ADDRESS}."
    )
    parser.add_argument("stack", metavar="ADDRESS|STACK", help="http://HOST:PORT, or the file, whose token is sent")
    parser.add_argument("tenant", metavar="TENANT", nargs="?", help="whose share changes; 'default' for all others")
    parser.add_argument("limit", metavar="SIZE|PERCENT", nargs="?", help="the new share, such as 300GiB or 25%%")
    parser.add_argument("--tier", metavar="NAME", help="in which tier it changes (cpu), and the only one to show")
    parser.add_argument("--take-back", action="store_true", help="end a change: the stack's file counts again")
    parser.add_argument("--namespace", metavar="DIGEST", default="", help="which namespace, if a server has several")
    parser.add_argument("--timeout", metavar="TIME", type=seconds, default=_TIMEOUT_S, help="for the answer (10s)")
    describe_use(
        parser,
        ("tiered-kv limit http://127.0.0.1:9464", "the shares, and what each tenant holds"),
        ("tiered-kv limit http://127.0.0.1:9464 team-a 300GiB", "change a share"),
        ("tiered-kv limit http://127.0.0.1:9464 team-a 1TiB --tier NAME", "in the tier of this name"),
        ("tiered-kv limit stack.yaml team-a --take-back", "let the stack's file count again"),
        found="TENANT has no limit of its own, and has made no request",
    )


def run(args: argparse.Namespace) -> Status:
    if args.take_back and (args.tenant is None or args.limit is not None):
        raise ConfigError("expected a tenant, and no size", location="--take-back")
    if args.limit is not None:
        try:
            check_limit(args.limit)
        except ValueError as error:
            raise ConfigError(f"{error}, found {args.limit!r}", location="SIZE|PERCENT") from error
    url, change = url_of(args.stack), args.limit is not None or args.take_back
    try:
        with progress("asking", None):
            if change:
                asked = {"namespace": args.namespace, "tenant": args.tenant, "limit": args.limit}
                if args.tier is not None:
                    asked["tier"] = args.tier
                token = token_of(args.stack)
                body = fetch(url, "/limits", args.timeout, body=json.dumps(asked).encode(), headers=token)
            else:
                page = f"/limits?{urllib.parse.urlencode({'namespace': args.namespace})}"
                body = fetch(url, page, args.timeout)
        answer = _Answer.model_validate_json(body)
    except TierUnavailableError as error:
        raise TierUnavailableError(
            f"no process answers at {url}: {error}; the stack has to be open there, with 'metrics' and 'limits'"
        ) from error
    except ValidationError as error:
        raise TierUnavailableError(f"what answers at {url} is no stack of this kind") from error
    shown = answer.by_tier()
    if args.tier is not None:
        if args.tier not in shown:
            raise ConfigError(
                f"the tier '{args.tier}' has no shares; those with shares: {', '.join(shown)}", location="--tier"
            )
        shown = {args.tier: shown[args.tier]}
    if args.json:
        print_json(answer.fields(args.tier))
    else:
        _show(shown, args.tenant)
        if answer.is_kept is False:
            print_text("the change ends with the process: only `tiered-kv serve` keeps it")
    is_known = any(args.tenant in tier.tenants for tier in shown.values())
    return Status.OK if args.tenant is None or change or is_known else Status.FOUND


def _sizes(tier: _Tier, tenant: _Tenant) -> tuple[str, str]:
    if tier.removal and not tier.capacity_bytes:  # a part of nothing would be "0B"
        return tier.removal, "-"
    return rounded_bytes(tenant.share_bytes), rounded_bytes(tenant.used_bytes)


def _show(shown: Mapping[str, _Tier], wanted: str | None) -> None:
    rows = [
        [
            tier,
            name,
            tenant.limit + (" (changed)" if tenant.is_changed else ""),
            *_sizes(shares, tenant),
            f"{tenant.evicted_blocks:,}",
        ]
        for tier, shares in shown.items()
        for name, tenant in shares.tenants.items()
        if wanted in (None, name)
    ]
    if rows:
        print_table(["tier", "tenant", "limit", "share", "holds", "evicted blocks"], rows)
    else:
        print_text(f"{one_line(str(wanted))} has no limit of its own, and has made no request: 'default' counts for it")
