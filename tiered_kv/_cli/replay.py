"""`tiered-kv replay`: drives real bytes through a stack by a sequence of requests, and checks all loaded bytes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Final

from tiered_kv._cli.arguments import describe_use, positive_int, seconds
from tiered_kv._cli.measuring import (
    Workload,
    add_report_argument,
    add_workload_arguments,
    chosen_workload,
    start_report,
    write_report,
)
from tiered_kv._cli.output import Status, interrupt_flag, print_json, print_table, print_text, progress
from tiered_kv._cli.report.page import quantity
from tiered_kv._cli.report.plots import Sampler
from tiered_kv._cli.report.replay_page import TIER_COLUMNS, replay_page, replay_sentences, tier_rows
from tiered_kv._cli.stacks import stack_with_blocks
from tiered_kv.metrics.instruments import flat_counts
from tiered_kv.reasons import TOO_SLOW_REASONS, reason_of
from tiered_kv.stack import EngineStack, open_engine_stack
from tiered_kv.workload.replay import ReplaySettings, replay
from tiered_kv.workload.tally import ReplayReport, Tally

_PROBLEMS: Final[Mapping[str, Callable[[str], str]]] = {
    "skipped_blocks_total": lambda word: reason_of(word).sentence,
    "too_slow_blocks_total": lambda word: TOO_SLOW_REASONS.get(word, word),
    "failed_blocks_total": lambda word: reason_of(word).sentence,
}
_VERBS: Final = {
    "skipped_blocks_total": "not stored",
    "too_slow_blocks_total": "not loaded",
    "failed_blocks_total": "failed to {}",
}
_EVENTS: Final = {
    "refused_promotion_blocks_total": ("block", "{} not loaded: the primary tier had no room"),
    "lookup_timeouts_total": ("lookup", "{} without an answer in time"),
    "expired_jobs_total": ("job", "{} not ended by the deadline"),
    "exceptions_total": ("exception", "{} of the tier's methods, which the log has"),
    "breaker_opened_total": ("time", "the breaker opened {}"),
}


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
        if reported is not None:
            reported.note_tiers(stack.tier_names, stack.secondary_tiers)
        sampler = Sampler(stack.manager.counters)
        report = _replayed(stack, workload, settings, sampler, interrupted)
    if args.json:
        print_json({"stack": args.stack, "workload": workload.described, **asdict(report)})
    else:
        _show(report, f"{args.stack}: {workload.title}")
    if reported is not None:
        page = partial(replay_page, reported, report, sampler, settings, workload.title, _notes(report))
        write_report(args, page)
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
    print_table(TIER_COLUMNS, list(tier_rows(report)), title=title)
    for line in [*replay_sentences(report), *_remarks(report)]:
        print_text(line)


def _remarks(report: ReplayReport) -> Iterator[str]:
    """Yield a sentence for each thing that went wrong. `--json` and the page have all counters."""
    if report.skipped_stores:
        yield f"cpu: {quantity(report.skipped_stores, 'block')} not stored: no room, since other blocks were in use"
    for name, tier in report.tiers.items():
        for counter, meanings in _PROBLEMS.items():
            for labels, count in flat_counts(tier.counters.get(counter, {})):
                if count:
                    what = f"{_VERBS[counter].format(*labels)}: {meanings(labels[-1])}"
                    yield f"{name}: {quantity(count, 'block')} {what} ({labels[-1]})"
        for counter, (noun, what) in _EVENTS.items():
            if times := tier.counters.get(counter):
                yield f"{name}: {what.format(quantity(times, noun))}"
    yield from _notes(report)


def _notes(report: ReplayReport) -> Iterator[str]:
    """Yield a sentence for each unexpected end of a request, a block or the replay."""
    if report.timed_out_requests:
        yield f"{report.timed_out_requests:,} requests did not wait for the rest of their prefix"
    for block in report.corrupt:
        yield f"CORRUPT: block {block.hash_id} from {block.tier}, first wrong byte at {block.offset}"
    if report.interrupted:
        yield "interrupted: these are the figures so far"
    elif not report.drained:
        yield "some stores had not ended when the time for them was over"
