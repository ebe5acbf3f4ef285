"""What an object tier asks of its server: the interface between the tiers' common part and a client of a server.

`ObjectTier` and `ObjectAdministration` call it. The author of a tier implements it, over a client library or over
sockets. `ObjectStore` is for blocks: workers call it, several at once, and every call ends by its deadline with a
`Verdict`. `ObjectControl` is for the background: the sweeper's threads, `check` and the commands call it, and its calls
raise `BucketError`. One class may implement both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from tiered_kv.toolkit.objects.verdict import BucketError, Verdict

DELETED_AT_ONCE: Final = 100
"""Names in one call of `ObjectControl.delete`: some servers need 20 ms for each name, and the names share one time."""

Sink = Callable[[int], Sequence[memoryview] | None]
"""Called with the length of a body in bytes; returns the memory for it, or None to refuse it."""


class Listed(NamedTuple):
    """An object in a listing; its age is by the server's clock. The oldest object sorts last."""

    age_s: float
    name: str
    size_bytes: int


class ObjectStore(ABC):
    """The requests for blocks, and for the namespace's small objects. Any thread may call.

    An object counts as stored only after the server has confirmed it. Names are those of `Naming`. Deadlines are in
    seconds of `time.monotonic()`.
    """

    @property
    @abstractmethod
    def heard_s(self) -> float:
        """When the server last refused a request, in seconds of `time.monotonic()`; minus infinity before."""

    @abstractmethod
    def put(
        self, name: str, pieces: Sequence[bytes | memoryview], deadline: float, *, only_if_absent: bool = False
    ) -> Verdict:
        """Store an object of `pieces`, whole or not at all. Return PRESENT if it exists and `only_if_absent` is set.

        After the call nothing reads the pieces.
        """

    @abstractmethod
    def get(
        self,
        name: str,
        sink: Sink,
        bytes_max: int,
        deadline: float,
        *,
        expires: bool = True,
        on_age: Callable[[float], None] = lambda age_s: None,
    ) -> Verdict:
        """Read an object into the memory that `sink` returns. If it `expires`, it is not read when older than `ttl`.

        The verdict is OVERSIZED if `sink` refuses the length. `on_age` is called with the object's age in seconds,
        after it was read. `bytes_max` limits a body whose length the server does not give in advance. After the call
        nothing writes to the memory.
        """

    @abstractmethod
    def delete(self, name: str, deadline: float) -> Verdict:
        """Delete an object. The verdict is DONE also if it does not exist."""

    @abstractmethod
    def head_all(self, names: Sequence[str], deadline: float) -> list[Verdict]:
        """Return for each object DONE if it exists, ABSENT or EXPIRED if it does not, or why it is unknown."""

    @abstractmethod
    def sentence(self, verdict: Verdict, operation: str) -> str:
        """Return the verdict's meaning, the server's last words, and the remedy."""

    @abstractmethod
    def close(self) -> None:
        """Make the requests in flight fail if that is possible, begin no others, and close every connection."""

    def read(self, name: str, bytes_max: int, deadline: float) -> tuple[Verdict, bytes]:
        """Return a small object of any age. Only DONE comes with bytes; the verdict is OVERSIZED beyond `bytes_max`."""
        data = bytearray()

        def sink(size_bytes: int) -> list[memoryview] | None:
            nonlocal data
            if size_bytes > bytes_max:
                return None
            data = bytearray(size_bytes)
            return [memoryview(data)]

        verdict = self.get(name, sink, bytes_max, deadline, expires=False)
        return verdict, bytes(data) if verdict is Verdict.DONE else b""


class ObjectControl(ABC):
    """Lists, deletes and renews objects. Any thread may call. Every method raises `BucketError` if a request fails."""

    deadline: float
    """The deadline of requests that begin from now on, in seconds of `time.monotonic()`; callers assign it."""

    @abstractmethod
    def listed(self, prefix: str) -> Iterator[list[Listed]]:
        """Yield the objects with names that begin with `prefix`, a page at a time."""

    @abstractmethod
    def folders(self, prefix: str) -> list[str]:
        """Return the parts of names between `prefix` and the next slash; at most a thousand."""

    @abstractmethod
    def delete(self, names: Sequence[str]) -> dict[int, str]:
        """Delete objects; return an error code for each that is left, by its position. A missing one is deleted."""

    @abstractmethod
    def read(self, name: str, bytes_max: int) -> tuple[float, bytes]:
        """Return the age of a small object and its first bytes; infinitely old and empty if it is missing."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Store a small object."""

    @abstractmethod
    def age_s(self, name: str) -> float | None:
        """Return how old an object is; None if it is missing."""

    @abstractmethod
    def renew(self, name: str) -> bool:
        """Set an object's age to 0, by a copy onto itself on the server; return whether the object exists."""

    @abstractmethod
    def not_deleted(self) -> BucketError:
        """Return the error for objects that are listed after the server has confirmed that it deleted them."""

    @abstractmethod
    def close(self) -> None:
        """End requests that wait for another attempt, and close the connections."""
