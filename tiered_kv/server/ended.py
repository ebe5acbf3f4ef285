"""What requests and sessions that have ended still have of a namespace: rows, which become free in later steps.

`ServedStack` owns it, on the server's thread, and sweeps a part in each step: an engine that ends may have had half of
all rows, and thousands of requests. What must stay true: a row is swept once. Until then nobody gets it, and it counts
as leased or granted. A request's end is told to the manager behind the end of its leases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import Final

from tiered_kv.server.session_request import SessionRequest

SWEEP_ROWS: Final = 512
"""Rows of one sweep, which takes half a millisecond."""
_REQUEST_ROWS: Final = 16
"""As many rows take as long as the end of a request without any."""


class EndedRequests:
    """Requests that have ended, and granted rows of ended sessions.

    Args:
        end_leases: Ends a request's leases of rows.
        end_request: Ends a request without leases.
        free: Frees granted rows.
    """

    def __init__(
        self,
        end_leases: Callable[[SessionRequest, Sequence[int]], None],
        end_request: Callable[[SessionRequest], None],
        free: Callable[[Collection[int]], None],
    ) -> None:
        self._end_leases, self._end_request, self._free = end_leases, end_request, free
        self._requests: dict[str, SessionRequest] = {}
        """By the id that the manager knows."""
        self._granted: deque[int] = deque()

    def __bool__(self) -> bool:
        return bool(self._requests or self._granted)

    def add(self, requests: Iterable[SessionRequest], granted: Iterable[int]) -> None:
        """Take over the requests and the granted rows of a session; nobody else uses them."""
        for request in requests:
            self._requests[request.context.req_id] = request
        self._granted.extend(granted)

    def end(self, request: SessionRequest) -> None:
        """End a request: at once, or in later steps if it leases many rows."""
        if len(request.leased) > SWEEP_ROWS:
            self._requests[request.context.req_id] = request
        else:
            self._end(request)

    def forget_id(self, req_id: str) -> None:
        """End the request with this id, if it is here: another request gets the id."""
        request = self._requests.pop(req_id, None)
        if request is not None:
            self._end(request)

    def sweep(self, rows_min: int = 0) -> None:
        """Free `SWEEP_ROWS` rows, or `rows_min` if that is more; or end as many requests as take as long."""
        rows = max(SWEEP_ROWS, rows_min)
        while rows > 0 and self._granted:
            part = [self._granted.popleft() for _ in range(min(rows, len(self._granted)))]
            self._free(part)
            rows -= len(part)
        while rows > 0 and self._requests:
            req_id, request = self._requests.popitem()
            if len(request.leased) > rows:
                self._requests[req_id] = request
                self._end_leases(request, list(islice(request.leased, rows)))
                return
            rows -= _REQUEST_ROWS + len(request.leased)
            self._end(request)

    def sweep_all(self) -> None:
        while self:
            self.sweep()

    def _end(self, request: SessionRequest) -> None:
        self._end_leases(request, [*request.leased])
        self._end_request(request)
