"""A log line for the first failure of each kind; further ones are only counted."""

from __future__ import annotations

import logging


class FirstFailures:
    """Logs the first failure of each operation and error number, with the system's own words. Any thread may call.

    Args:
        log: Where to.
        place: What the operations work on, such as a directory.
    """

    def __init__(self, log: logging.Logger, place: str) -> None:
        self._log = log
        self._place = place
        self._logged: dict[tuple[str, object], OSError] = {}  # threads add to it, each in one atomic step

    def note(self, operation: str, error: OSError) -> None:
        """Log a failure, unless one of its kind was logged."""
        if self._logged.setdefault((operation, error.errno), error) is error:
            self._log.warning("%s: %s failed: %s; further ones are only counted", self._place, operation, error)
