"""`tiered-kv copy`: move the stored blocks of one storage into another, as they are.

`main` calls `run` on the main thread. A `TimeLimit` copies on another thread, and Ctrl-C ends the copy after the batch
that is being moved. What must stay true: the source is only read, and goes on serving; with `--dry-run` nothing is
opened that others might notice. A copy that ended early can be started again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tiered_kv.cli.arguments import describe_use, size
from tiered_kv.cli.output import Status, interrupt_flag
from tiered_kv.cli.places import FORMS, Place, namespace_of, no_copies, place_of
from tiered_kv.cli.stacks import administer
from tiered_kv.cli.time_limit import TimeLimit
from tiered_kv.cli.transfers import (
    OPEN_S,
    PLAN_S,
    Copied,
    add_selection,
    check_namespace,
    opened_target,
    planned,
    report,
    selection_of,
    transfer,
    within_capacity,
)
from tiered_kv.copying.copier import Recoding
from tiered_kv.copying.source import Selection
from tiered_kv.errors import ConfigError
from tiered_kv.toolkit.administration import TierAdministration
from tiered_kv.toolkit.codecs import CodecSet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Copy stored blocks from one storage to another, as they are: with their checksums, their namespace and their "
        "encryption. Blocks that the target has are passed over, so a copy that ended early goes on where it was. "
        "The source is only read, and may be in use."
    )
    describe_use(
        parser,
        ("tiered-kv copy old.yaml:nvme new.yaml:nvme", "move to a new disk"),
        ("tiered-kv copy stack.yaml:nvme stack.yaml:redis --hottest 20GiB --rate 500MB/s", "warm a shared tier"),
        ("tiered-kv copy /mnt/nvme/kv fs:/backup/kv --dry-run", "say what a backup would move"),
        found="blocks were damaged, unreadable or refused, and were not copied",
    )
    parser.add_argument("source", metavar="FROM", help=FORMS)
    parser.add_argument("target", metavar="TO", help="the same; a directory may be in use if its type is shared")
    add_selection(parser)
    parser.add_argument("--rate", metavar="BYTES/s", type=size, help="how fast at most")
    parser.add_argument("--recode", action="store_true", help="decode each block, and encode it by the target's codec")
    parser.add_argument("--dry-run", action="store_true", help="show what would be copied")


def run(args: argparse.Namespace) -> Status:
    source, target = place_of(args.source), place_of(args.target)
    _refuse_pair(source, target)
    namespace = namespace_of(source, args.namespace)
    check_namespace(target, namespace)
    selection = selection_of(args)
    copied = Copied(namespace, len(selection.keys or ()))
    with interrupt_flag() as is_stopped:
        time_limit = TimeLimit(PLAN_S)
        work = partial(_copy, source, target, selection, copied, args, is_stopped, time_limit)
        _, error = administer(source.settings, work, time_limit)
        stopped = is_stopped()
    if error is None:
        raise no_copies(source)
    copied.error = error
    return report(copied, source.text, target.text, args, stopped=stopped)


def _copy(
    source: Place,
    target: Place,
    selection: Selection,
    copied: Copied,
    args: argparse.Namespace,
    is_stopped: Callable[[], bool],
    time_limit: TimeLimit,
    administration: TierAdministration,
) -> None:
    """Plan and copy. The thread of a `TimeLimit`."""
    blocks, copied.plan = planned(source, administration, copied.namespace, within_capacity(target, selection))
    if args.dry_run or not copied.plan.blocks:
        copied.counts.is_whole = True
        return
    recoding = Recoding(*map(_codecs_for_recoding, (source, target))) if args.recode else None
    time_limit.begin(OPEN_S)
    with opened_target(target, copied) as opened:
        transfer(blocks, opened, copied, args, time_limit, is_stopped, target.codecs, recoding)
        time_limit.begin(OPEN_S)


def _codecs_for_recoding(place: Place) -> CodecSet:
    codecs = place.codecs
    if codecs is None:
        raise ConfigError(f"--recode needs the codecs of both ends; name a stack's file in place of {place.text}")
    return codecs


def _refuse_pair(source: Place, target: Place) -> None:
    ours, theirs = source.settings.storage_facts().directory, target.settings.storage_facts().directory
    if ours is not None and theirs is not None and Path(ours).resolve() == Path(theirs).resolve():
        raise ConfigError(f"FROM and TO are the same directory, {ours}")
