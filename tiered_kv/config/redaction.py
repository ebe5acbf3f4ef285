"""Keeping secrets out of logs, errors and printed configurations.

A value is secret if it came from the environment, if it is a pydantic `SecretStr` or `SecretBytes`, or if the
setting that holds it is named like one. User, password, query and fragment of a URL are secret wherever it stands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import quote, unquote

from pydantic import SecretBytes, SecretStr

HIDDEN = "***"

_SECRET_NAME = re.compile(
    r"pass(word|wd|phrase)|secret|token(?!s)|credential|(api|access|private|encryption|account)_?key|"
    r"^(key|key_files|encryption|auth|pass|dsn)$|pwd?$|connection_string|authorization",
    re.IGNORECASE,
)

# A password that nobody encoded may hold "/", "@", "?" and spaces, and a slash of the scheme may be missing: all up to
# the last "@" goes. In a text of several words, as libraries write it, only up to the end of the word.
_USERINFO_OF_VALUE = re.compile(r"(:/{1,2})(?!/).*@", re.DOTALL)
_USERINFO_IN_TEXT = re.compile(r"(:/{1,2})(?!/)\S*@")
_USERINFO_WITHOUT_SCHEME = re.compile(r"^[^/\s@:]*:.*@", re.DOTALL)
_QUERY = re.compile(r"(:/{1,2}[^\s?#'\"]*[?#])[^\s'\"]+")
_PASSWORD = re.compile(r"^(?:[A-Za-z][\w+.-]*:/{1,2})?[^/\s@:]*:(.*)@", re.DOTALL)


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
        shown, is_url = _USERINFO_OF_VALUE.subn(rf"\1{HIDDEN}@", value)
        shown = shown if is_url else _USERINFO_WITHOUT_SCHEME.sub(f"{HIDDEN}@", shown)
        return _QUERY.sub(rf"\1{HIDDEN}", shown)
    return value


def secrets_in(value: object, name: str = "") -> set[str]:
    """Return every secret text in `value`, which stands under the key `name`, for use with `scrub`."""
    if isinstance(value, Mapping):
        return set().union(*(secrets_in(item, str(key)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return set().union(*(secrets_in(item, name) for item in value))
    if isinstance(value, SecretStr):
        return {value.get_secret_value()}
    if isinstance(value, SecretBytes):
        return {value.get_secret_value().decode("utf-8", "replace")}
    if isinstance(value, EnvironmentText) or (is_secret_name(name) and not isinstance(value, bool)):
        return texts_in(value)
    password = _PASSWORD.match(value) if isinstance(value, str) else None
    return {password[1], unquote(password[1])} if password else set()


def texts_in(value: object) -> set[str]:
    """Return every text and number in `value`, as texts."""
    if isinstance(value, Mapping):
        return set().union(*map(texts_in, value.values()))
    if isinstance(value, (list, tuple)):
        return set().union(*map(texts_in, value))
    return {str(value)} if isinstance(value, (str, int, float)) and not isinstance(value, bool) else set()


def scrub(text: str, secrets: set[str]) -> str:
    """Return `text`, which a library wrote, without any of `secrets` and without what is secret in URLs."""
    for secret in sorted(secrets, key=len, reverse=True):
        if secret:
            text = text.replace(secret, HIDDEN).replace(quote(secret, safe=""), HIDDEN)
    return _QUERY.sub(rf"\1{HIDDEN}", _USERINFO_IN_TEXT.sub(rf"\1{HIDDEN}@", text))
