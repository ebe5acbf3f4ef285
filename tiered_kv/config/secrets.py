"""Secrets: kept out of logs, errors and printed configurations; and keys of 32 bytes, read from a text or a file.

All code that reads settings or writes messages about them calls it, on any thread. A value is secret if it came from
the environment, is a pydantic `SecretStr` or `SecretBytes`, or belongs to a setting that is named like a secret. User,
password, query and fragment of a URL are secret in every text.
"""

from __future__ import annotations

import os
import re
import stat
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Annotated, Final, Self
from urllib.parse import quote, unquote

from pydantic import AfterValidator, Field, SecretBytes, SecretStr

from tiered_kv.config.units import format_bytes
from tiered_kv.errors import ConfigError, TieredKVError
from tiered_kv.system.permissions import OTHERS

HIDDEN = "***"
_FOREIGN_CHARACTERS_MAX = 240
_HIDDEN_MIN = 4
"""Characters of the shortest secret that is hidden in a text: shorter ones would occur in any message."""

_SECRET_NAME = re.compile(
    r"pass(word|wd|phrase)|secret|token(?!s)|credential|(api|access|private|encryption|account|name)_?key|"
    r"^(key|key_files|encryption|auth|pass|dsn)$|pwd?$|connection_string|authorization",
    re.IGNORECASE,
)

# A password that is not percent-encoded may hold "/", "@", "?" and spaces, and the URL may lack a slash. So a value is
# hidden up to its last "@". In a text of several words, a word is hidden up to its last "@".
_USERINFO_OF_VALUE = re.compile(r"(:/{1,2})(?!/).*@", re.DOTALL)
_USERINFO_IN_TEXT = re.compile(r"(:/{1,2})(?!/)\S*@")
_USERINFO_WITHOUT_SCHEME = re.compile(r"^[^/\s@:]*:.*@", re.DOTALL)
_QUERY = re.compile(r"(:/{1,2}[^\s?#'\"]*[?#])[^\s'\"]+")
_PASSWORD = re.compile(r"^(?:[A-Za-z][\w+.-]*:/{1,2})?[^/\s@:]*:(.*)@", re.DOTALL)

KEY_BYTES = 32
KEY_FILE_BYTES_MAX = 1024

_KEY = re.compile(r"\s*([0-9A-Fa-f]{64})\s*")
_WANTED = f"expected a key: {KEY_BYTES} bytes as 64 hexadecimal digits, as `openssl rand -hex {KEY_BYTES}` prints them"


class EnvironmentText(str):
    """A text that came, whole or in part, from environment variables."""

    __slots__ = ("values",)
    values: frozenset[str]
    """Values of the variables: a server may repeat one without the rest of the text."""

    def __new__(cls, text: str, values: Iterable[str] = ()) -> Self:
        made = super().__new__(cls, text)
        made.values = frozenset(values)
        return made


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
    """Return every text in `value`, and every number as a text."""
    leaves = (leaf for _, leaf in _leaves(value))
    return {str(leaf) for leaf in leaves if isinstance(leaf, (str, int, float)) and not isinstance(leaf, bool)}


def scrub(text: str, secrets: Set[str]) -> str:
    """Return a library's `text` without any of `secrets` but very short ones, and without the secret parts of URLs."""
    for secret in sorted(secrets | {" ".join(each.split()) for each in secrets}, key=len, reverse=True):
        if len(secret) >= _HIDDEN_MIN:
            quoted = quote(secret, safe="", errors="replace")  # an environment variable may be no UTF-8
            text = text.replace(secret, HIDDEN).replace(quoted, HIDDEN)
    return _QUERY.sub(rf"\1{HIDDEN}", _USERINFO_IN_TEXT.sub(rf"\1{HIDDEN}@", text))


def foreign_text(text: str, secrets: Set[str]) -> str:
    """Return the words of a server or library, for a message: on one line, of limited length, without `secrets`."""
    return ascii(scrub(" ".join(text.split()), secrets)[:_FOREIGN_CHARACTERS_MAX])[1:-1]


def error_text(error: BaseException, secrets: Set[str]) -> str:
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


STRAY_CHARACTER: Final = "has white space or a control character"


def stray_character(secret: str, *, may_have_blanks: bool = False) -> bool:
    """Return whether a credential has white space, a control character or a byte order mark, as if copied from a file.

    With `may_have_blanks`, blanks between its other characters do not count.
    """
    looked_at = secret.replace(" ", "") if may_have_blanks and secret == secret.strip() else secret
    return any(each.isspace() or unicodedata.category(each) in ("Cc", "Cf") for each in looked_at)


def problem_of_token(token: str) -> str | None:
    """Return why the header of a request cannot hold a token, without showing it; None if it can."""
    if stray_character(token):
        return f"{STRAY_CHARACTER}; a file's last newline counts, too"
    return None if token.isascii() else "has a character that is not ASCII, which no header can hold"


def _check_token(token: SecretStr) -> SecretStr:
    if problem := problem_of_token(token.get_secret_value()):
        raise ValueError(problem)
    return token


Token = Annotated[SecretStr, Field(min_length=16), AfterValidator(_check_token)]
"""A setting whose value the header of a request holds."""


def parse_key(text: str) -> bytes:
    """Return the bytes of a key; raises `ConfigError` if it is none, without showing the text or its length."""
    if problem := problem_of_key(text):
        raise ConfigError(problem)
    return bytes.fromhex(text.strip())  # `fromhex` skips ASCII white space only, `_KEY` and `strip` all


def problem_of_key(text: str) -> str | None:
    """Return why `text` is no key, without showing it; None if it is one."""
    return None if _KEY.fullmatch(text) else _WANTED


def read_key_file(path: str | os.PathLike[str], *, location: str = "") -> bytes:
    """Return the key in a file of this user, closed to all others, or in a file of root that a group may read.

    `location` names the setting in errors.

    Raises:
        ConfigError: The file cannot be read, is open to others, is larger than `KEY_FILE_BYTES_MAX`, or holds no key.
            The message shows neither the content nor the path: a user may have put a key in place of the path.
    """
    text = ""
    try:
        # Without blocking, so that a pipe is refused and not waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            problem = _refusal(os.fstat(descriptor))  # of the open file: the path may name another one by now
            if problem is None:
                text = os.read(descriptor, KEY_FILE_BYTES_MAX).decode("ascii", "replace")
                wanted = problem_of_key(text)
                problem = None if wanted is None else f"holds no key: {wanted}"
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:  # a path with a null character is a ValueError
        problem = f"cannot be opened: {getattr(error, 'strerror', None) or 'this is no path'}"
    if problem is not None:
        raise ConfigError(f"the key file {problem}", location=location)
    return parse_key(text)


def _refusal(status: os.stat_result) -> str | None:
    """Return why a file must not hold a secret; None if it may."""
    if not stat.S_ISREG(status.st_mode):
        return "is no regular file"
    # Kubernetes mounts a secret as root's, for the pod's group to read.
    is_mounted = status.st_uid == 0 and not status.st_mode & (OTHERS & ~stat.S_IRGRP)
    if status.st_uid != os.geteuid() and not is_mounted:
        return f"belongs to user {status.st_uid}, and this process is user {os.geteuid()}: it must be the process's own"
    if status.st_mode & OTHERS and not is_mounted:
        return f"has mode {stat.S_IMODE(status.st_mode):04o}: expected one that is closed to others, as by chmod 600"
    if status.st_size > KEY_FILE_BYTES_MAX:
        return f"is larger than {format_bytes(KEY_FILE_BYTES_MAX)}: expected a key and nothing else"
    return None
