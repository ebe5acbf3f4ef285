"""`tiered-kv simulate`: hit rates of policies and sizes, and traffic and costs of stacks, without moving a byte.

`main` calls `run` on the main thread. What must stay true: it opens no tier, and it marks the results of a policy that
failed, which are those of lru.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import cast

from tiered_kv.cli.arguments import describe_use, file_path, positive_int
from tiered_kv.cli.measuring import (
    add_report_argument,
    add_workload_arguments,
    chosen_workload,
    start_report,
    write_report,
)
from tiered_kv.cli.output import Status, print_json, print_table, print_text, progress, quantity
from tiered_kv.cli.report import simulation_page as pages
from tiered_kv.cli.report.page import Run
from tiered_kv.cli.stacks import stack_with_blocks
from tiered_kv.config.settings import PRIMARY_NAME
from tiered_kv.config.stack_config import PRIMARY_BLOCKS_MIN, StackConfig
from tiered_kv.config.units import parse_bytes, rounded_bytes
from tiered_kv.cpu.policies import BUILT_IN_POLICIES, RowTable, make_policy
from tiered_kv.errors import ConfigError
from tiered_kv.workload.hit_rates import HostRates, default_sizes, hit_curve, hit_rate, host_rates
from tiered_kv.workload.request import Request, block_tokens
from tiered_kv.workload.simulation import (
    ROUTERS,
    Fleet,
    Prices,
    costs,
    load_prices,
    simulate,
    span_s,
    times_a_month,
    with_tier,
)

_FACTORS = (0.5, 1, 2)
"""Sizes of the primary tier that are compared, as multiples of the stack's."""
_STACK_OPTIONS = ("servers", "router", "limit", "prices")
_ENGINES = 4

Answer = tuple[dict[str, object], list[tuple[str, pages.Table]], Callable[[Run], str] | None]
"""The fields of the JSON object, the tables with their titles, and the function that draws the page, if it has one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say what a cache would hit, without moving a byte. Without STACK: hit rates of policies and sizes of the "
        "primary tier alone. With STACK: what each of its tiers would hit, write, read and evict, by the manager's "
        "own logic. With --shared-host: what a host's engines would hit in one cache for all. No tier is opened and "
        "no storage is touched. Storage counts as fast enough: nothing is skipped or late because a disk or a network "
        "is slow."
    )
    describe_use(
        parser,
        ("tiered-kv simulate --trace requests.jsonl --capacity 1000,5000 --policy lru,arc", "two policies, two sizes"),
        (
            "tiered-kv simulate stack.yaml --report sizes.html",
            "half and twice the primary tier with each policy, compared",
        ),
        ("tiered-kv simulate stack.yaml --capacity 1GiB --policy lru", "one setting: what each tier would do"),
        ("tiered-kv simulate stack.yaml --servers 8 --router sticky --prices prices.yaml", "servers, and the cost"),
        ("tiered-kv simulate --shared-host --engines 4 --capacity 8192", "a host's engines with one cache for all"),
        found="a policy failed, and lru took its place",
    )
    parser.add_argument("stack", metavar="STACK", nargs="?", help="the stack's YAML file")
    parser.add_argument(
        "--capacity",
        metavar="SIZE,...",
        help="sizes of the primary tier: blocks, or with STACK 4GiB (default: half, one and two times the stack's, or "
        "its own with --policy; without STACK, ten sizes)",
    )
    parser.add_argument(
        "--policy",
        metavar="NAME,...",
        help="eviction policies (default: all, or the stack's with --capacity; without STACK, lru)",
    )
    add_report_argument(parser)
    fleet = parser.add_argument_group("stacks", "with STACK")
    fleet.add_argument(
        "--servers",
        metavar="N",
        type=positive_int,
        help="servers with this stack (default: 1); a tier with storage that they share, such as redis, is one for all",
    )
    fleet.add_argument("--router", choices=ROUTERS, help="which server gets a request (default: round-robin)")
    parser.add_argument(
        "--concurrency",
        metavar="N",
        type=positive_int,
        help="requests that run at once (default: 8); with STACK or --shared-host",
    )
    fleet.add_argument(
        "--limit",
        metavar="TIER=SIZE",
        type=_limit,
        action="append",
        help="another capacity of a tier, such as redis=64GiB",
    )
    fleet.add_argument("--prices", metavar="FILE", type=file_path, help="YAML file of prices; shows what a month costs")
    _add_host_arguments(parser)
    add_workload_arguments(parser)


def _add_host_arguments(parser: argparse.ArgumentParser) -> None:
    host = parser.add_argument_group("one cache for the engines of a host", "without STACK")
    host.add_argument(
        "--shared-host",
        action="store_true",
        help="compare private caches with one that the engines share; --capacity is that of all",
    )
    host.add_argument("--engines", metavar="N", type=positive_int, help="engines of the host (default: 4)")


def run(args: argparse.Namespace) -> Status:
    config = None if args.stack is None else stack_with_blocks(args.stack)
    given = [name for name in _STACK_OPTIONS if getattr(args, name) is not None]
    if config is None and given:
        raise ConfigError(f"--{given[0]} needs a STACK")
    if args.concurrency is not None and config is None and not args.shared_host:
        raise ConfigError("--concurrency needs a STACK or --shared-host")
    if args.shared_host and (config is not None or args.report is not None):
        raise ConfigError("--shared-host is not with STACK or --report")
    if args.engines is not None and not args.shared_host:
        raise ConfigError("--engines needs --shared-host")
    for name, capacity in args.limit or ():
        assert config is not None
        if name == PRIMARY_NAME:
            raise ConfigError("the primary tier has --capacity", location="--limit")
        config = with_tier(config, name, capacity=capacity)
    policies, sizes, workload = _policies(args.policy), _sizes(args.capacity, config), chosen_workload(args)
    reported = start_report(args, config)
    with progress("reading the requests", None):
        requests = list(workload.requests)
    if not any(request.hash_ids for request in requests):
        raise ConfigError("the requests have no block", location=str(args.trace))
    tokens = block_tokens(requests)
    title = workload.title if args.trace is None else _described(workload.title, requests, tokens)
    if args.shared_host:
        fields, tables, page = _simulate_host(args, requests, title, policies, sizes)
    elif config is None:
        fields, tables, page = _simulate_policies(args, requests, title, policies, sizes)
    else:
        fields, tables, page = _simulate_stacks(args, config, requests, title, policies, sizes)
    if args.json:
        described = {"workload": workload.described, "requests": len(requests), "block_tokens": tokens}
        print_json({"stack": args.stack, **described, **fields})
    else:
        for title, table in tables:
            print_table(*table, title=title)
    results = cast("list[dict[str, str]]", fields["results"])
    if reported is not None and page is not None:
        write_report(args, partial(page, reported))
    if config is not None and args.trace is not None:
        _note_other_tokens(config, tokens)
    failures = {each["policy"]: each["policy_error"] for each in results if each["policy_error"]}
    for policy, error in failures.items():
        print_text(f"the policy {policy} failed, so lru took its place: {error}", sys.stderr)
    return Status.FOUND if failures else Status.OK


def _described(title: str, requests: Sequence[Request], tokens: int) -> str:
    """Return a trace's title with its time span and the tokens of a block, as they were read."""
    blocks = f", blocks of {quantity(tokens, 'token')}" if tokens else ""
    return f"{title}: {quantity(len(requests), 'request')} in {span_s(requests):,.0f} s{blocks}"


def _note_other_tokens(config: StackConfig, tokens: int) -> None:
    stack_tokens = config.block.tokens
    if tokens and tokens != stack_tokens and "tokens" in config.block.model_fields_set:
        print_text(
            f"note: the trace's blocks have {quantity(tokens, 'token')}, the stack's {stack_tokens:,}: each block "
            "of the trace counts as one of the stack, so give block the bytes and tokens of the trace's",
            sys.stderr,
        )


def _shown(rates: HostRates) -> list[str]:
    return ["failed"] * 2 if rates.policy_error else [f"{rates.private:.1%}", f"{rates.shared:.1%}"]


def _simulate_policies(
    args: argparse.Namespace, requests: Sequence[Request], workload: str, policies: list[str], sizes: list[int]
) -> Answer:
    curve = hit_curve(requests)
    rates = []
    for policy, size in product(policies or ["lru"], sizes or default_sizes(curve)):
        with progress(f"{policy} with {size:,} blocks", len(requests)) as advance:
            rates.append(hit_rate(policy, size, requests, curve, on_progress=advance))
    fields = {
        "blocks": curve.blocks,
        "distinct_blocks": curve.distinct_blocks,
        "results": [asdict(rate) for rate in rates],
        "lru_curve": pages.points_of(curve),
    }
    return (
        fields,
        [(workload, pages.rate_table(rates))],
        lambda run: pages.policy_page(run, workload, len(requests), curve, rates),
    )


def _simulate_host(
    args: argparse.Namespace, requests: Sequence[Request], workload: str, policies: list[str], sizes: list[int]
) -> Answer:
    fleet = Fleet(args.engines or _ENGINES, "random", args.concurrency or Fleet().concurrency)
    rates = []
    for policy, size in product(policies or ["lru"], sizes or default_sizes(hit_curve(requests))):
        with progress(f"{policy} with {size:,} blocks", len(requests)) as advance:
            rates.append(host_rates(policy, size, requests, fleet, on_progress=advance))
    columns = ["blocks", "policy", f"{fleet.servers} private caches", "one shared"]
    rows = [[f"{each.capacity_blocks:,}", each.policy, *_shown(each)] for each in rates]
    results = [asdict(each) for each in rates]
    fields = {"engines": fleet.servers, "concurrency": fleet.concurrency, "results": results}
    return fields, [(workload, (columns, rows))], None


def _simulate_stacks(
    args: argparse.Namespace,
    config: StackConfig,
    requests: Sequence[Request],
    workload: str,
    policies: list[str],
    sizes: list[int],
) -> Answer:
    fleet = Fleet(**{name: getattr(args, name) for name in ("servers", "router", "concurrency") if getattr(args, name)})
    names = [PRIMARY_NAME, *(tier.name for tier in config.secondary)]
    prices = Prices(currency="", tiers={}) if args.prices is None else load_prices(args.prices, names)
    times = times_a_month(requests) if prices.tiers else 0.0
    runs: list[pages.StackRun] = []
    if not policies and not sizes:  # compare the stack with other policies and sizes
        policies = [*dict.fromkeys([config.primary.policy, *BUILT_IN_POLICIES])]
        sizes = [max(PRIMARY_BLOCKS_MIN, int(factor * config.primary_blocks)) for factor in _FACTORS]
    for policy, size in product(policies or [config.primary.policy], sizes or [config.primary_blocks]):
        name = f"{policy} with {size:,} blocks ({rounded_bytes(size * config.block.bytes)})"
        with progress(name, len(requests)) as advance:
            stack = with_tier(config, PRIMARY_NAME, capacity=size * config.block.bytes, policy=policy)
            simulated = simulate(stack, requests, fleet, on_progress=advance)
        if fleet.servers > 1:
            name += f" on each of {fleet.servers:,} servers, {simulated.busiest_share:.1%} of blocks on the busiest"
        if simulated.policy_error:
            name += ": the policy failed, these are lru's figures"
        runs.append((name, simulated, costs(simulated, prices, times)))
    results = [{**asdict(simulated), "costs": bill} for _, simulated, bill in runs]
    title = f"{args.stack}: {workload}" + (f", {runs[0][0]}" if len(runs) == 1 else "")
    if len(runs) > 1:
        title = f"{pages.headline(runs, prices.currency)}\n{title}"
    tables = [(title, pages.stack_table(runs, prices.currency))]
    best = pages.cheapest(runs)[1]
    cheapest = {"policy": best.policy, "capacity_blocks": best.capacity_blocks}
    described = {name: getattr(fleet, name) for name in ("servers", "router", "concurrency")}
    fields = {**described, "currency": prices.currency, "cheapest": cheapest, "results": results}
    return fields, tables, lambda run: pages.stack_page(run, config, workload, fleet, runs, prices.currency)


def _policies(text: str | None) -> list[str]:
    """Return the names in an option; none without it."""
    names = [] if text is None else [name.strip() for name in text.split(",")]
    if not all(names):
        raise ConfigError(f"expected names of policies, such as lru,arc, found {text!r}", location="--policy")
    for name in names:
        try:
            # An unknown name is an error before the simulation, not after it.
            make_policy(name, RowTable(PRIMARY_BLOCKS_MIN))
        except ConfigError as error:
            raise ConfigError(error.message, location="--policy") from error
    return names


def _sizes(text: str | None, config: StackConfig | None) -> list[int]:
    """Return the sizes in an option, in blocks; none without it."""
    least = 1 if config is None else PRIMARY_BLOCKS_MIN
    sizes = []
    for part in [] if text is None else text.split(","):
        try:
            size, is_number = parse_bytes(part), part.strip().isdecimal()
        except ValueError as error:
            raise ConfigError(f"{error}, found {part!r}", location="--capacity") from None
        if config is None and not is_number:
            raise ConfigError(f"expected a number of blocks, found {part!r}", location="--capacity")
        if config is not None and not is_number:
            size //= config.block.bytes
        if size < least:
            raise ConfigError(f"expected room for at least {least} blocks, found {part!r}", location="--capacity")
        sizes.append(size)
    return sizes


def _limit(text: str) -> tuple[str, int]:
    name, _, size = text.partition("=")
    try:
        return name, parse_bytes(size)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"TIER=SIZE: {error}, found {text!r}") from None
