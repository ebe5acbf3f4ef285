"""The reason why a server's certificate was refused, for the log: a tier's error has one word for all reasons."""

from __future__ import annotations

import functools
import logging
import ssl

_log = logging.getLogger("tiered_kv.toolkit")
_warn_once = functools.cache(_log.warning)


def note_refused(error: ssl.SSLCertVerificationError) -> None:
    """Log what is wrong with a certificate, the first time for each reason. Any thread.

    docs/reference/redis.md says what to do about each.
    """
    wrong = error.verify_message.split(",")[0].rstrip(".")  # a host's name may follow a comma
    _warn_once("a server's certificate was refused: %s; see 'A certificate that is refused' in redis.md", wrong)
