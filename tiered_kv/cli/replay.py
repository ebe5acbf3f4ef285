"""`tiered-kv replay`: drives real bytes through a stack by a sequence of requests, and checks all loaded bytes.

`main` calls `run` on the main thread, which opens the stack and makes all calls of its manager. What must stay true: a
wrong byte ends with status 1, and after one Ctrl-C the figures so far are shown.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Final

from tiered_kv.cli.arguments import describe_use, positive_int, seconds
from tiered_kv.cli.measuring import (
    Workload,
    add_report_argument,
    add_workload_arguments,
    chosen_workload,
    shown_us,
    start_report,
    write_report,
)
from tiered_kv.cli.output import Status, interrupt_flag, print_json, print_table, print_text, progress, quantity
from tiered_kv.cli.report.figures import Sampler, hits_over_requests, throughput
from tiered_kv.cli.report.page import (
    MISS,
    Html,
    Run,
    card,
    color_key,
    element,
    figure,
    joined,
    page,
    plots,
    section,
    table,
    tier_color,
    tile,
)
from tiered_kv.cli.stacks import stack_with_blocks
from tiered_kv.config.settings import PRIMARY_NAME
from tiered_kv.config.units import format_bytes
from tiered_kv.metrics.series import counts_of
from tiered_kv.metrics.vocabulary import MANAGER
from tiered_kv.reasons import FAILED, SENTENCES, TooSlow
from tiered_kv.stack.open import EngineStack, open_engine_stack
from tiered_kv.workload.replay import ReplaySettings, replay
from tiered_kv.workload.tally import GB, ReplayReport, Tally

_COLUMNS: Final = ("tier", "hits", "share", "stored GB", "GB/s", "loaded GB", "GB/s")
_MISSED: Final = "misses"
_SPENT: Final = {
    "bytes": "went into writing and comparing bytes",
    "manager": "into the manager",
    "waiting": "into waits for storage",
}
_LIMITS: Final = {
    "bytes": ("the replay's own work", "the replay's own work limits them, not the storage"),
    "manager": ("the manager", "the manager's work for so many requests limits them, not the storage"),
    "waiting": ("the storage", "the storage limits them"),
}
_REASONS: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "misses_total": ("missed", SENTENCES),
    "skipped_blocks_total": ("not stored", SENTENCES),
    "too_slow_blocks_total": ("not loaded", {reason.value: reason.sentence for reason in TooSlow}),
    "failed_blocks_total": ("failed to {direction}", {reason.value: reason.sentence for reason in FAILED}),
    "refused_promotion_blocks_total": ("not loaded", {"": "the primary tier had no room"}),
    "lookup_timeouts_total": ("lookups", {"": "without an answer in time"}),
    "expired_jobs_total": ("jobs", {"": "not ended by the deadline"}),
    "exceptions_total": ("exceptions", {"": "of the tier's methods, which the log has"}),
    "breaker_opened_total": ("breaker", {"": "times that it opened"}),
}
"""Counters of blocks and calls that failed, or were left out: a word for each, and the meanings of its reasons."""
_REASON_COLUMNS: Final = ("tier", "what", "reason", "blocks", "what it means")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    drive = ReplaySettings()
    parser.description = (
        "Drive real bytes through a stack by the requests of a trace, or by chats of its own, and compare every byte "
        "that comes back. The blocks are stored in the stack's own namespace and stay there: they take room from "
        "yours. The stack must not be open elsewhere if a tier needs it alone (nvme does). Ctrl-C ends it in good "
        "order, with the figures so far."
    )
    describe_use(
        parser,
        ("tiered-kv replay stack.yaml --report replay.html", "240 chats of 8 turns, and a page with plots"),
        ("tiered-kv replay stack.yaml --trace requests.jsonl --requests 1000", "the first requests of a trace"),
        ("tiered-kv replay stack.yaml --seed 7 --chats 1000 --json", "other chats; one JSON object for a script"),
        found="a block came back with a wrong byte",
    )
    parser.add_argument("stack", metavar="STACK", help="the stack's YAML file")
    parser.add_argument(
        "--concurrency",
        metavar="N",
        type=positive_int,
        default=drive.concurrency,
        help="requests that run at once (default: %(default)s)",
    )
    parser.add_argument(
        "--request-timeout",
        metavar="TIME",
        type=seconds,
        default=drive.request_timeout_s,
        help="how long a request waits for its prefix, such as 250ms; the rest then counts as missed (default: 5s)",
    )
    add_report_argument(parser)
    add_workload_arguments(parser)


def run(args: argparse.Namespace) -> Status:
    workload = chosen_workload(args)
    settings = ReplaySettings(concurrency=args.concurrency, request_timeout_s=args.request_timeout)
    config = stack_with_blocks(args.stack)
    reported = start_report(args, config)
    with progress("opening the tiers", None):
        stack = open_engine_stack(config)
    with stack, interrupt_flag() as interrupted:
        sampler = Sampler(stack.manager.counters)
        report = _replayed(stack, workload, settings, sampler, interrupted)
    if args.json:
        print_json({"stack": args.stack, "workload": workload.described, **asdict(report)})
    else:
        _show(report, f"{args.stack}: {workload.title}")
    if reported is not None:
        write_report(args, lambda: replay_page(reported, report, sampler, settings, workload.title))
    if report.corrupt_blocks:
        return Status.FOUND
    return Status.INTERRUPTED if report.interrupted else Status.OK


def _replayed(
    stack: EngineStack, workload: Workload, settings: ReplaySettings, sampler: Sampler, interrupted: Callable[[], bool]
) -> ReplayReport:
    with progress("requests", workload.total) as advance:

        def on_progress(tally: Tally) -> None:
            advance(tally.requests)
            sampler.note(tally)

        sampler.start()
        report = replay(
            stack.manager, stack.kv_view, workload.requests, settings, should_stop=interrupted, on_progress=on_progress
        )
        sampler.finish()
    return report


def _show(report: ReplayReport, title: str) -> None:
    print_table(_COLUMNS, list(_tier_rows(report)), title=title)
    for line in [*_sentences(report), *_notes(report)]:
        print_text(line)
    if reasons := [row for row in _reason_rows(report) if row[1] != "missed"]:
        print_text("")
        print_table(_REASON_COLUMNS, reasons, numbers=False)


def _reason_rows(report: ReplayReport) -> Iterator[list[str]]:
    """Yield the rows of `_REASON_COLUMNS`: the blocks and calls that failed, or were left out, and why."""
    for counter, (what, meanings) in _REASONS.items():
        for name, tier in report.tiers.items():
            counts = counts_of(MANAGER[counter], tier.counters[counter]) if counter in tier.counters else ()
            for labels, count in sorted(counts, key=lambda each: -each[1]):
                if count:
                    reason = labels.get("reason", "")
                    yield [name, what.format_map(labels), reason, f"{count:,}", meanings.get(reason, "")]


def _notes(report: ReplayReport) -> Iterator[str]:
    """Yield a sentence for each unexpected end of a request, a block or the replay."""
    if report.skipped_stores:
        yield f"cpu: {quantity(report.skipped_stores, 'block')} not stored: no room, since other blocks were in use"
    if report.timed_out_requests:
        yield f"{quantity(report.timed_out_requests, 'request')} did not wait for all of the prefix"
    for block in report.corrupt:
        yield f"CORRUPT: block {block.hash_id} from {block.tier}, first wrong byte at {block.offset}"
    if report.interrupted:
        yield "interrupted: these are the figures so far"
    elif not report.drained:
        yield "some stores had not ended when the time for them was over"


def replay_page(run: Run, report: ReplayReport, sampler: Sampler, settings: ReplaySettings, workload: str) -> str:
    return page(
        run,
        kind="Replay report",
        heading=f"{workload} through {run.stack_name}",
        lede=" ".join(_sentences(report)),
        notes=_notes(report),
        tiles=_tiles(report),
        sections=[_origin(report), _course(report, sampler), _reasons(run, report)],
        settings=_settings(report, settings),
    )


def _tier_rows(report: ReplayReport) -> Iterator[list[str]]:
    """Yield the rows of `_COLUMNS`, one for each tier and one for misses."""
    for name, tier in report.tiers.items():
        stored = [f"{tier.stored_bytes / GB:.2f}", f"{tier.store_gb_per_s:.3f}"]
        loaded = [f"{tier.loaded_bytes / GB:.2f}", f"{tier.load_gb_per_s:.3f}"]
        yield [name, f"{tier.hits:,}", _share(tier.hits, report.blocks), *stored, *loaded]
    yield [_MISSED, f"{report.misses:,}", _share(report.misses, report.blocks), "", "", "", ""]


def _limit(report: ReplayReport) -> tuple[str, str]:
    """Return the limit of the rates, in a word and in a sentence."""
    return _LIMITS[max(report.spent_s, key=report.spent_s.__getitem__)]


def _share(part: int, whole: int) -> str:
    if not whole:
        return "-"
    return "<0.1%" if 0 < part < whole / 1000 else f"{part / whole:.1%}"


def _sentences(report: ReplayReport) -> list[str]:
    """Return the results of a replay as sentences, for the terminal and the page."""
    p50, p99, longest = map(shown_us, (report.step_us.p50, report.step_us.p99, report.step_us.max))
    asked = f"{quantity(report.blocks, 'block')} of {format_bytes(report.block_bytes)}"
    loaded = report.verified_blocks + report.corrupt_blocks
    wrong = f"{report.corrupt_blocks:,} are CORRUPT" if report.corrupt_blocks else "all are right"
    compared = (
        f"{quantity(loaded, 'loaded block')} compared byte by byte: {wrong}." if loaded else "No block was loaded."
    )
    spent = ", ".join(f"{report.spent_s[name] / max(report.seconds, 1e-9):.0%} {what}" for name, what in _SPENT.items())
    return [
        f"{report.hit_rate:.1%} of {asked} were hits, in {quantity(report.requests, 'request')} and "
        f"{report.seconds:,.1f} s.",
        compared,
        f"A step inside the manager took {p50} (median), {p99} (99 of 100 at most), {longest} (longest).",
        f"GB/s are averages over the run, of which {spent}: {_limit(report)[1]}.",
    ]


def _tiles(report: ReplayReport) -> Iterator[Html]:
    primary = report.tiers[PRIMARY_NAME]  # all transfers go through it
    yield tile(f"{100 * report.hit_rate:.1f}", "%", "of blocks were hits")
    yield tile(f"{report.blocks - report.misses:,}", "", "blocks loaded by requests")
    yield tile(f"{report.misses:,}", "", "blocks missed")
    yield tile(shown_us(report.step_us.p99), "", "99th percentile of a step")
    yield tile(f"{primary.store_gb_per_s:.3f}", "GB/s", f"stored by requests; limit: {_limit(report)[0]}")
    yield tile(f"{primary.load_gb_per_s:.3f}", "GB/s", f"loaded by requests; limit: {_limit(report)[0]}")
    yield tile(f"{report.corrupt_blocks:,}", "", "wrong blocks", is_bad=report.corrupt_blocks > 0)


def _keys(report: ReplayReport) -> dict[str, str]:
    return {name: tier_color(index) for index, name in enumerate(report.tiers)}


def _origin(report: ReplayReport) -> Html:
    keys = {**_keys(report), _MISSED: MISS}
    blocks = {**{name: tier.hits for name, tier in report.tiers.items()}, _MISSED: report.misses}
    parts = (
        element("span", style=f"flex: {count} 0 0; background: {keys[name]}") for name, count in blocks.items() if count
    )
    rows = [[joined([color_key(keys[row[0]]), row[0]]), *row[1:]] for row in _tier_rows(report)]
    about = (
        "Each block that a request asked for is counted once: for the tier that had it, or as missed. A request's "
        "first absent block and all blocks after it are missed. What a tier below the primary one gave, the primary "
        "tier loaded too. 1 GB is 1e9 bytes."
    )
    return section("Where blocks came from", about, card(element("div", *parts, class_="whole"), table(_COLUMNS, rows)))


def _course(report: ReplayReport, sampler: Sampler) -> Html:
    tiers, keys, samples = list(report.tiers), _keys(report), sampler.samples
    shown = [
        figure(
            "Hits by tier",
            "The share of blocks that each tier gave, from the first request to the last.",
            hits_over_requests(samples, tiers),
            [*keys.items(), (_MISSED, MISS)],
        ),
        figure(
            "Throughput",
            "Bytes that each tier stored (above) and loaded (below). For cpu, those that requests stored and loaded.",
            throughput(samples, tiers),
            keys.items(),
        ),
    ]
    taken = quantity(len(samples), "sample")
    about = f"{taken} of the counters, taken between steps, so that they count in no step's time."
    return section("During the run", about, plots(*shown))


def _reasons(run: Run, report: ReplayReport) -> Html:
    rows = [[name, what, run.scrub(reason), *others] for name, what, reason, *others in _reason_rows(report)]
    about = "Each tier counts its own blocks, so a block that two tiers did not have is counted in both."
    shown = table(_REASON_COLUMNS, rows, texts=[0, 1, 2, 4]) if rows else element("p", "None.")
    return section("Misses, skips and failures", about, card(shown))


def _settings(report: ReplayReport, settings: ReplaySettings) -> list[tuple[str, str]]:
    return [
        ("requests at once", f"{settings.concurrency:,}"),
        ("longest wait of a request for its blocks", f"{settings.request_timeout_s:g} s"),
        ("blocks left by an earlier run that the first request hit", f"{report.first_request_hits:,}"),
        ("requests that waited too long", f"{report.timed_out_requests:,}"),
    ]
