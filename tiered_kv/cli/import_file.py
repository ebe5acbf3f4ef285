"""`tiered-kv import`: put the blocks of a file of `tiered-kv export` into a storage.

`main` calls `run` on the main thread. A `TimeLimit` copies on another thread. What must stay true: a file that is cut
off or damaged is refused before anything is opened, and a damaged record is passed over and counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import closing
from functools import partial

from tiered_kv.cli.arguments import describe_use, file_path, size
from tiered_kv.cli.output import Status, interrupt_flag, progress
from tiered_kv.cli.places import FORMS, CopiedNamespace, Place, place_of
from tiered_kv.cli.stacks import held_log, tier_error_text
from tiered_kv.cli.time_limit import TimeLimit
from tiered_kv.cli.transfers import (
    OPEN_S,
    PLAN_S,
    Copied,
    check_namespace,
    opened_target,
    report,
    transfer,
    within_capacity,
)
from tiered_kv.copying.archive import ArchiveSource
from tiered_kv.copying.source import BlocksToCopy, Selection
from tiered_kv.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Put the blocks of a file, which `tiered-kv export` wrote, into a storage. Blocks that it has are passed over, "
        "so an import that ended early goes on where it was."
    )
    describe_use(
        parser,
        ("tiered-kv import prompt.tkv stack.yaml:redis", "into the shared tier of a running stack"),
        ("tiered-kv import prompt.tkv stack.yaml:nvme --dry-run", "what is in the file, and does it fit the stack?"),
        found="blocks were damaged or refused, and are not there",
    )
    parser.add_argument("file", metavar="FILE", type=file_path)
    parser.add_argument("target", metavar="TO", help=FORMS)
    parser.add_argument("--rate", metavar="BYTES/s", type=size, help="how fast at most")
    parser.add_argument("--dry-run", action="store_true", help="show what would be imported")


def run(args: argparse.Namespace) -> Status:
    if not args.file.is_file():
        if args.file.exists():
            raise ConfigError(f"'{args.file}' is no regular file: expected one of 'tiered-kv export'")
        raise ConfigError(f"there is no file '{args.file}'")
    target = place_of(args.target)
    with closing(ArchiveSource(args.file)) as archive:
        copied = Copied(CopiedNamespace(archive.digest, archive.described, archive.block_bytes))
        check_namespace(target, copied.namespace)
        with interrupt_flag() as is_stopped, held_log() as drop:
            time_limit = TimeLimit(PLAN_S)
            work = partial(_import, archive, target, copied, args, time_limit, is_stopped)
            try:
                time_limit.run(work, target.settings)
            except Exception as error:  # a third-party tier may raise anything
                drop()
                copied.error = tier_error_text(error, target.settings)
            stopped = is_stopped()
    return report(copied, str(args.file), target.text, args, stopped=stopped)


def _import(
    archive: ArchiveSource,
    target: Place,
    copied: Copied,
    args: argparse.Namespace,
    time_limit: TimeLimit,
    is_stopped: Callable[[], bool],
) -> None:
    """Plan and import. The thread of a `TimeLimit`."""
    selection = within_capacity(target, Selection())
    blocks = BlocksToCopy(archive, archive.digest, archive.block_bytes, selection)
    with progress("listing the file", None):
        copied.plan = blocks.plan()
    if args.dry_run:
        copied.counts.is_whole = True
        return
    time_limit.begin(OPEN_S)
    with opened_target(target, copied) as opened:
        transfer(blocks, opened, copied, args, time_limit, is_stopped, target.codecs)
        time_limit.begin(OPEN_S)
