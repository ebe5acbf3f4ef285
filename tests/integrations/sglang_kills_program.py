"""Runs in an environment with SGLang: hosts over our backend, each killed at a random moment of its life.

    python sglang_kills_program.py DIRECTORY '{"layout": "page_first", "capacity": "256MiB", "kills": 40, "seed": 0}'

A host is a fork of this program, with a host pool and a backend of its own. It loads pages that earlier hosts have
stored. Then it has two threads, as SGLang has: one stores pages and one loads them. The bytes of a page follow from its
number, so every page that comes back is compared. Only the first host lives to its end, which says how long one lives.
Prints a line of JSON: the phases in which hosts were killed, and the pages whose store had been reported as done: which
of them a later host found or lost, which the same host loaded or was missing, and which were wrong.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The parts have set the variables that SGLang reads.
import torch

from tests.integrations.sglang_engine_program import save_model
from tests.integrations.sglang_program_parts import (
    extra_config,
    hashes,
    mha_pool,
    open_backend,
    pages_of,
    publish_engine,
    slots,
    storage_config,
)

DIRECTORY = Path(sys.argv[1])
TIMEOUT_S = 600.0
PAGES = 48
"""Pages that a host stores, at most `BATCH` at a time."""
BATCH = 4
SAMPLE = 64
"""Pages of hosts before the last that a host loads at its start."""
PLACES_TO_STORE, PLACES_TO_LOAD, PLACES_TO_CHECK = range(4), range(4, 8), range(8, 16)
LATER = 1.2
"""The latest moment of a kill, in lives of the first host: later ones have more to load."""


class Host:
    """What the child does; it tells the parent by lines of a word and a number."""

    def __init__(self, layout: str, capacity: str, first_page: int, sender: int) -> None:
        self._sender = sender
        self._tell("opening")
        self._pool = mha_pool(layout)
        tier = {"type": "nvme", "path": str(DIRECTORY / "kv"), "capacity": capacity, "segment": "1MiB"}
        self._backend = open_backend(storage_config(extra_config([tier])), self._pool)
        self._todo = range(first_page, first_page + PAGES)
        self._stored: list[int] = []

    def live(self, known: Sequence[int]) -> None:
        self._tell("checking")
        for start in range(0, len(known), len(PLACES_TO_CHECK)):
            self._load(known[start : start + len(PLACES_TO_CHECK)], PLACES_TO_CHECK, "found", "lost")
        self._tell("storing")
        storing = threading.Thread(target=self._store)
        storing.start()
        while storing.is_alive():
            some = random.sample(self._stored, min(BATCH, len(self._stored)))
            self._load(some, PLACES_TO_LOAD, "loaded", "missing")
        self._tell("closing")
        self._backend.close()
        self._tell("end")

    def _store(self) -> None:
        left = list(self._todo)
        while left:
            pages, left = left[: (count := random.randint(1, BATCH))], left[count:]
            places = PLACES_TO_STORE[: len(pages)]
            addresses, sizes = self._pool.get_page_buffer_meta(slots(self._pool, places))
            runs = [run for page in self._content(pages) for run in page]
            for address, size, run in zip(addresses, sizes, runs, strict=True):
                ctypes.memmove(address, run, size)
            stored = self._backend.batch_set_v1(_keys(pages), slots(self._pool, places))
            for page in (page for page, is_stored in zip(pages, stored, strict=True) if is_stored):
                self._tell("stored", page)
                self._stored.append(page)

    def _load(self, pages: Sequence[int], places: Sequence[int], right: str, otherwise: str) -> None:
        if not pages:
            return
        places = places[: len(pages)]
        loaded = self._backend.batch_get_v1(_keys(pages), slots(self._pool, places))
        came = pages_of(self._pool, places)
        for page, is_loaded, runs, expected in zip(pages, loaded, came, self._content(pages), strict=True):
            self._tell((right if runs == expected else "wrong") if is_loaded else otherwise, page)

    def _content(self, pages: Sequence[int]) -> list[list[bytes]]:
        _, sizes = self._pool.get_page_buffer_meta(slots(self._pool, [0]))
        return [
            [random.Random(f"{page} {number}").randbytes(size) for number, size in enumerate(sizes)] for page in pages
        ]

    def _tell(self, word: str, number: int = 0) -> None:
        os.write(self._sender, f"{word} {number}\n".encode())


def _keys(pages: Sequence[int]) -> list[str]:
    return [hashes(1, page)[0] for page in pages]


def lived(options: dict[str, Any], number: int, known: Sequence[int], life_s: float) -> list[tuple[str, int]]:
    """Let a host live until it ends or is killed; return what it told."""
    receiver, sender = os.pipe()
    host = os.fork()
    if not host:
        try:
            Host(options["layout"], options["capacity"], number * PAGES, sender).live(known)
        except BaseException:
            traceback.print_exc()
            os.write(sender, b"failed 0\n")
        finally:
            os._exit(0)
    os.close(sender)
    killer = threading.Timer(life_s, os.kill, (host, signal.SIGKILL))
    killer.start()
    with os.fdopen(receiver) as lines:
        told = [(word, int(page)) for word, page in map(str.split, lines)]
    killer.cancel()
    killer.join()  # before the host's id may become another's
    os.waitpid(host, 0)
    return told


def main() -> None:
    options = json.loads(sys.argv[2])
    torch.set_num_threads(1)  # none that a fork would lack
    save_model(DIRECTORY / "model")
    publish_engine(DIRECTORY / "model")
    random.seed(options["seed"])
    began_s = time.monotonic()
    told = lived(options, 0, (), TIMEOUT_S)
    whole_s = time.monotonic() - began_s
    assert told[-1][0] == "end", told
    pages: dict[str, set[int]] = {word: set() for word in ("stored", "found", "lost", "loaded", "missing", "wrong")}
    phases: Counter[str] = Counter()
    for number in range(options["kills"] + 1):
        for word, page in told:
            pages.get(word, set()).add(page)
        last = [page for word, page in told if word == "stored"]
        before = sorted(pages["stored"].difference(last))
        known = [*random.sample(before, min(SAMPLE, len(before))), *last]
        told = lived(options, number + 1, known, random.uniform(0.0, LATER * whole_s))
        phases.update([word for word, _ in told if word not in pages][-1:])
    del pages["stored"]
    print(json.dumps({"phases": phases, **{word: sorted(those) for word, those in pages.items()}}), flush=True)


if __name__ == "__main__":
    main()
