"""Keeping secrets out of logs, errors and printed configurations.

A value is secret if it came from the environment, if it is a pydantic `SecretStr` or `SecretBytes`, or if the
setting that holds it is named like one. The user and password in a URL are secret wherever the URL stands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import SecretBytes, SecretStr

HIDDEN = "***"

_SECRET_NAME = re.compile(
    r"pass(word|wd|phrase)|secret|token(?!s)|credential|(api|access|private|encryption|account)_?key|"
    r"^(key|auth|pwd|dsn)$|connection_string|authorization",
    re.IGNORECASE,
)
_URL_USERINFO = re.compile(r"(?<=://)[^/\s@]*(?:@[^/\s@]*)*@")


class EnvironmentText(str):
    """A scalar whose text was taken, whole or in part, from an environment variable."""

    __slots__ = ()


def is_secret_name(name: str) -> bool:
    """Return whether a setting called `name` is to be treated as a secret."""
    return _SECRET_NAME.search(name) is not None


def has_environment_text(value: object) -> bool:
    """Return whether `value`, or anything in it, was taken from an environment variable."""
    if isinstance(value, Mapping):
        return any(map(has_environment_text, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(has_environment_text, value))
    return isinstance(value, EnvironmentText)


def redact(value: object, name: str = "") -> object:
    """Return `value`, which stands under the key `name`, with every secret in it replaced by `***`."""
    if isinstance(value, Mapping):
        return {key: redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(item, name) for item in value]
    if isinstance(value, (EnvironmentText, SecretStr, SecretBytes)):
        return HIDDEN
    if value and isinstance(value, (str, bytes, int, float)) and is_secret_name(name):
        return value if isinstance(value, bool) else HIDDEN
    if isinstance(value, str):
        return _URL_USERINFO.sub(f"{HIDDEN}@", value)
    return value


def secrets_in(value: object, name: str = "") -> set[str]:
    """Return every secret text in `value`, which stands under the key `name`, for use with `scrub`."""
    if isinstance(value, Mapping):
        return set().union(*(secrets_in(item, str(key)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return set().union(*(secrets_in(item, name) for item in value))
    if isinstance(value, SecretStr):
        return {value.get_secret_value()}
    if isinstance(value, str) and (isinstance(value, EnvironmentText) or is_secret_name(name)):
        return {str(value)}
    return set()


def scrub(text: str, secrets: set[str]) -> str:
    """Return `text`, which a library wrote, without any of `secrets` and without the passwords in URLs."""
    for secret in sorted(secrets, key=len, reverse=True):
        if secret:
            text = text.replace(secret, HIDDEN)
    return _URL_USERINFO.sub(f"{HIDDEN}@", text)
