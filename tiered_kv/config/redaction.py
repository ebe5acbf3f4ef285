"""Keeping secrets out of logs, errors and printed configurations.

A value is secret if it came from the environment, if it is a pydantic `SecretStr` or `SecretBytes`, or if the
setting that holds it is named like one. User, password, query and fragment of a URL are secret wherever it stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Self
from urllib.parse import quote, unquote

from pydantic import SecretBytes, SecretStr

from tiered_kv.errors import TieredKVError

HIDDEN = "***"
_FOREIGN_CHARACTERS_MAX = 240
_HIDDEN_MIN = 4
"""Characters from which a secret is hidden in a text: a shorter one is in any message, and is no secret."""

_SECRET_NAME = re.compile(
    r"pass(word|wd|phrase)|secret|token(?!s)|credential|(api|access|private|encryption|account|name)_?key|"
    r"^(key|key_files|encryption|auth|pass|dsn)$|pwd?$|connection_string|authorization",
    re.IGNORECASE,
)

# A password that is not percent-encoded may hold "/", "@", "?" and spaces, and the URL may lack a slash. So a value is
# hidden up to its last "@"; a text of several words only up to the end of the word.
_USERINFO_OF_VALUE = re.compile(r"(:/{1,2})(?!/).*@", re.DOTALL)
_USERINFO_IN_TEXT = re.compile(r"(:/{1,2})(?!/)\S*@")
_USERINFO_WITHOUT_SCHEME = re.compile(r"^[^/\s@:]*:.*@", re.DOTALL)
_QUERY = re.compile(r"(:/{1,2}[^\s?#'\"]*[?#])[^\s'\"]+")
_PASSWORD = re.compile(r"^(?:[A-Za-z][\w+.-]*:/{1,2})?[^/\s@:]*:(.*)@", re.DOTALL)


class EnvironmentText(str):
    """A text that came, whole or in part, from environment variables."""

    __slots__ = ("values",)
    values: frozenset[str]
    """Those of the variables: a server may repeat one without the rest of the text."""

    def __new__(cls, text: str, values: Iterable[str] = ()) -> Self:
        made = super().__new__(cls, text)
        made.values = frozenset(values)
        return made

    def __reduce__(self) -> tuple[type[Self], tuple[str, frozenset[str]]]:
        return type(self), (str(self), self.values)


def is_secret_name(name: str) -> bool:
    """Return whether the value of a setting called `name` is a secret."""
    return _SECRET_NAME.search(name) is not None


def variables_in(value: object) -> frozenset[str]:
    """Return the values of environment variables that are parts of the texts in `value`."""
    return frozenset().union(*(leaf.values for _, leaf in _leaves(value) if isinstance(leaf, EnvironmentText)))


def redact(value: object, name: str = "") -> object:
    """Return `value`, the setting called `name`, with every secret in it replaced by `***`."""
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
    """Return every secret text in `value`, the setting called `name`, for use with `scrub`."""
    return set().union(*(_secrets_of(leaf, key) for key, leaf in _leaves(value, name)))


def texts_in(value: object) -> set[str]:
    """Return the text of every text and number in `value`."""
    leaves = (leaf for _, leaf in _leaves(value))
    return {str(leaf) for leaf in leaves if isinstance(leaf, (str, int, float)) and not isinstance(leaf, bool)}


def scrub(text: str, secrets: Set[str]) -> str:
    """Return a library's `text` without any of `secrets` but very short ones, and without the secret parts of URLs."""
    for secret in sorted(secrets | {" ".join(each.split()) for each in secrets}, key=len, reverse=True):
        if len(secret) >= _HIDDEN_MIN:
            text = text.replace(secret, HIDDEN).replace(quote(secret, safe=""), HIDDEN)
    return _QUERY.sub(rf"\1{HIDDEN}", _USERINFO_IN_TEXT.sub(rf"\1{HIDDEN}@", text))


def foreign_text(text: str, secrets: Set[str]) -> str:
    """Return what a server or library says, for a message: on one line, of limited length, without `secrets`."""
    return ascii(scrub(" ".join(text.split()), secrets)[:_FOREIGN_CHARACTERS_MAX])[1:-1]


def error_text(error: Exception, secrets: Set[str]) -> str:
    """Return an error's text without any of `secrets`; a text of a third-party error begins with its type."""
    text = scrub(str(error), secrets)
    return text if isinstance(error, TieredKVError) else f"{type(error).__name__}: {text}"


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield each scalar in `value` with its key."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, str(key))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item, name)
    else:
        yield name, value


def _secrets_of(leaf: object, name: str) -> set[str]:
    if isinstance(leaf, SecretStr):
        return {leaf.get_secret_value()}
    if isinstance(leaf, SecretBytes):
        return {leaf.get_secret_value().decode("utf-8", "replace")}
    found = texts_in(leaf) if isinstance(leaf, EnvironmentText) or is_secret_name(name) else set()
    password = _PASSWORD.match(leaf) if isinstance(leaf, str) else None
    return found | {password[1], unquote(password[1])} if password else found
