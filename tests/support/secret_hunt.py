"""Looking for planted secrets in everything that a stack shows of itself.

A marker is found as it is, in hexadecimal, percent-encoded, and in base64 at any of its three alignments.
"""

from __future__ import annotations

import base64
import io
import logging
import secrets
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tiered_kv.base import make_offload_key
from tiered_kv.config.secret_keys import KEY_BYTES
from tiered_kv.errors import TieredKVError
from tiered_kv.observe.prometheus import StackCollector, exposition
from tiered_kv.observe.status import status
from tiered_kv.stack import Stack, open_stack
from tiered_kv.testing.waiting import wait_until
from tiered_kv.tiering.keyed_names import KeyedNames

_CONDITION_WAIT_S = 20.0
_BLOCKS = 2


def new_marker() -> str:
    """Return a text that occurs nowhere else, and that is a key where a setting wants one (`secret_keys`).

    Letters and digits only, which few encodings change.
    """
    return secrets.token_hex(KEY_BYTES)


def forms_of(marker: str) -> dict[str, str]:
    """Return what a marker looks like in each encoding, by the encoding's name."""
    raw = marker.encode()
    forms = {"as it is": marker, "in hex": raw.hex(), "percent-encoded": "".join(f"%{byte:02x}" for byte in raw)}
    for shift in range(3):
        encoded = base64.b64encode(bytes(shift) + raw).decode()
        # Without the characters that hold bits of what stands before and after it too.
        forms[f"in base64, alignment {shift}"] = encoded[-(-shift * 8 // 6) : (shift + len(raw)) * 8 // 6]
    return forms


class Sheet:
    """What was shown, searched as it comes. One thread at a time."""

    def __init__(self, markers: Mapping[str, str]) -> None:
        self._forms = [
            (name, form, text) for name, marker in markers.items() for form, text in forms_of(marker).items()
        ]
        self._findings: list[str] = []
        self._notes = 0

    def __len__(self) -> int:
        return self._notes

    def note(self, place: str, *shown: object) -> None:
        """Search what `str` and `repr` make of each of `shown`; `place` says where it was."""
        for each in shown:
            self._search(place, each if isinstance(each, str) else f"{each!s}\n{each!r}")

    def note_error(self, place: str, error: BaseException) -> None:
        """Search an error, what it holds, what caused it, and its traceback."""
        link: BaseException | None = error
        while link is not None:
            self.note(f"{place}: {type(link).__name__}", link, link.args, vars(link), getattr(link, "__notes__", ""))
            link = link.__cause__ or link.__context__
        self.note(f"{place}: the traceback", "".join(traceback.format_exception(error)))

    def findings(self) -> list[str]:
        """Return where markers were seen, and what stood around them."""
        return list(self._findings)

    def _search(self, place: str, text: str) -> None:
        self._notes += 1
        lower = text.lower()
        for name, form, wanted in self._forms:
            # Base64 is nothing without its case; the other forms may have lost it.
            at = text.find(wanted) if "base64" in form else lower.find(wanted.lower())
            if at >= 0:
                self._findings.append(f"{name}, {form}, in {place}: {text[max(0, at - 80) : at + 60]!r}")


def show_running_stack(
    sheet: Sheet,
    place: str,
    source: Mapping[str, object],
    until: Callable[[Stack], bool] = lambda stack: True,
    wait_s: float = 1.0,
) -> bool:
    """Open a stack, use it, close it, and note all that can be seen from outside, the log at level DEBUG included.

    A test whose tiers do end what they are given says a longer `wait_s`: a busy machine may hold them up.
    """
    is_open = False
    with _log_of_everything() as log:
        try:
            with open_stack(source) as stack:
                is_open = True
                _use(sheet, place, stack, wait_s)
                wait_until(lambda: until(stack), _CONDITION_WAIT_S, what="what the stack was to do")
        except TieredKVError as error:
            sheet.note_error(place, error)
    sheet.note(f"{place}: the log", log.getvalue())
    return is_open


def process_as_seen() -> Iterator[str]:
    """Yield what other processes see of this one: its title, and its threads'."""
    yield Path("/proc/self/cmdline").read_text()
    for task in Path("/proc/self/task").iterdir():
        try:
            yield (task / "comm").read_text()
        except OSError:  # the thread has ended
            continue


def _use(sheet: Sheet, place: str, stack: Stack, wait_s: float) -> None:
    keys = [make_offload_key(bytes([number]) * 32, 0) for number in range(_BLOCKS)]
    blocks = np.zeros((_BLOCKS, stack.config.block.bytes), dtype=np.uint8)
    sheet.note(f"{place}: put", stack.put(keys, blocks, timeout=wait_s), stack.flush(wait_s))
    stack.manager.reset_cache()
    sheet.note(f"{place}: get", stack.get(keys, blocks, wait_s))
    sheet.note(f"{place}: counters", stack.counters())
    sheet.note(f"{place}: metrics", exposition(StackCollector(stack.counters, secrets=stack.config.secret_texts())))
    sheet.note(f"{place}: status", status(stack))
    for name, tier in zip(stack.tier_names, stack.secondary_tiers, strict=True):
        sheet.note(f"{place}: the tier '{name}'", tier, vars(tier), tier.stats())
        if isinstance(tier, KeyedNames):
            sheet.note(f"{place}: the tier '{name}' without its names", tier.inner, vars(tier.inner))
        try:
            sheet.note(f"{place}: what '{name}' says of itself", tier.describe())
        except TieredKVError as error:
            sheet.note_error(f"{place}: what '{name}' says of itself", error)
    for each in (stack, stack.manager, stack.config, *stack.config.secondary):
        sheet.note(f"{place}: {type(each).__name__}", each, vars(each))
    sheet.note(f"{place}: the threads", *threading.enumerate(), *process_as_seen())


@contextmanager
def _log_of_everything() -> Iterator[io.StringIO]:
    """Collect what any logger says, at the levels that libraries' loggers have while the root's is DEBUG."""
    text, root = io.StringIO(), logging.getLogger()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s %(threadName)s %(message)s"))
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield text
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
