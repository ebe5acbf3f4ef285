"""`tiered-kv simulate`: what policies, sizes and stacks would hit, write and cost, without moving a byte."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

from tiered_kv._cli.arguments import describe_use, positive_int
from tiered_kv._cli.output import Status, print_json, print_table, progress
from tiered_kv._cli.reporting import add_report_argument, begun_report, write_report
from tiered_kv._cli.workload import add_workload_arguments, chosen_workload
from tiered_kv.config.stack_config import PRIMARY_BLOCKS_MIN, PRIMARY_TIER_NAME, StackConfig, load_config
from tiered_kv.config.units import parse_bytes
from tiered_kv.cpu.policies import make_policy
from tiered_kv.errors import ConfigError
from tiered_kv.observe.report import simulation_page as pages
from tiered_kv.observe.report.page import Run
from tiered_kv.workload.hit_rates import default_sizes, hit_rate
from tiered_kv.workload.prices import Prices, costs, load_prices, times_a_month
from tiered_kv.workload.request import Request
from tiered_kv.workload.routing import ROUTERS
from tiered_kv.workload.sampling import draw
from tiered_kv.workload.simulation import Fleet, simulate, with_limit, with_primary
from tiered_kv.workload.stack_distance import hit_curve

_OF_A_STACK = ("servers", "router", "concurrency", "limit", "prices")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say what a cache would hit, without moving a byte. Without STACK: hit rates of policies and sizes of the "
        "primary tier alone. With STACK: what each of its tiers would hit, write, read and evict, by the manager's "
        "own logic. No tier is opened and no storage is touched. Storage counts as fast enough: nothing is skipped "
        "or late because a disk or a network is slow."
    )
    describe_use(
        parser,
        ("tiered-kv simulate --trace requests.jsonl --capacity 1000,5000 --policy lru,arc", "two policies, two sizes"),
        ("tiered-kv simulate --trace requests.jsonl --policy arc --sample 0.1", "a tenth of the sessions: faster"),
        ("tiered-kv simulate stack.yaml --capacity 1GiB,4GiB --report sizes.html", "a stack with other primary tiers"),
        ("tiered-kv simulate stack.yaml --servers 8 --router sticky --prices prices.yaml", "servers, and the cost"),
    )
    parser.add_argument("stack", metavar="STACK", nargs="?", help="the stack's YAML file")
    parser.add_argument(
        "--capacity",
        metavar="SIZE,...",
        help="sizes of the primary tier: blocks, or with STACK 4GiB (default: the stack's; without STACK, ten sizes)",
    )
    parser.add_argument("--policy", metavar="NAME,...", help="eviction policies (default: the stack's, or lru)")
    parser.add_argument(
        "--sample", metavar="SHARE", type=_share, help="run this share of the sessions, such as 0.1; without STACK"
    )
    add_report_argument(parser)
    fleet = parser.add_argument_group("stacks", "with STACK")
    fleet.add_argument(
        "--servers",
        metavar="N",
        type=positive_int,
        help="servers with this stack (default: 1); tiers of type redis, s3 and fs are one for all",
    )
    fleet.add_argument("--router", choices=ROUTERS, help="which server gets a request (default: round-robin)")
    fleet.add_argument("--concurrency", metavar="N", type=positive_int, help="requests that run at once (default: 8)")
    fleet.add_argument(
        "--limit", metavar="TIER=SIZE", action="append", help="another capacity of a tier, such as redis=64GiB"
    )
    fleet.add_argument("--prices", metavar="FILE", type=Path, help="YAML file of prices; shows what a month costs")
    add_workload_arguments(parser)


def run(args: argparse.Namespace) -> Status:
    config = None if args.stack is None else _limited(load_config(args.stack), args.limit or [])
    given = [name for name in _OF_A_STACK if getattr(args, name) is not None]
    if config is None and given:
        raise ConfigError(f"--{given[0]} needs a STACK")
    if config is not None and args.sample is not None:
        raise ConfigError("--sample is for policies alone, not with a STACK")
    workload = chosen_workload(args)
    reported = begun_report(args, config)
    with progress("reading the requests", None):
        requests = list(workload.requests)
    if not any(request.hash_ids for request in requests):
        raise ConfigError("the requests have no block", location=str(args.trace))
    described = {"stack": args.stack, "workload": workload.described, "requests": len(requests)}
    if config is None:
        _simulate_policies(args, requests, workload.title, described, reported)
    else:
        _simulate_stacks(args, config, requests, workload.title, described, reported)
    return Status.OK


def _simulate_policies(
    args: argparse.Namespace,
    requests: Sequence[Request],
    title: str,
    described: dict[str, object],
    reported: Run | None,
) -> None:
    curve = hit_curve(requests)
    sample = None if args.sample is None else draw(requests, args.sample)
    sizes = _sizes(args.capacity, None) or default_sizes(curve)
    runs = [(policy, size) for policy in _names(args.policy) or ["lru"] for size in sizes]
    with _progress(len(runs), requests) as told:
        rates = [hit_rate(*each, requests, curve, sample, on_progress=told(at)) for at, each in enumerate(runs)]
    if args.json:
        counts = {"blocks": curve.blocks, "distinct_blocks": curve.distinct_blocks, "sample": args.sample}
        results = [asdict(rate) for rate in rates]
        print_json({**described, **counts, "results": results, "lru_curve": pages.points_of(curve)})
    else:
        print_table(*pages.rate_table(rates), title=title)
    if reported is not None:
        write_report(args, partial(pages.policy_page, reported, title, len(requests), curve, rates))


def _simulate_stacks(
    args: argparse.Namespace,
    config: StackConfig,
    requests: Sequence[Request],
    title: str,
    described: dict[str, object],
    reported: Run | None,
) -> None:
    chosen = {name: getattr(args, name) for name in ("servers", "router", "concurrency") if getattr(args, name)}
    fleet = Fleet(**chosen)
    sizes = _sizes(args.capacity, config) or [config.primary_blocks]
    policies = _names(args.policy) or [config.primary.policy]
    stacks = [with_primary(config, size, policy) for policy in policies for size in sizes]
    names = [PRIMARY_TIER_NAME, *(tier.name for tier in config.secondary)]
    prices = Prices(currency="", tiers={}) if args.prices is None else load_prices(args.prices, names)
    times = times_a_month(requests) if prices.tiers else 0.0
    with _progress(len(stacks), requests) as told:
        outcomes = [simulate(stack, requests, fleet, on_progress=told(at)) for at, stack in enumerate(stacks)]
    bills = [costs(outcome, prices, times) for outcome in outcomes]
    if args.json:
        results = [
            {**asdict(outcome), "costs": {name: {**asdict(cost), "total": cost.total} for name, cost in bill.items()}}
            for outcome, bill in zip(outcomes, bills, strict=True)
        ]
        for result in results:
            del result["request_hits"]
        print_json({**described, **asdict(fleet), "currency": prices.currency, "results": results})
    else:
        for outcome, bill in zip(outcomes, bills, strict=True):
            print_table(
                *pages.tier_table(outcome), title=f"{args.stack}: {title}, {pages.name_of(outcome, config, fleet)}"
            )
            if bill:
                print_table(*pages.cost_table(bill, prices.currency))
    if reported is not None:
        write_report(args, partial(pages.stack_page, reported, title, fleet, outcomes, bills, prices.currency))


@contextmanager
def _progress(runs: int, requests: Sequence[Request]) -> Iterator[Callable[[int], Callable[[int], None]]]:
    """Show how far several runs are; yield what returns where the run of this number tells it."""
    with progress("requests", runs * len(requests)) as advance:
        yield lambda number: lambda count: advance(number * len(requests) + count)


def _limited(config: StackConfig, limits: Sequence[str]) -> StackConfig:
    for limit in limits:
        name, _, size = limit.partition("=")
        try:
            config = with_limit(config, name, parse_bytes(size))
        except ValueError as error:
            raise ConfigError(f"{error}, found {limit!r}", location="--limit") from None
    return config


def _names(text: str | None) -> list[str]:
    """Return the names in an option; none where it is not given."""
    names = [] if text is None else [name.strip() for name in text.split(",")]
    if not all(names):
        raise ConfigError(f"expected names of policies, such as lru,arc, found {text!r}", location="--policy")
    for name in names:
        make_policy(name, PRIMARY_BLOCKS_MIN)  # a wrong name is better known before a simulation than after it
    return names


def _sizes(text: str | None, config: StackConfig | None) -> list[int]:
    """Return the sizes in an option, in blocks; none where it is not given."""
    least = 1 if config is None else PRIMARY_BLOCKS_MIN
    sizes = []
    for part in [] if text is None else text.split(","):
        try:
            size = int(part) if part.strip().isdecimal() else parse_bytes(part)
        except ValueError as error:
            raise ConfigError(f"{error}, found {part!r}", location="--capacity") from None
        if not part.strip().isdecimal():
            if config is None:
                raise ConfigError(f"expected a number of blocks, found {part!r}", location="--capacity")
            size //= config.block.bytes
        if size < least:
            raise ConfigError(f"expected room for at least {least} blocks, found {part!r}", location="--capacity")
        sizes.append(size)
    return sizes


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"expected a share between 0 and 1, such as 0.1, found {text!r}")
    return value
