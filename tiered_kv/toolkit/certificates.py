"""The reason why a server's certificate was refused, for the log: a tier's error has one word for all reasons."""

from __future__ import annotations

import functools
import logging
import ssl

_log = logging.getLogger("tiered_kv.toolkit")
_warn_once = functools.cache(_log.warning)

_STRICT = ("key identifier", "key usage", "basic constraints")


def note_refused(error: ssl.SSLCertVerificationError) -> None:
    """Log what is wrong with a certificate, and what to do; the first time for each reason. Any thread."""
    wrong = error.verify_message.split(",")[0].rstrip(".")  # a host's name may follow a comma
    _warn_once("a server's certificate was refused: %s. %s", wrong, _remedy(wrong))


def _remedy(wrong: str) -> str:
    if any(word in wrong.lower() for word in _STRICT):
        return (
            "From Python 3.13 on, certificates must follow RFC 5280; make the server's, or its authority's, anew with "
            "this extension"
        )
    if "mismatch" in wrong.lower():
        return "Connect by a name that the certificate has"
    return "Name a file with the authority that signed it, and look at the times in it"
