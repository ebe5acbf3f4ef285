"""The recorder: the calls of a manager wait in a queue, and a thread makes lines of them.

The manager's thread calls `begin`, `use`, `end` and `reset`, which append to the queue and never wait. The recorder's
thread hashes and writes. What must stay true: a full queue loses whole requests, which are counted, and never a part of
one; and a disk that is slow, full or hangs costs lines only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from tiered_kv.base import OffloadKey
from tiered_kv.config.files import RecordSettings
from tiered_kv.config.settings import PRIMARY_NAME
from tiered_kv.errors import ConfigError
from tiered_kv.hints import Hints
from tiered_kv.metrics.series import Family, numbers
from tiered_kv.metrics.vocabulary import RECORDING
from tiered_kv.system.log_limit import LogLimit
from tiered_kv.system.step import IDLE_WAIT, IDLE_WAIT_S_MAX, give_way
from tiered_kv.system.threads import call_within, start_thread
from tiered_kv.tiering.recording.requests import AskedRequest, OpenRequests
from tiered_kv.tiering.recording.trace_file import TraceFile

QUEUE_KEYS_MAX: Final = 1 << 18
"""Keys in the queue. Beyond it, further calls are lost, and with them the requests that run."""
QUEUE_CALLS_MAX: Final = 1 << 15
"""Calls in the queue; beyond it, too."""
INTERVAL_S: Final = 0.25
"""How often the thread looks into an empty queue."""
WORK_S: Final = 0.001
"""Seconds of a processor that the thread takes between two pauses; it ends the line that it has begun."""
THREAD_SHARE: Final = 0.02
"""Share of a processor for the thread while the queue is short. Meanwhile the scheduler waits for the interpreter."""
THREAD_SHARE_MAX: Final = 0.2
"""Limit of this share; between the two it is the part of the queue that is full."""
OPEN_S: Final = 10.0
"""How long the opening of the file may take."""
_CLOSE_S: Final = 2.0

_log = logging.getLogger(__name__)


class _Call(Enum):
    BEGIN = "begin"
    USE = "use"
    END = "end"
    RESET = "reset"
    GAP = "gap"
    """Calls before this one were lost."""


# Names of the module: a member of an enum costs the manager's thread longer to find.
_BEGIN, _USE, _END = _Call.BEGIN, _Call.USE, _Call.END


class RequestSink(Protocol):
    """Takes the requests of a recorder, on its thread: a trace file, or the publisher of events."""

    def write(self, request: AskedRequest) -> bool:
        """Take a request; return False if it cannot be taken. An `OSError` or `ConfigError` says why."""

    def reset(self) -> None:
        """Note that the same keys are other blocks from now on."""

    def close(self) -> None: ...


def open_trace(settings: RecordSettings, block_tokens: int) -> TraceFile:
    """Return the file of `record`; raise `ConfigError` if it cannot be written."""
    opening = partial(TraceFile, Path(settings.path), settings.size_max, block_tokens, time.monotonic())
    try:
        return call_within(OPEN_S, opening, "tiered-kv-record-open", undo=TraceFile.close)
    except (ConfigError, TimeoutError) as error:
        raise ConfigError(str(error), location="record.path") from error


class Recorder:
    """Records the requests of one manager.

    Args:
        sinks: Take the requests. The recorder closes them.

    Raises:
        ResourceError: The system gives no thread.
    """

    def __init__(self, *sinks: RequestSink) -> None:
        self._sinks = sinks
        # Written by the manager's thread.
        self._queue: deque[tuple[_Call, str, Any]] = deque()  # Any: keys, or the arguments of `begin`
        self._append = self._queue.append
        self._added_keys = self._lost_requests = 0
        self._has_gap = False
        # Written by the recorder's thread.
        self._taken_keys = self._written_requests = self._unwritten_requests = 0
        self._requests = OpenRequests()
        self._seen_s = 0.0
        """When the last request began of which the thread knows."""
        self._log_limit = LogLimit()
        self._is_closing = threading.Event()
        try:
            self._thread = start_thread(self._run, "tiered-kv-record")
        except BaseException:
            self._close_sinks()
            raise

    # The manager's thread.

    def begin(self, req_id: str, session: str, hints: Hints, now_s: float) -> None:
        if self._has_room():
            self._append((_BEGIN, req_id, (now_s, session, hints)))
        else:
            self._lost_requests += 1

    def use(self, req_id: str, keys: Collection[OffloadKey]) -> None:
        """Note blocks that a request loads, or has computed; their order is that of its prefix."""
        if keys and self._has_room():
            self._append((_USE, req_id, tuple(keys)))
            self._added_keys += len(keys)

    def end(self, req_id: str) -> None:
        if self._has_room():
            self._append((_END, req_id, None))

    def reset(self) -> None:
        """Note that all blocks are forgotten: the same keys are other blocks from now on."""
        self._append((_Call.RESET, "", None))  # rare, and needed even without room

    def _has_room(self) -> bool:
        """Return whether the queue takes a call; if not, note the gap, which goes before the next one that it takes."""
        if len(self._queue) >= QUEUE_CALLS_MAX or self._added_keys - self._taken_keys > QUEUE_KEYS_MAX:
            self._has_gap = True
            return False
        if self._has_gap:
            self._has_gap = False
            self._append((_Call.GAP, "", None))
        return True

    def measure(self) -> Iterator[tuple[str, list[Family]]]:
        """Yield the counts, for a `Registry`. Any thread may call."""
        counts = {
            "recorded_requests_total": self._written_requests,
            "unrecorded_requests_total": self.lost_requests,
        }
        yield PRIMARY_NAME, numbers(RECORDING, counts)

    @property
    def lost_requests(self) -> int:
        """Requests that the trace lacks. Any thread may ask."""
        return self._lost_requests + self._unwritten_requests

    @property
    def has_work(self) -> bool:
        """Whether calls wait in the queue. Any thread may ask."""
        return bool(self._queue)

    def close(self) -> None:
        """Write what is in the queue, for two seconds at most, and end the thread."""
        self._is_closing.set()
        self._thread.join(_CLOSE_S)

    # The recorder's thread.

    def _run(self) -> None:
        pause_s = INTERVAL_S
        try:
            while not self._is_closing.wait(pause_s):
                IDLE_WAIT.left_s = IDLE_WAIT_S_MAX
                give_way()
                used_s = self._work()
                pause_s = used_s / self._share() if used_s > WORK_S else INTERVAL_S
            while self._queue:
                self._take()
            self._write_ready(is_last=True)
        except Exception:
            _log.exception("requests are recorded no more")
        finally:
            self._close_sinks()

    def _close_sinks(self) -> None:
        for sink in self._sinks:
            sink.close()

    def _share(self) -> float:
        waiting = max(len(self._queue) / QUEUE_CALLS_MAX, (self._added_keys - self._taken_keys) / QUEUE_KEYS_MAX)
        return min(max(THREAD_SHARE, waiting), THREAD_SHARE_MAX)

    def _work(self) -> float:
        """Take calls for `WORK_S`; return the seconds of a processor that this took."""
        began_s = time.thread_time()
        self._write_ready()
        while self._queue and time.thread_time() - began_s <= WORK_S:
            self._take()
            give_way()
        return time.thread_time() - began_s

    def _take(self) -> None:
        call, req_id, what = self._queue.popleft()
        if call is _Call.USE:
            self._taken_keys += len(what)
            self._requests.use(req_id, what)
        elif call is _Call.BEGIN:
            self._requests.begin(AskedRequest(req_id, *what))
            self._seen_s = what[0]
        elif call is _Call.END:
            self._requests.end(req_id)
            self._write_ready()
        elif call is _Call.GAP:
            self._unwritten_requests += self._requests.drop_running()
        else:
            self._write_ready(is_last=True)
            for sink in self._sinks:
                sink.reset()

    def _write_ready(self, *, is_last: bool = False) -> None:
        has_taken_all = not self._queue
        if has_taken_all and self._has_gap:  # the calls that were lost are the last ones
            self._unwritten_requests += self._requests.drop_running()
        now_s = time.monotonic() if has_taken_all else self._seen_s  # later calls of a request may wait in the queue
        while (request := self._requests.take(now_s, is_last=is_last)) is not None:
            if not request.size:  # it asked for nothing
                continue
            taken = [self._has_written(sink, request) for sink in self._sinks]
            if all(taken):
                self._written_requests += 1
            else:
                self._unwritten_requests += 1

    def _has_written(self, sink: RequestSink, request: AskedRequest) -> bool:
        try:
            return sink.write(request)
        except (OSError, ConfigError) as error:
            if self._log_limit.take() is not None:
                _log.warning("a request cannot be recorded: %s; %s", error, self._log_limit.about)
            return False
