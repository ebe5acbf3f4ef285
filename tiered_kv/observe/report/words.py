"""What the reasons of counters mean, in the words of `docs/reference/counters.md`."""

from __future__ import annotations

from typing import Final

MISSES: Final = {
    "absent": "The tier never had the block, or that was too long ago to be known.",
    "evicted": "The tier had the block and has evicted it.",
    "expired": "The block was older than the tier keeps blocks.",
    "admission": "The block had not been offered often enough to be stored.",
    "budget": "The block was not stored, because too much was in flight.",
    "refused": "The tier had the block, and there was no room to load it.",
    "failed": "The load, or the store before it, failed.",
    "corrupt": "The block's bytes were damaged, and were not used.",
    "breaker": "The tier had failed again and again, and was left alone.",
    "disabled": "The tier was not in use.",
    "timeout": "The tier did not answer in time.",
    "too_late": "The request could wait no longer.",
    "no_space": "There was no room in the tier.",
    "reset": "The cache was reset.",
}
"""Why a block that was asked for did not come from a tier (`misses_total`)."""

SKIPS: Final = {
    "budget": "Too much was in flight to the tier.",
    "admission": "The blocks had not been offered often enough.",
    "breaker": "The tier had failed again and again, and was left alone.",
    "disabled": "The tier was not in use.",
    "no_space": "There was no room in the tier.",
}
"""Why blocks were not offered to a tier for storing (`skipped_blocks_total`)."""

FAILURES: Final = {
    "absent": "The tier did not have the block, or had evicted it since the lookup.",
    "no_space": "There was no room in the tier.",
    "checksum": "The block's bytes did not match their checksum.",
    "truncated": "Bytes of the block were missing.",
    "reset": "The cache was reset meanwhile.",
    "expired": "The deadline passed.",
    "timeout": "A call to the storage took too long.",
    "io_error": "A system call failed.",
    "unavailable": "What the tier stands on did not answer.",
    "unanswered": "A server of the tier did not answer for these blocks.",
    "busy": "What the tier needs was in use by somebody else.",
    "format": "The data is of another version or namespace.",
    "key_size": "The key is too long for the tier.",
    "shutdown": "The tier was shut down.",
    "exception": "A method of the tier raised an exception.",
}
"""Why a transfer failed (`failed_blocks_total`)."""
