"""`tiered-kv why`: why blocks of a running stack were misses."""

from __future__ import annotations

import argparse
import json
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from tiered_kv._cli.arguments import describe_use, seconds
from tiered_kv._cli.ask import StatusAddress, address_of, fetch, is_address
from tiered_kv._cli.output import Status, one_line, print_json, print_table, print_text, progress
from tiered_kv._cli.report.page import quantity
from tiered_kv._cli.stacks import add_namespace_argument, administer, operated_stack
from tiered_kv.config.namespace import differences
from tiered_kv.config.settings import PRIMARY_NAME, TierSettings
from tiered_kv.config.units import rounded_seconds
from tiered_kv.errors import ConfigError, TierUnavailableError
from tiered_kv.reasons import SENTENCES
from tiered_kv.stack_config import StackConfig
from tiered_kv.toolkit.administration import StoredNamespace

_TIMEOUT_S: Final = 10.0
NAMESPACES_MAX = 64
"""For each tier."""
_NO_STACK: Final = "what answers at {} is no stack of this kind"

Answer = Mapping[str, Any]  # Any: JSON


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Ask the process that has a stack open why blocks were misses. It opens no tier, and changes nothing. "
        "The stack needs metrics: {listen: ADDRESS}."
    )
    parser.add_argument("stack", metavar="STACK|URL", help="the stack's YAML file, or http://HOST:PORT")
    parser.add_argument("keys", metavar="KEY", nargs="*", default=[], help="keys of blocks, in hexadecimal")
    parser.add_argument("--request", metavar="ID", help="a request that has ended")
    parser.add_argument("--last", action="store_true", help="the last request that missed a block")
    parser.add_argument(
        "--namespaces", action="store_true", help="look for other namespaces in the storage of the stack's tiers"
    )
    add_namespace_argument(parser)
    parser.add_argument("--timeout", metavar="TIME", type=seconds, default=_TIMEOUT_S, help="for each answer (10s)")
    describe_use(
        parser,
        ("tiered-kv why stack.yaml --last", "why the last request that missed a block missed it"),
        ("tiered-kv why http://127.0.0.1:9464 --request chat-7", "one request, of a process that is named by its URL"),
        ("tiered-kv why stack.yaml --namespaces", "whether the blocks are there under another namespace"),
        found="with --request: the request is not known",
    )


def run(args: argparse.Namespace) -> Status:
    if args.namespaces and is_address(args.stack):
        raise ConfigError("--namespaces needs the stack's file, which says where its tiers are")
    query = [("key", key) for key in args.keys]
    query += [("request", args.request)] if args.request is not None else []
    query += [("last", "1")] if args.last else []
    if not query and not args.namespaces:
        raise ConfigError("expected keys, --request, --last or --namespaces")
    config = _whole_config(args) if args.namespaces else None
    with progress("asking", None):
        answer = _fetch(address_of(args.stack), query, args.timeout) if query else {}
    tiers = []
    if config is not None:
        with progress("looking for namespaces", None):
            tiers = [tier_namespaces(config, each, time.monotonic() + args.timeout) for each in config.secondary]
    if args.json:
        print_json({**answer, **({"namespaces": [asdict(tier) for tier in tiers]} if args.namespaces else {})})
    else:
        try:
            _show(answer, args.request)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TierUnavailableError(_NO_STACK.format(address_of(args.stack))) from error
        for tier in tiers:
            _show_namespaces(tier)
    return Status.FOUND if args.request is not None and not answer["requests"] else Status.OK


def _whole_config(args: argparse.Namespace) -> StackConfig:
    stack = operated_stack(args)
    if stack.is_whole:
        return stack.config
    if len(stack.stored) > 1:
        raise stack.ambiguous()
    raise ConfigError(
        "the engine sets a part of the namespace, and no tier stores it, so nothing can be compared with it; "
        "`tiered-kv inspect` shows what is stored"
    )


def _fetch(address: StatusAddress, query: list[tuple[str, str]], timeout_s: float) -> Answer:
    """Return the answer of the process at `address`; raise TierUnavailableError if it is not that of a stack."""
    try:
        answer = json.loads(fetch(address, f"/explain?{urllib.parse.urlencode(query)}", timeout_s))
    except TierUnavailableError as error:
        raise TierUnavailableError(
            f"no process answers at {address}: {error}; the stack has to be open there, with 'metrics' and 'history'"
        ) from error
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict) or not {"keys", "requests"} <= answer.keys():
        raise TierUnavailableError(_NO_STACK.format(address))
    return answer


def _show(answer: Answer, req_id: str | None) -> None:
    if not answer:
        return
    for request in answer["requests"]:
        _show_request(request)
        for tier, reasons in request["misses"].items():
            if count := reasons.get("too_slow", 0):
                print_text(f"{tier}: too_slow {count:,}: {SENTENCES['too_slow']}{_estimate(answer, tier)}")
    if req_id is not None and not answer["requests"]:
        print_text(f"request {one_line(req_id)}: unknown, still running, or not among the last that ended")
    elif not answer["requests"] and not answer["keys"]:
        print_text("no request has missed a block yet")
    for key in answer["keys"]:
        _show_key(key, f"block {key['key']}")
    if any(fate["fate"] in ("unknown", "absent") for key in answer["keys"] for fate in key["tiers"].values()):
        print_text("a block may also be stored under another namespace: see --namespaces")


def _show_request(request: Answer) -> None:
    title = f"request {one_line(request['request'])}, ended {_ago(request['age_seconds'])}"
    title = f"{title}: {quantity(request['missed_blocks'], 'block')} missed"
    tiers = dict.fromkeys([*request["misses"], *request["hits"]])
    rows = [[tier, f"{request['hits'].get(tier, 0):,}", _reasons(request["misses"].get(tier, {}))] for tier in tiers]
    print_table(["tier", "hits", "misses"], rows, title=title, numbers=False)
    first = request["first_missed"]
    if first is not None:
        reasons = ", ".join(f"{tier}: {reason}" for tier, reason in request["first_missed_because"].items())
        print_text(f"the first block that it missed: {reasons}")
        _show_key(first, f"what is known of that block now, {first['key']}")


def _estimate(answer: Answer, tier: str) -> str:
    """Return the times that the process compares now; nothing while it does not know them."""
    estimates = answer.get("estimates", {})
    of_tier, of_engine = estimates.get(tier, {}), estimates.get(PRIMARY_NAME, {})
    load_s, block_s = (of_tier.get(f"expected_{each}_seconds", 0.0) for each in ("load", "block"))
    compute_s, backlog_s = (of_engine.get(f"compute_{each}_seconds", 0.0) for each in ("block", "backlog"))
    if not load_s + block_s or not compute_s:
        return ""
    return (
        f"; now a load takes {rounded_seconds(load_s)}, and {rounded_seconds(block_s)} more for each block; "
        f"computing takes {rounded_seconds(compute_s)} a block, after a backlog of {rounded_seconds(backlog_s)}"
    )


def _reasons(reasons: Mapping[str, int]) -> str:
    ordered = sorted(reasons.items(), key=lambda item: -item[1])
    return ", ".join(f"{reason} {count:,}" for reason, count in ordered) or "-"


def _show_key(key: Answer, title: str) -> None:
    rows = [
        [tier, fate["fate"], _ago(fate["age_seconds"]), SENTENCES.get(fate["fate"], "")]
        for tier, fate in key["tiers"].items()
    ]
    print_table(["tier", "what", "when", "that is"], rows, title=title, numbers=False)


def _ago(age_s: float | None) -> str:
    return "-" if age_s is None else f"{rounded_seconds(age_s)} ago"


def _show_namespaces(tier: TierNamespaces) -> None:
    lines = [f"{'some' if tier.has_own else 'no'} data of this stack's namespace"]
    for other in tier.others:
        found = [f"{name} is {ours!r} here and {theirs!r} there" for name, (ours, theirs) in other.differences.items()]
        lines.append(f"other namespace {other.digest}: {'; '.join(found) or 'it says nothing of itself'}")
    for line in [f"FAILED: {tier.error}"] if tier.error else lines:
        print_text(one_line(f"{tier.tier}: {line}"))


@dataclass(frozen=True, slots=True)
class OtherNamespace:
    """A namespace, other than the stack's own, with data in a tier's storage.

    Attributes:
        digest: 32 hexadecimal digits.
        differences: For each field that differs, such as "namespace.revision": the stack's value and this one's, None
            without a value. Empty if the storage has no readable form of the namespace.
    """

    digest: str
    differences: Mapping[str, tuple[object, object]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TierNamespaces:
    """The namespaces in the storage of one tier.

    Attributes:
        has_own: Whether it has data of the stack's namespace.
        others: The fewest differences first.
        error: Why they could not be listed; empty if they were.
    """

    tier: str
    has_own: bool = False
    others: tuple[OtherNamespace, ...] = ()
    error: str = ""


def tier_namespaces(config: StackConfig, settings: TierSettings, deadline: float) -> TierNamespaces:
    """Return the namespaces in a tier's storage, by I/O until `deadline` (of `time.monotonic()`). It opens no stack."""
    own = config.identity
    stored: list[StoredNamespace] = []
    error = administer(settings, lambda administration: stored.extend(administration.survey(deadline).namespaces))
    if error != "":
        return TierNamespaces(
            settings.name, error=error or f"tiers of type '{settings.type}' cannot list their namespaces"
        )
    digest = own.digest.hex()
    others = [
        OtherNamespace(each.digest, differences(own.described, each.described))
        for each in stored
        if each.digest != digest
    ]
    others.sort(key=lambda other: (not other.differences, len(other.differences), other.digest))
    has_own = any(each.digest == digest and each.blocks != 0 for each in stored)  # an open stack has made its directory
    return TierNamespaces(settings.name, has_own, tuple(others[:NAMESPACES_MAX]))
