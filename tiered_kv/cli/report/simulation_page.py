"""The tables and pages of a simulation, and its result in one sentence: the cheapest setting that is good enough.

`tiered_kv.cli.simulate` calls it on the main thread. It prints the tables, and writes the page if a report is asked
for. Nothing here keeps a state. What must stay true: a run of a policy that failed is not called the best or the
cheapest, unless all failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from tiered_kv.cli.output import quantity
from tiered_kv.cli.report.figures import draw, plain_log
from tiered_kv.cli.report.page import Html, Run, card, figure, page, plots, section, table, tier_color, tile
from tiered_kv.config.stack_config import StackConfig
from tiered_kv.config.units import rounded_bytes
from tiered_kv.workload.hit_rates import HitCurve, HitRate
from tiered_kv.workload.simulation import Costs, Fleet, Simulated
from tiered_kv.workload.tally import GB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Table = tuple[Sequence[str], list[list[str]]]
"""The columns and the rows."""
StackRun = tuple[str, Simulated, Costs]
"""A simulation of a stack: its name among several, the result, and its costs."""

_POINTS: Final = 200
_MB: Final = 1e6
_LRU: Final = "lru"
_ENOUGH: Final = 0.99
"""The share of the best hit rate that is as good as the best."""
_KIND: Final = "Simulation report"


def points_of(curve: HitCurve) -> list[tuple[int, float]]:
    """Return sizes in blocks, from the longest prompt to all blocks, and the hit rate of LRU with each."""
    sizes = np.unique(np.geomspace(curve.longest_blocks, curve.distinct_blocks, _POINTS).round().astype(int)).tolist()
    return [(size, round(curve.rate(size), 6)) for size in sizes]


def rate_table(rates: Sequence[HitRate]) -> Table:
    """Return hit rates, a row for each size and a column for each policy."""
    policies = list(dict.fromkeys(rate.policy for rate in rates))
    shown = {
        (rate.policy, rate.capacity_blocks): "failed" if rate.policy_error else f"{rate.hit_rate:.1%}" for rate in rates
    }
    sizes = sorted({rate.capacity_blocks for rate in rates})
    return ["blocks", *policies], [[f"{size:,}", *(shown[policy, size] for policy in policies)] for size in sizes]


def stack_table(runs: Sequence[StackRun], currency: str) -> Table:
    """Return a row for each tier, if there is one run; if there are several, a row for each run."""
    priced = [f"{currency} a month"] if runs[0][2] else []
    if len(runs) > 1:
        columns = ["simulation", "hits of any tier", *runs[0][1].tiers, *priced]
        return columns, [[name, *_compared(simulated, costs)] for name, simulated, costs in runs]
    _, simulated, costs = runs[0]
    columns = ["tier", "hits", "share", "written GB", "MB/s", "read GB", "MB/s", "requests", "evicted", "skipped"]
    rows = []
    for name, tier in simulated.tiers.items():
        moved = [
            cell
            for moved_bytes in (tier.written_bytes, tier.read_bytes)
            for cell in (f"{moved_bytes / GB:,.2f}", _per_second(moved_bytes / _MB, simulated.seconds))
        ]
        requests = tier.written_blocks + tier.read_blocks + tier.lookup_requests
        counts = [f"{count:,}" for count in (requests, tier.evicted_blocks, tier.skipped_blocks)]
        bill = [f"{costs[name]['total']:,.2f}" if name in costs else "-"] if costs else []
        rows.append([name, f"{tier.hits:,}", f"{tier.hit_rate:.1%}", *moved, *counts, *bill])
    if costs:
        hits = simulated.blocks - simulated.misses
        rows.append(["all", f"{hits:,}", f"{simulated.hit_rate:.1%}", *[""] * 7, *_total_cell(costs)])
    rows.append(["misses", f"{simulated.misses:,}", f"{1 - simulated.hit_rate:.1%}", *[""] * (7 + len(priced))])
    return [*columns, *priced], rows


def cheapest(runs: Sequence[StackRun]) -> StackRun:
    """Return the cheapest run with hits within 1 % of the best; without prices, that with the least memory.

    A hit of a lower tier takes longer, which has no price here. So the hits of the first tiers must be within 1 %
    too: of the primary tier alone, then of the first two tiers, and so on.
    """
    runs = _sound(runs)
    tiers = list(runs[0][1].tiers)
    for first in (tiers, *(tiers[:count] for count in range(1, len(tiers)))):
        enough = _ENOUGH * max(_hits(simulated, first) for _, simulated, _ in runs)
        runs = [each for each in runs if _hits(each[1], first) >= enough]
    return min(runs, key=lambda each: (_cost(each[2]), each[1].capacity_blocks, -each[1].hit_rate))


def _sound(runs: Sequence[StackRun]) -> Sequence[StackRun]:
    """Leave out runs in which lru replaced a policy that failed; if that leaves none, return all."""
    return [each for each in runs if not each[1].policy_error] or runs


def _hits(simulated: Simulated, tiers: Sequence[str]) -> int:
    return sum(simulated.tiers[name].hits for name in tiers)


def headline(runs: Sequence[StackRun], currency: str) -> str:
    name, simulated, costs = cheapest(runs)
    best_name, best, _ = max(_sound(runs), key=lambda each: each[1].hit_rate)
    cost = f", {_cost(costs):,.2f} {currency} a month" if costs else ""
    best_told = "" if best_name == name else f"; the best, {best_name}, has {_hits_told(best)}"
    return f"The cheapest within 1 % of the best: {name}, {_hits_told(simulated)}{cost}{best_told}."


def _hits_told(simulated: Simulated) -> str:
    if len(simulated.tiers) == 1:
        return f"{simulated.hit_rate:.1%} hits"
    primary, use = next(iter(simulated.tiers.items()))
    return f"{simulated.hit_rate:.1%} hits of any tier ({use.hit_rate:.1%} of {primary})"


def _compared(simulated: Simulated, costs: Costs) -> list[str]:
    """Return the hits of a run, the share of each tier, and what a month costs."""
    shares = (f"{tier.hit_rate:.1%}" for tier in simulated.tiers.values())
    return [f"{simulated.hit_rate:.1%}", *shares, *_total_cell(costs)]


def _total_cell(costs: Costs) -> list[str]:
    """Return the cell of the total costs; no cell without prices."""
    return [f"{_cost(costs):,.2f}"] if costs else []


def _cost(costs: Costs) -> float:
    return sum(cost["total"] for cost in costs.values())


def policy_page(run: Run, workload: str, requests: int, curve: HitCurve, rates: Sequence[HitRate]) -> str:
    points = {_LRU: points_of(curve)}
    for rate in sorted(rates, key=lambda rate: rate.capacity_blocks):
        if rate.policy != _LRU and not rate.policy_error:
            points.setdefault(rate.policy, []).append((rate.capacity_blocks, rate.hit_rate))
    about = "LRU is known from the size of the longest prompt on. Points are the sizes at which others were run."
    plot = _rates_figure(points, about, "blocks")
    lede = (
        f"{quantity(requests, 'request')} asked for {quantity(curve.blocks, 'block')}, of which "
        f"{curve.distinct_blocks:,} are distinct, one request after the other. No byte was moved."
    )
    best = max([rate for rate in rates if not rate.policy_error] or rates, key=lambda rate: rate.hit_rate)
    parts = card(table(*rate_table(rates))), plots(plot)
    sections = [section("Hit rates", "By size and policy.", *parts)]
    best_tile = _hits_tile(best.hit_rate, f"{best.policy} with {best.capacity_blocks:,} blocks")
    return page(run, kind=_KIND, heading=workload, lede=lede, tiles=[best_tile], sections=sections)


def stack_page(
    run: Run, config: StackConfig, workload: str, fleet: Fleet, runs: Sequence[StackRun], currency: str
) -> str:
    """Return the page of simulations of a stack, whose costs are in `currency`."""
    _, first, _ = runs[0]
    points: dict[str, list[tuple[float, float]]] = {}
    for _, simulated, _ in sorted(_sound(runs), key=lambda each: each[1].capacity_blocks):
        gib = simulated.capacity_blocks * config.block.bytes / (1 << 30)
        points.setdefault(simulated.policy, []).append((gib, simulated.hit_rate))
    shown = [_rates_figure(points, "Hits of all tiers of a server.", "GiB")] if len(runs) > 1 else []
    about = (
        "Hits, evicted and skipped are blocks, requests those to the tier: a block each, and lookups. Rates are "
        "averages over the time of the prompts, which nothing but the requests limits; 1 GB is 1e9 bytes."
    )
    compares = "The share of blocks that each tier gave. The JSON object has the bytes and the requests of each."
    title, table_of = ("The settings compared", compares) if len(runs) > 1 else (f"The tiers: {runs[0][0]}", about)
    sections = [section(title, table_of, card(table(*stack_table(runs, currency))), plots(*shown))]
    routed = f", routed {fleet.router}" if fleet.servers > 1 else ""
    lede = (
        f"{quantity(first.requests, 'request')} asked for {quantity(first.blocks, 'block')} of "
        f"{rounded_bytes(config.block.bytes)} on {quantity(fleet.servers, 'server')}{routed}, at most "
        f"{fleet.concurrency} at once. The manager is the real one; its tiers kept keys and no bytes."
    )
    name, best, _ = max(_sound(runs), key=lambda each: each[1].hit_rate)
    heading, tiles = f"{workload} through {run.stack_name}", [_hits_tile(best.hit_rate, name)]
    if len(runs) > 1:
        chosen, simulated, costs = cheapest(runs)
        heading = headline(runs, currency).rstrip(".")
        lede = f"{workload[:1].upper()}{workload[1:]} through {run.stack_name}: {lede}"
        good = tile(f"{100 * simulated.hit_rate:.1f}", "%", f"hits: {chosen}, the cheapest that is as good")
        tiles = [good, *(tiles if chosen != name else ())]
        if costs:
            tiles.insert(1, tile(f"{_cost(costs):,.2f}", f"{currency} a month", f"for {chosen}"))
    return page(run, kind=_KIND, heading=heading, lede=lede, tiles=tiles, sections=sections)


def _hits_tile(hit_rate: float, of: str) -> Html:
    return tile(f"{100 * hit_rate:.1f}", "%", f"hits: {of}")


def _rates_figure(points: Mapping[str, Sequence[tuple[float, float]]], about: str, unit: str) -> Html:
    """Return a plot with a line for each policy; `points` are sizes in `unit`, and hit rates."""

    def plot(axes: Axes) -> None:
        for index, each in enumerate(points.values()):
            sizes, rates = zip(*each, strict=True)
            marker = "o" if len(each) < _POINTS / 2 else ""
            axes.plot(sizes, [100 * rate for rate in rates], color=tier_color(index), marker=marker, markersize=3)
        highest = max(rate for each in points.values() for _, rate in each)
        axes.set_ylim(0, 110 * highest or 1)  # no line at the edge
        axes.set_xscale("log")
        axes.set_xlabel(f"room of the primary tier ({unit})")
        axes.set_ylabel("blocks asked for (%)")
        plain_log(axes.xaxis)

    return figure(
        "Hit rate by size",
        f"The share of blocks that were hits, by the room of the primary tier. {about}",
        draw("rates", "Hit rate of each policy by the room of the primary tier", plot),
        [(policy, tier_color(index)) for index, policy in enumerate(points)],
    )


def _per_second(count: float, seconds: float) -> str:
    return f"{count / seconds:,.2f}" if seconds else "-"
