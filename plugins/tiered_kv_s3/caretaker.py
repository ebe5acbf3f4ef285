"""The tier's own thread: it writes what others should find, and sweeps when it is time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping

from tiered_kv.toolkit.epoch import Epoch
from tiered_kv_s3.bucket import Bucket
from tiered_kv_s3.counters import Counters
from tiered_kv_s3.ledger import Ledger
from tiered_kv_s3.naming import Naming
from tiered_kv_s3.sweeper import Sweeper
from tiered_kv_s3.verdict import Verdict

ROUND_S_MIN = 0.5
"""The shortest time between two rounds, however much there is to do."""
RETRY_S = 5.0
"""How long after a failure the next round is made."""
_WRITE_S_MAX = 10.0


class Caretaker:
    """Runs from the first store, or reset, until it is closed. Any thread may call.

    Args:
        bucket, naming: Where the namespace is described.
        namespace: What it is, in readable form.
        epoch: Saved after a reset.
        sweeper: Keeps capacity and age; None where neither is set.
        ledger: Tells when the capacity is nearly used.
        counters: Where failures are counted.
        interval_s: Time between two sweeps.
        name: The thread's name.
    """

    def __init__(
        self,
        bucket: Bucket,
        naming: Naming,
        namespace: Mapping[str, object],
        epoch: Epoch,
        sweeper: Sweeper | None,
        ledger: Ledger,
        counters: Counters,
        *,
        interval_s: float,
        name: str,
    ) -> None:
        self._bucket = bucket
        self._naming = naming
        self._namespace = namespace
        self._epoch = epoch
        self._sweeper = sweeper
        self._ledger = ledger
        self._counters = counters
        self._interval_s = interval_s
        self._is_introduced = False
        self._next_sweep_s = 0.0
        self._sweep_s = 0.0  # what the last one took; so long a pause follows
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._start_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.has_started = False

    def start(self) -> None:
        """Begin, or look at once whether there is something to do."""
        if not self.has_started:
            with self._start_lock:
                if not self.has_started and not self._stop.is_set():
                    try:
                        self._thread.start()
                    except RuntimeError:  # no thread to be had; the next call tries again
                        return
                    self.has_started = True
        self._wake.set()

    def stop(self) -> None:
        """Let the thread end soon; does not wait."""
        self._stop.set()
        self._wake.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; return whether it has."""
        with self._start_lock:
            has_started = self.has_started
        if has_started:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.clear()
            try:
                pause_s = self._round()
            except Exception:  # the thread lives on, whatever a library raises
                self._counters.add("failed_rounds")
                self._ledger.fail_round()
                if self._stop.wait(RETRY_S):  # however many stores ask for room
                    return
                continue
            if self._stop.wait(max(ROUND_S_MIN, self._sweep_s) if self._ledger.found_room else RETRY_S):
                return
            self._wake.wait(pause_s)

    def _round(self) -> float:
        """Do what there is to do; return how long there will be nothing else unless somebody wakes us."""
        if not self._epoch.is_saved:
            self._epoch.saved_token(time.monotonic() + _WRITE_S_MAX)
        if not self._is_introduced:
            self._introduce()
        if self._sweeper is None:
            return self._interval_s
        began_s = time.monotonic()
        if began_s >= self._next_sweep_s or self._ledger.wants_round:
            has_more = self._sweeper.sweep(self._stop.is_set)
            self._sweep_s = time.monotonic() - began_s
            self._next_sweep_s = time.monotonic() + (0.0 if has_more else self._interval_s)
        return max(0.0, self._next_sweep_s - time.monotonic())

    def _introduce(self) -> None:
        """Keep the namespace's readable form beside its blocks."""
        text = json.dumps({"format": 1, "namespace": dict(self._namespace)}, indent=1, sort_keys=True, default=str)
        verdict = self._bucket.put(self._naming.namespace, [text.encode()], time.monotonic() + _WRITE_S_MAX)
        self._is_introduced = verdict in (Verdict.DONE, Verdict.DENIED, Verdict.REFUSED)
