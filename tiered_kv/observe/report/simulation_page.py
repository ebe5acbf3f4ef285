"""The tables of a simulation, and its pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from tiered_kv.config.stack_config import StackConfig
from tiered_kv.config.units import rounded_bytes
from tiered_kv.observe.report import figures, page
from tiered_kv.observe.report.figures import draw, tier_color
from tiered_kv.observe.report.markup import Html, card, element, table
from tiered_kv.observe.report.page import Run, counted, figure, section, tile
from tiered_kv.workload.hit_rates import HitRate
from tiered_kv.workload.prices import TierCost
from tiered_kv.workload.simulation import Fleet, Outcome
from tiered_kv.workload.stack_distance import HitCurve
from tiered_kv.workload.tally import GB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Table = tuple[Sequence[str], list[list[str]]]
"""The heads and the rows."""

_POINTS: Final = 200
_MB: Final = 1e6
_LRU: Final = "lru"


def points_of(curve: HitCurve) -> list[tuple[int, float]]:
    """Return some sizes in blocks, from 1 to that of all blocks, and what LRU hits with each."""
    sizes = np.unique(np.geomspace(1, curve.distinct_blocks, _POINTS).round().astype(int)).tolist()
    return [(size, round(curve.rate(size), 6)) for size in sizes]


def rate_table(rates: Sequence[HitRate]) -> Table:
    """Return the hit rates, a row for each size and a column for each policy."""
    policies = list(dict.fromkeys(rate.policy for rate in rates))
    shown = {(rate.policy, rate.capacity_blocks): _rate(rate) for rate in rates}
    sizes = sorted({rate.capacity_blocks for rate in rates})
    return ["blocks", *policies], [[f"{size:,}", *(shown[policy, size] for policy in policies)] for size in sizes]


def tier_table(outcome: Outcome) -> Table:
    """Return what each tier did, and at last what was missed."""
    columns = ["tier", "hits", "share", "written GB", "MB/s", "read GB", "MB/s", "evicted", "skipped"]
    rows = []
    for name, tier in outcome.tiers.items():
        moved = [
            cell
            for moved_bytes in (tier.written_bytes, tier.read_bytes)
            for cell in (f"{moved_bytes / GB:,.2f}", _per_second(moved_bytes / _MB, outcome.seconds))
        ]
        counts = [f"{tier.evicted_blocks:,}", f"{tier.skipped_blocks:,}"]
        rows.append([name, f"{tier.hits:,}", f"{tier.hit_rate:.1%}", *moved, *counts])
    rows.append(["misses", f"{outcome.misses:,}", f"{1 - outcome.hit_rate:.1%}", *[""] * 6])
    return columns, rows


def cost_table(costs: Mapping[str, TierCost], currency: str) -> Table:
    """Return what each tier costs in a month, and all together."""
    rows = [
        [name, *(f"{value:,.2f}" for value in (cost.storage, cost.traffic, cost.requests, cost.total))]
        for name, cost in costs.items()
    ]
    rows.append(["all", "", "", "", f"{sum(cost.total for cost in costs.values()):,.2f}"])
    return [f"{currency} a month", "storage", "traffic", "requests", "total"], rows


def name_of(outcome: Outcome, config: StackConfig, fleet: Fleet) -> str:
    """Return what tells one of several simulations of a stack from the others."""
    name = f"{outcome.policy} with {rounded_bytes(outcome.capacity_blocks * config.block.bytes)}"
    if fleet.servers == 1:
        return name
    return f"{name} on each of {fleet.servers:,} servers, {outcome.busiest_share:.1%} of blocks on the busiest"


def policy_page(run: Run, workload: str, requests: int, curve: HitCurve, rates: Sequence[HitRate]) -> str:
    """Return the page of a simulation of policies and sizes."""
    policies = list(dict.fromkeys([_LRU, *(rate.policy for rate in rates)]))
    plot = figure(
        "Hit rate by size",
        "The share of blocks that were hits, by the room of the primary tier. LRU is drawn for every size, the other "
        "policies at the sizes that were run; a bar is the error of a sample.",
        _curves(curve, rates, policies),
        [(policy, tier_color(index)) for index, policy in enumerate(policies)],
    )
    lede = (
        f"{counted(requests, 'request')} asked for {counted(curve.blocks, 'block')}, of which "
        f"{curve.distinct_blocks:,} are distinct, one request after the other. No byte was moved."
    )
    best, shown = max(rates, key=lambda rate: rate.hit_rate), table(*rate_table(rates))
    return _page(
        run,
        f"{workload[:1].upper()}{workload[1:]}",
        lede,
        [tile(f"{100 * best.hit_rate:.1f}", "%", f"hits: {best.policy} with {best.capacity_blocks:,} blocks")],
        [section("Hit rates", "By size and policy.", card(shown), element("div", plot, class_="plots"))],
    )


def stack_page(
    run: Run,
    workload: str,
    fleet: Fleet,
    outcomes: Sequence[Outcome],
    bills: Sequence[Mapping[str, TierCost]],
    currency: str,
) -> str:
    """Return the page of simulations of a stack."""
    assert run.config is not None
    first, tiers = outcomes[0], list(outcomes[0].tiers)
    sections = []
    for policy in dict.fromkeys(outcome.policy for outcome in outcomes):
        sized = sorted((each for each in outcomes if each.policy == policy), key=lambda each: each.capacity_blocks)
        if len(sized) > 1:
            plot = figure(
                f"Hits by tier with {policy}",
                "The share of blocks that each tier gave, by the room of the primary tier of a server.",
                _shares(sized, tiers, run.config.block.bytes, policy),
                [*((name, tier_color(index)) for index, name in enumerate(tiers)), ("misses", figures.MISS)],
            )
            sections.append(element("div", plot, class_="plots"))
    for outcome, bill in zip(outcomes, bills, strict=True):
        tables = [card(table(*tier_table(outcome))), *([card(table(*cost_table(bill, currency)))] if bill else [])]
        about = "Rates are averages over the time of the requests; 1 GB is 1e9 bytes."
        sections.append(section(f"The tiers: {name_of(outcome, run.config, fleet)}", about, *tables))
    servers = counted(fleet.servers, "server")
    lede = (
        f"{counted(first.requests, 'request')} asked for {counted(first.blocks, 'block')} of "
        f"{rounded_bytes(run.config.block.bytes)} on {servers}"
        f"{f', routed {fleet.router}' if fleet.servers > 1 else ''}, at most {fleet.concurrency} at once. "
        "The manager is the real one; its tiers kept keys and no bytes."
    )
    best = max(outcomes, key=lambda outcome: outcome.hit_rate)
    tiles = [tile(f"{100 * best.hit_rate:.1f}", "%", f"hits: {name_of(best, run.config, fleet)}")]
    return _page(run, f"{workload[:1].upper()}{workload[1:]} through {run.stack_name}", lede, tiles, sections)


def _page(run: Run, heading: str, lede: str, tiles: Iterable[Html], sections: Sequence[Html]) -> str:
    ended = page.conditions(run, [])
    return page.page(
        run, kind="Simulation report", heading=heading, lede=lede, notes=(), tiles=tiles, sections=[*sections, ended]
    )


def _curves(curve: HitCurve, rates: Sequence[HitRate], policies: Sequence[str]) -> Html:
    def plot(axes: Axes) -> None:
        sizes, values = zip(*points_of(curve), strict=True)
        axes.plot(sizes, [100 * value for value in values], color=tier_color(0))
        for index, policy in enumerate(policies[1:], 1):
            own = sorted((rate for rate in rates if rate.policy == policy), key=lambda rate: rate.capacity_blocks)
            axes.errorbar(
                [rate.capacity_blocks for rate in own],
                [100 * rate.hit_rate for rate in own],
                [100 * rate.error for rate in own],
                color=tier_color(index),
                marker="o",
                markersize=3,
            )
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("room of the primary tier (blocks)")
        axes.set_ylabel("blocks asked for (%)")
        figures.plain_log(axes.xaxis)

    return draw("curves", "Hit rate of each policy by the room of the primary tier", plot)


def _shares(outcomes: Sequence[Outcome], tiers: Sequence[str], block_bytes: int, policy: str) -> Html:
    def plot(axes: Axes) -> None:
        shares = [[100 * outcome.tiers[name].hit_rate for outcome in outcomes] for name in tiers]
        shares.append([100 * (1 - outcome.hit_rate) for outcome in outcomes])
        colors = [*(tier_color(index) for index in range(len(tiers))), figures.MISS]
        gib = [outcome.capacity_blocks * block_bytes / (1 << 30) for outcome in outcomes]
        axes.stackplot(gib, shares, colors=colors, linewidth=0)
        axes.set_xscale("log")
        axes.set_ylim(0, 100)
        axes.set_xlabel("room of the primary tier (GiB)")
        axes.set_ylabel("blocks asked for (%)")
        figures.plain_log(axes.xaxis)

    return draw(f"shares-{policy}", "Share of blocks by the tier they came from, by the room of the primary tier", plot)


def _rate(rate: HitRate) -> str:
    return f"{rate.hit_rate:.1%}" + (f" ±{100 * rate.error:.1f}" if rate.error else "")


def _per_second(count: float, seconds: float) -> str:
    return f"{count / seconds:,.2f}" if seconds else "-"
