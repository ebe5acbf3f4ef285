"""`tiered-kv export`: blocks of a storage into one file, which `tiered-kv import` puts into another.

`main` calls `run` on the main thread. A `TimeLimit` copies on another thread. What must stay true: the file has its
name only when it is complete; an export that ended early leaves none.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from tiered_kv.cli.arguments import describe_use, file_path, size
from tiered_kv.cli.output import Status, interrupt_flag
from tiered_kv.cli.places import FORMS, Place, namespace_of, no_copies, place_of
from tiered_kv.cli.stacks import administer
from tiered_kv.cli.time_limit import TimeLimit
from tiered_kv.cli.transfers import PLAN_S, Copied, add_selection, planned, report, selection_of, transfer
from tiered_kv.copying.archive import ArchiveTarget
from tiered_kv.copying.source import Selection
from tiered_kv.errors import ConfigError
from tiered_kv.toolkit.administration import TierAdministration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write blocks of a storage into one file, as they are stored: a session, a system prompt, or all of a tenant. "
        "The storage is only read, and may be in use. `tiered-kv import` puts them into another storage."
    )
    describe_use(
        parser,
        ("tiered-kv export stack.yaml:nvme prompt.tkv --keys prompt.keys", "the blocks of a system prompt"),
        ("tiered-kv export stack.yaml:nvme hot.tkv --hottest 20GiB", "the last used blocks"),
        found="blocks were damaged or unreadable, and are not in the file",
    )
    parser.add_argument("source", metavar="FROM", help=FORMS)
    parser.add_argument("file", metavar="FILE", type=file_path, help="a new file")
    add_selection(parser)
    parser.add_argument("--rate", metavar="BYTES/s", type=size, help="how fast at most")


def run(args: argparse.Namespace) -> Status:
    if args.file.exists():
        raise ConfigError(f"{args.file} exists already; remove it, or name another file")
    if not args.file.parent.is_dir():
        raise ConfigError(f"{args.file.parent} is no directory")
    source = place_of(args.source)
    selection = selection_of(args)
    copied = Copied(namespace_of(source, args.namespace), len(selection.keys or ()))
    with interrupt_flag() as is_stopped:
        time_limit = TimeLimit(PLAN_S)
        work = partial(_export, source, selection, copied, args, is_stopped, time_limit)
        _, error = administer(source.settings, work, time_limit)
        stopped = is_stopped()
    if error is None:
        raise no_copies(source)
    copied.error = error
    return report(copied, source.text, str(args.file), args, stopped=stopped)


def _export(
    source: Place,
    selection: Selection,
    copied: Copied,
    args: argparse.Namespace,
    is_stopped: Callable[[], bool],
    time_limit: TimeLimit,
    administration: TierAdministration,
) -> None:
    """Plan and export. The thread of a `TimeLimit`."""
    namespace = copied.namespace
    blocks, copied.plan = planned(source, administration, namespace, selection)
    archive = ArchiveTarget(args.file, bytes.fromhex(namespace.digest), namespace.described, namespace.block_bytes)
    with archive:
        transfer(blocks, archive, copied, args, time_limit, is_stopped)
        if copied.counts.is_whole:
            if not copied.counts.copied:
                raise ConfigError("none of the blocks is there; no file was written")
            archive.finish()
