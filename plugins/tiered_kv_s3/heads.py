"""HEAD requests in parallel, on one thread.

Connections are opened at the same time and without waiting, and each open one takes the next request. So a connection
that the server is slow to accept costs no answer of another one.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence

from tiered_kv_s3.connection import Connection, Patience
from tiered_kv_s3.pool import ConnectionPool, Step
from tiered_kv_s3.settings import HEADS_IN_FLIGHT_MAX
from tiered_kv_s3.verdict import Verdict


class Heads:
    """One batch of requests.

    Args:
        pool: Has the connections.
        send: Sends the request of a number.
        receive: Receives the answer to a request.
        verdict_of_error: Called with the failure of a connection.
        patience: The batch ends at its deadline; each request and each step of an opening after its `stall_s`.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        send: Callable[[Connection, int], None],
        receive: Callable[[Connection], Verdict],
        verdict_of_error: Callable[[OSError], Verdict],
        patience: Patience,
    ) -> None:
        self._pool = pool
        self._send = send
        self._receive = receive
        self._verdict_of_error = verdict_of_error
        self._patience = patience
        self._poll = select.poll()
        self._waiting: deque[int] = deque()
        # By file descriptor, each with the time when it ends.
        self._in_flight: dict[int, tuple[float, int, Connection]] = {}
        self._openings: dict[int, tuple[float, Generator[Step, None, Connection]]] = {}
        self._failure: OSError | None = None  # why no further connection is opened

    def run(self, numbers: Sequence[int], verdicts: list[Verdict]) -> None:
        """Send the requests, and put their verdicts into their places; those that were not sent stay as they are."""
        self._waiting.extend(numbers)
        try:
            while self._waiting or self._in_flight:
                self._send_on_idle(verdicts)
                self._open(verdicts)
                if not self._in_flight and not self._openings:
                    break
                self._advance(verdicts)
            if self._failure is not None and time.monotonic() < self._patience.deadline:
                for number in self._waiting:
                    verdicts[number] = self._verdict_of_error(self._failure)
        except TimeoutError:  # the deadline has passed
            for _, number, _ in self._in_flight.values():
                verdicts[number] = Verdict.TIMEOUT
        finally:
            for _, _, connection in self._in_flight.values():
                self._pool.give_back(connection, reuse=False)
            for _, steps in self._openings.values():
                steps.close()

    def _send_on_idle(self, verdicts: list[Verdict]) -> None:
        while self._waiting and len(self._in_flight) < HEADS_IN_FLIGHT_MAX:
            connection = self._pool.take_idle(self._patience)
            if connection is None:
                return
            self._send_next(connection, verdicts)

    def _send_next(self, connection: Connection, verdicts: list[Verdict]) -> None:
        number: int | None = None
        try:
            self._patience.next_timeout_s()  # raises once the deadline has passed
            number = self._waiting.popleft()
            self._send(connection, number)
        except OSError as error:
            self._pool.give_back(connection, reuse=False)
            if number is None:
                raise
            verdicts[number] = self._verdict_of_error(error)
            return
        self._in_flight[connection.fileno] = self._until_s(), number, connection
        self._poll.register(connection.fileno, select.POLLIN)

    def _open(self, verdicts: list[Verdict]) -> None:
        """Begin to open connections for the requests that wait, unless one could not be opened."""
        missing = min(len(self._waiting), HEADS_IN_FLIGHT_MAX - len(self._in_flight)) - len(self._openings)
        while missing > 0 and self._failure is None:
            missing -= 1
            self._go_on(self._pool.opening(self._patience), verdicts)

    def _advance(self, verdicts: list[Verdict]) -> None:
        """Wait for the next event or the end of a wait, and handle all that came."""
        ends_s = [each[0] for each in self._in_flight.values()] + [each[0] for each in self._openings.values()]
        wait_s = min(*ends_s, self._patience.deadline) - time.monotonic()
        ready = {descriptor for descriptor, _ in self._poll.poll(max(0.0, wait_s) * 1000)}
        now_s = time.monotonic()
        for descriptor, (until_s, number, connection) in [*self._in_flight.items()]:
            if descriptor not in ready and now_s < until_s:
                continue
            self._poll.unregister(descriptor)
            del self._in_flight[descriptor]
            try:
                verdicts[number] = self._receive(connection) if descriptor in ready else Verdict.TIMEOUT
            finally:
                self._pool.give_back(connection, reuse=descriptor in ready)
        for descriptor, (until_s, steps) in [*self._openings.items()]:
            if descriptor not in ready and now_s < until_s:
                continue
            self._poll.unregister(descriptor)
            del self._openings[descriptor]
            self._go_on(steps, verdicts, is_late=descriptor not in ready)
        self._patience.next_timeout_s()

    def _go_on(
        self, steps: Generator[Step, None, Connection], verdicts: list[Verdict], *, is_late: bool = False
    ) -> None:
        """Advance an opening up to its next wait, or use the connection that it has opened."""
        try:
            waited, event = steps.throw(TimeoutError("the server does not answer")) if is_late else next(steps)
        except StopIteration as end:
            self._use(end.value, verdicts)
        except OSError as error:
            self._failure = error
        else:
            self._openings[waited.fileno()] = self._until_s(), steps
            self._poll.register(waited, event)

    def _use(self, opened: Connection, verdicts: list[Verdict]) -> None:
        try:
            connection = self._pool.adopt(opened)
        except OSError as error:  # the tier is being shut down
            self._failure = error
            return
        if self._waiting:
            self._send_next(connection, verdicts)
        else:  # others were faster
            connection.is_reusable = True
            self._pool.give_back(connection)

    def _until_s(self) -> float:
        return time.monotonic() + self._patience.stall_s
