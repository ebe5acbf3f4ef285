"""The exit statuses of the command."""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """How the command ended."""

    OK = 0
    FOUND = 1
    """The verb did its work and found something wrong: a tier that does not open, a corrupt block, a broken plugin."""
    ERROR = 2
    """The verb could not do its work; standard error says why. argparse uses the same for wrong usage."""
    INTERRUPTED = 130
    """Ctrl-C, as shells number it: 128 and the signal."""
    READER_GONE = 141
    """Whoever read the output has gone (`| head`), as shells number it: 128 and SIGPIPE."""
