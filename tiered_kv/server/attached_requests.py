"""The requests of an attached engine: by the engine's ids, and by their numbers in messages.

`AttachedManager` owns it, on the scheduler's thread. What must stay true:

- A request that is here is found by its id and by its number. A request that ends is forgotten by both.
- A number is used again only after all others. So a late answer is never taken for one to a newer request.
- A request in `unsent` is here, and has keys that the server was not asked for.
- `transfers` is the sum of the requests' transfers.
"""

from __future__ import annotations

from typing import Final

from tiered_kv.base import ReqContext
from tiered_kv.hints import Hints
from tiered_kv.server.attached_request import AttachedRequest

_NUMBER_MAX: Final = 0xFFFFFFFF


class AttachedRequests(dict[str, AttachedRequest]):
    """The requests by the engine's ids; `begin` and `forget` change it.

    Attributes:
        by_number: The requests by their numbers.
        unsent: By number, the requests with keys that were looked up and not asked for.
        transfers: Blocks that workers read or write, for all requests.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_number: dict[int, AttachedRequest] = {}
        self.unsent: dict[int, AttachedRequest] = {}
        self.transfers = 0
        self._number = 0

    def begin(self, req_context: ReqContext, hints: Hints, epoch: int) -> AttachedRequest:
        """Return a new request."""
        request = AttachedRequest(self.new_number(), req_context, hints, epoch=epoch)
        self[req_context.req_id] = self.by_number[request.number] = request
        return request

    def new_number(self) -> int:
        """Return a number for a request or a PING: these are one sequence, so that no number has two meanings."""
        self._number = self._number % _NUMBER_MAX + 1
        return self._number

    def begin_anew(self, request: AttachedRequest) -> None:
        """Let a request continue as another one of the server, with a number of its own and without its answers."""
        self._forget_number(request)
        request.number = self.new_number()
        self.by_number[request.number] = request
        request.forget_answers()

    def forget(self, request: AttachedRequest) -> None:
        """Forget a request that has ended."""
        if self.get(request.req_context.req_id) is request:
            del self[request.req_context.req_id]
        self._forget_number(request)

    def count_transfers(self, request: AttachedRequest, blocks: int) -> None:
        """Note that workers begin (or end, if negative) to read or write blocks for a request."""
        request.transfers += blocks
        self.transfers += blocks

    def outdate(self) -> None:
        """Let all requests store and load nothing: the cache was reset."""
        for request in self.values():
            request.outdate()

    def forget_answers(self) -> None:
        """Drop all answers of a server that has gone."""
        self.unsent.clear()
        for request in self.values():
            request.forget_answers()

    def _forget_number(self, request: AttachedRequest) -> None:
        self.by_number.pop(request.number, None)
        self.unsent.pop(request.number, None)
