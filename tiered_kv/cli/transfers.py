"""What the verbs `copy`, `export` and `import` share: which blocks move, the ends, the move itself, and its verdict.

The verbs call it on the main thread; `planned`, `opened_target` and `transfer` run on the thread of a `TimeLimit`. What
must stay true: a target in which the blocks could never be found is refused, with each field that differs.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tiered_kv.base import OffloadKey
from tiered_kv.cli.arguments import file_path, size
from tiered_kv.cli.output import Status, print_json, print_text, progress, quantity
from tiered_kv.cli.paced import paced
from tiered_kv.cli.places import CopiedNamespace, Place, no_copies
from tiered_kv.cli.stacks import digest, namespace_differences
from tiered_kv.cli.time_limit import TimeLimit
from tiered_kv.config.entries import tier_type_of
from tiered_kv.config.units import rounded_bytes
from tiered_kv.copying.archive import KEY_BYTES_MAX
from tiered_kv.copying.copier import Copier, CopyCounts, Recoding
from tiered_kv.copying.source import BlocksToCopy, Plan, Selection
from tiered_kv.copying.target import JOB_BYTES, RecordTarget, TierTarget
from tiered_kv.errors import ConfigError, TierBusyError
from tiered_kv.toolkit.administration import TierAdministration
from tiered_kv.toolkit.codecs import CodecSet

PLAN_S: Final = 3600.0  # for the listing of the source
OPEN_S: Final = 120.0
"""The time for the opening of the target, and for its end."""
_ROOM: Final = 0.9  # the part of a target's capacity that a copy may fill: it has other files, too
_DIRECTORY_SPARE_BYTES: Final = 1 << 30
"""Room in a directory without a stack's file beside its blocks: segments that are not full, and small files."""


@dataclass(eq=False)
class Copied:
    """A copy's plan, and its result."""

    namespace: CopiedNamespace
    keys: int = 0  # of `--keys`
    plan: Plan = field(default_factory=lambda: Plan(0, 0))
    counts: CopyCounts = field(default_factory=CopyCounts)
    error: str = ""
    began_s: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began_s


def add_selection(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--keys", metavar="FILE", type=file_path, help="only these blocks: a key in hex on each line")
    which.add_argument("--hottest", metavar="SIZE", type=size, help="only the last used blocks, up to this size")
    parser.add_argument("--namespace", metavar="DIGEST", type=digest, help="which, if FROM has several")


def selection_of(args: argparse.Namespace) -> Selection:
    """Return the blocks that `--keys` or `--hottest` choose. Raises `ConfigError`: the file of keys cannot be used."""
    return Selection(None if args.keys is None else keys_in(args.keys), args.hottest)


def planned(
    source: Place, administration: TierAdministration, namespace: CopiedNamespace, selection: Selection
) -> tuple[BlocksToCopy, Plan]:
    """List the source, and return what is to be copied. Raises `ConfigError`: its type gives no blocks."""
    if selection.keys is None and administration.needs_keys:
        raise ConfigError(
            f"{source.text}: tiers of type '{source.settings.type}' keep no keys of their blocks, only digests; "
            "give the keys by --keys FILE, or copy another tier of the stack"
        )
    blocks = BlocksToCopy(administration, namespace.digest, namespace.block_bytes, selection)
    try:
        with progress(f"listing {source.settings.name}", None):
            return blocks, blocks.plan()
    except NotImplementedError:
        raise no_copies(source) from None


def within_capacity(target: Place, selection: Selection) -> Selection:
    """Return the selection, with no more blocks than a target with a capacity can keep: the last used ones."""
    capacity_bytes = target.settings.storage_facts().capacity_bytes
    if capacity_bytes is None or target.stands_for_directory:
        return selection
    room_bytes = int(capacity_bytes * _ROOM)
    return Selection(selection.keys, min(room_bytes, selection.bytes_max or room_bytes))


@contextmanager
def opened_target(target: Place, copied: Copied) -> Iterator[TierTarget]:
    namespace, settings = copied.namespace, target.settings
    if not getattr(tier_type_of(settings).load(), "takes_records", False):
        raise ConfigError(f"{target.text}: tiers of type '{settings.type}' take no blocks from a copy")
    if target.stands_for_directory:
        stored = _stored_bytes(target)
        capacity_bytes = int((stored + copied.plan.size_bytes) / _ROOM) + _DIRECTORY_SPARE_BYTES
        settings = settings.model_copy(update={settings.storage_settings.capacity: capacity_bytes})
    try:
        opened = TierTarget(settings, bytes.fromhex(namespace.digest), namespace.described, namespace.block_bytes)
    except TierBusyError as error:
        message = f"{error.message.partition(';')[0]}; stop it first, or copy to a tier that processes share"
        raise TierBusyError(message, tier=settings.name, operation="copy") from error
    try:
        yield opened
    finally:
        opened.close()


def _stored_bytes(place: Place) -> int:
    """Return how many bytes a directory's files have."""
    directory = place.settings.storage_facts().directory
    paths = Path(directory or "").rglob("*")
    return sum(each.lstat().st_blocks * 512 for each in paths if each.is_file())


def transfer(
    blocks: BlocksToCopy,
    target: RecordTarget,
    copied: Copied,
    args: argparse.Namespace,
    time_limit: TimeLimit,
    is_stopped: Callable[[], bool],
    codecs: CodecSet | None = None,
    recoding: Recoding | None = None,
) -> None:
    """Move the planned blocks into an open target, at the rate of the arguments. See `Copier`."""
    pause_s = JOB_BYTES / args.rate if args.rate else 0.0

    def begin_step(limit_s: float) -> None:
        time_limit.begin(limit_s + pause_s)

    with progress("copying", copied.plan.size_bytes, in_bytes=True) as show:
        on_bytes = paced(args.rate, show, math.inf)
        copier = Copier(blocks, target, codecs, on_bytes, is_stopped, begin_step, recoding)
        copied.counts = copier.counts
        copier.run(copied.plan)


def check_namespace(target: Place, namespace: CopiedNamespace) -> None:
    """Raise ConfigError if a stack cannot use the blocks of a namespace, with each field that differs."""
    stack = target.stack
    if stack is None or (stack.is_whole and stack.digest == namespace.digest):
        return
    changed = namespace_differences(stack, namespace.described)
    if not stack.is_whole and not changed:
        return  # an engine's stack: its file leaves fields open
    fields = "".join(f"\n  {name} is {theirs!r} in FROM, {ours!r} in TO" for name, (ours, theirs) in changed.items())
    raise ConfigError(
        f"the blocks are of the namespace {namespace.digest}, and {target.text} uses {stack.digest or 'another'}: "
        f"it would never find them{':' if fields else ''}{fields}"
    )


def keys_in(path: Path) -> list[OffloadKey]:
    """Return the keys in a file: one on each line, in hexadecimal; empty lines and lines after `#` do not count.

    Raises:
        ConfigError: The file cannot be read, or a line is no key.
    """
    keys: dict[OffloadKey, None] = {}
    try:
        with path.open("r", encoding="ascii") as file:
            for number, line in enumerate(file, 1):
                text = line.partition("#")[0].strip()
                if not text:
                    continue
                try:
                    key = bytes.fromhex(text)
                except ValueError:
                    key = b""
                if not 4 < len(key) <= KEY_BYTES_MAX:
                    raise ConfigError(f"{path}, line {number}: expected a key in hexadecimal, found {text[:80]!r}")
                keys[OffloadKey(key)] = None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not keys:
        raise ConfigError(f"{path} has no keys")
    return list(keys)


def report(copied: Copied, source: str, target: str, args: argparse.Namespace, *, stopped: bool) -> Status:
    """Print the verdict, and return the exit status."""
    counts, plan = copied.counts, copied.plan
    ok = counts.ok and not copied.error
    if args.json:
        print_json(
            {
                "from": source,
                "to": target,
                "namespace": copied.namespace.digest,
                "dry_run": bool(getattr(args, "dry_run", False)),
                "planned": {"blocks": plan.blocks, "size_bytes": plan.size_bytes},
                "left_out": {"blocks": plan.left_out, "size_bytes": plan.left_out_bytes},
                "copied": counts.copied,
                "copied_bytes": counts.copied_bytes,
                "present": counts.present,
                "gone": counts.gone,
                "damaged": dict(counts.damaged),
                "unreadable": dict(counts.unreadable),
                "refused": dict(counts.refused),
                "is_whole": counts.is_whole,
                "seconds": round(copied.seconds, 3),
                "interrupted": stopped,
                "error": copied.error,
                "ok": ok,
            }
        )
    else:
        for line in _lines(copied, args, stopped=stopped):
            print_text(line)
    if copied.error:
        return Status.ERROR
    if stopped and not counts.is_whole:
        return Status.INTERRUPTED
    return Status.OK if ok else Status.FOUND


def _lines(copied: Copied, args: argparse.Namespace, *, stopped: bool) -> Iterator[str]:
    counts, plan = copied.counts, copied.plan
    what = f"{quantity(plan.blocks, 'block')} of {rounded_bytes(plan.size_bytes)}"
    if getattr(args, "dry_run", False) and not copied.error:
        yield f"would copy {what}, without those that the target has"
    elif not copied.error or counts.copied:
        rate = f", {rounded_bytes(int(counts.copied_bytes / copied.seconds))}/s" if counts.copied else ""
        yield f"copied {quantity(counts.copied, 'block')} of {rounded_bytes(counts.copied_bytes)}{rate}"
    if plan.left_out:
        yield f"left out {quantity(plan.left_out, 'colder block')} of {rounded_bytes(plan.left_out_bytes)}"
    if counts.present:
        yield f"passed over {quantity(counts.present, 'block')} that the target has"
    if copied.keys and (absent := copied.keys - plan.blocks + counts.gone):
        yield f"{quantity(absent, 'block')} of --keys are not at the source"
    elif counts.gone:
        yield f"{quantity(counts.gone, 'block')} had left the source meanwhile"
    yield from _reasons("damaged at the source, not copied", counts.damaged)
    yield from _reasons("unreadable at the source, not copied", counts.unreadable)
    yield from _reasons("REFUSED by the target", counts.refused)
    if stopped and not counts.is_whole:
        yield "interrupted: the same command goes on where it was"
    if copied.error:
        yield f"FAILED: {copied.error}"


def _reasons(what: str, counted: Mapping[str, int]) -> Sequence[str]:
    detail = ", ".join(f"{reason} {count}" for reason, count in sorted(counted.items()))
    return [f"{what}: {sum(counted.values())} ({detail})"] if counted else []
