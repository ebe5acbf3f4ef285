"""The answer to `/status`, validated: the process may run another version, or be no stack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from tiered_kv.errors import FormatError


def printable(text: str) -> str:
    """Return `text` with all that a terminal would obey escaped."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


_Text = Annotated[str, AfterValidator(printable)]
_Count = Annotated[float, Field(ge=0, le=1e24)]
_Bytes = Annotated[int, Field(ge=0, le=10**24)]


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True)


class Buckets(_Answer):
    """The number of values in each bucket of a histogram, by its largest value."""

    buckets: Mapping[float, _Count] = {}


class Counters(_Answer):
    """A tier's counters; `docs/reference/counters.md` describes them."""

    stored_bytes_total: _Count = 0.0
    loaded_bytes_total: _Count = 0.0
    loaded_blocks_total: _Count = 0.0
    restored_tokens_total: _Count = 0.0
    blocks_total: Mapping[str, _Count] = {}
    """Empty without a history."""
    misses_total: Mapping[_Text, _Count] = {}
    unexplained_blocks_total: _Count = 0.0
    skipped_blocks_total: Mapping[_Text, _Count] = {}
    failed_blocks_total: Mapping[_Text, Mapping[_Text, _Count]] = {}
    job_seconds: Mapping[str, Buckets] = {}

    @property
    def reasons(self) -> Mapping[tuple[str, str], float]:
        """Blocks that did not come, or were not stored, by outcome and reason."""
        outcomes = {
            "miss": self.misses_total,
            "unexplained": {"too fast": self.unexplained_blocks_total},
            "skip": self.skipped_blocks_total,
            **self.failed_blocks_total,
        }
        return {
            (what, reason): total for what, reasons in outcomes.items() for reason, total in reasons.items() if total
        }


class BudgetAnswer(_Answer):
    used_bytes: _Bytes | None = None
    limit_bytes: _Bytes | None = None


class TierAnswer(_Answer):
    name: _Text
    type: _Text = ""
    breaker: Literal["", "closed", "half_open", "open"] = ""
    is_disabled: bool = False
    used_bytes: _Bytes | None = None
    capacity_bytes: _Bytes | None = None
    budgets: Mapping[str, BudgetAnswer] = {}
    """Of `store` and `load`."""
    p99_seconds: Mapping[str, _Count | None] = {}
    counters: Counters = Counters()


class NoticeAnswer(_Answer):
    time: _Count
    """Of the last of `count`."""
    tier: _Text
    what: _Text
    count: int = 1


class StatusAnswer(_Answer):
    version: _Text
    namespace: _Text
    pid: int
    uptime_seconds: _Count
    time: _Count
    tiers: list[TierAnswer] = Field(min_length=1)
    notices: list[NoticeAnswer] = []


def read_status(body: bytes) -> StatusAnswer:
    """Return the validated answer.

    Raises:
        FormatError: It is not the status of a stack.
    """
    try:
        return StatusAnswer.model_validate_json(body)
    except ValidationError:
        raise FormatError("the answer is not the status of a stack") from None
