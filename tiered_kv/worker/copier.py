"""What executes plans: one kind of copier a device, one copier a direction."""

from __future__ import annotations

from typing import Protocol

from tiered_kv.worker.plan import CopyPlan


class Copy(Protocol):
    """A plan that was handed to a copier. The copier's thread or device works on it; one thread asks."""

    def has_ended(self) -> bool:
        """Return at once whether nothing of the plan is still to be copied."""

    def wait(self) -> None:
        """Block until it has ended."""

    def seconds(self) -> float | None:
        """Return how long an ended copy took, or None if it failed or was dropped; asked once."""


class Copier(Protocol):
    """Executes plans one after the other."""

    def submit(self, plan: CopyPlan) -> Copy:
        """Begin a plan behind those before it, and return at once."""

    def close(self) -> None:
        """Wait for the plans that run, drop the others, and release everything; called once."""
