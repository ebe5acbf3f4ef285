"""Pydantic's errors as a `ConfigError`: the setting, the found value, and the remedy.

Everything that reads settings calls it, on any thread. No message repeats a secret.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, SecretBytes, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tiered_kv.config.secrets import HIDDEN, is_secret_name, redact, scrub, secrets_in
from tiered_kv.errors import ConfigError

_SHOWN_CHARACTERS_MAX = 80
_NAME_CHARACTERS_MAX = 40

_TEXT_WANTED = "expected a text"

# The first match counts, so the general text is last.
_REWORDED = {
    "Input should be a valid string": _TEXT_WANTED,
    "Keys should be strings": _TEXT_WANTED,
    "Input should be a valid boolean": "expected true or false",
    "Input should be a valid integer": "expected a whole number",
    "Input should be a valid number": "expected a number",
    "Input should be a valid dictionary": "expected a mapping",
    "Input should be a valid tuple": "expected a list",
    "Input should be greater": "expected a value greater",
    "Input should be less": "expected a value less",
    "Input should be": "expected",
    "String should match pattern": "expected a text that matches",
    "String should have": "expected a text with",
}

# From one of these texts on, pydantic's message does not help a reader of the stack's file.
_WITHOUT_DETAIL = (" or instance of", ", unable to ", ", got ")

Model = TypeVar("Model", bound=BaseModel)
Location = tuple[int | str, ...]
"""The path of a setting: keys, and places in lists."""

LINES: ContextVar[Mapping[str, int]] = ContextVar("tiered_kv_lines")
"""The line of each setting of the file that is being checked, by the setting's path. `config.reading` sets it."""


def validate(model: type[Model], data: object, location: Location = ()) -> Model:
    """Return `data` as a `model`, or raise ConfigError; `location` is the path of `data` in the configuration."""
    return raise_problems(check(model, data, location))


def raise_problems(checked: Model | list[ConfigError]) -> Model:
    """Return the model, or raise its problems as one error."""
    if not isinstance(checked, list):
        return checked
    if len(checked) == 1:
        raise checked[0]
    places = [(line_of(problem.location), problem) for problem in checked]
    lines = "\n".join(f"  line {line}: {problem}" if line else f"  {problem}" for line, problem in places)
    raise ConfigError(f"{len(checked)} settings cannot be used:\n{lines}")


class Problems(ValueError):
    """Errors of several settings, for a validator of a pydantic model to raise; `check` returns them one by one."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        super().__init__("; ".join(map(str, errors)))
        self.errors = errors


def check(model: type[Model], data: object, location: Location = ()) -> Model | list[ConfigError]:
    """Return `data` as a `model`, or an error for each setting that cannot be used."""
    if isinstance(data, model):
        return data
    if not isinstance(data, Mapping):
        keys = ", ".join(model.model_fields)
        return [
            ConfigError(f"expected a mapping with the keys {keys}, found {_shown(data, '')}", location=dotted(location))
        ]
    try:
        return model.model_validate(dict(data))
    except ConfigError as error:  # a validator of this project has raised it
        return [error]
    except ValidationError as error:
        # pydantic's error is not chained: it may hold a secret.
        secrets = secrets_in(data)
        found: list[ConfigError] = []
        for detail in error.errors(include_url=False):
            cause = detail.get("ctx", {}).get("error")
            if isinstance(cause, Problems):
                found += cause.errors
            else:
                text = scrub(_message(model, detail), secrets)
                found.append(ConfigError(text, location=dotted((*location, *detail["loc"]))))
        return found


def dotted(location: Location) -> str:
    """Return the path of a setting for messages, such as "secondary.0.capacity".

    A name that is too long for a setting may be a misplaced secret, and is hidden.
    """
    return ".".join(name if len(name) <= _NAME_CHARACTERS_MAX else HIDDEN for name in map(str, location))


def line_of(location: str) -> int | None:
    """Return the line of a setting in the checked file, or of the nearest setting around it; None if it has neither."""
    lines = LINES.get({})
    while location and location not in lines:
        location = location.rpartition(".")[0]
        if not location:
            return lines.get("")
    return lines.get(location) if location else None


def suggestion(word: str, known: Sequence[str]) -> str:
    """Return " (did you mean 'x'?)" for the known word nearest to `word`; empty if none is near."""
    near = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean '{near[0]}'?)" if near else ""


def _message(model: type[BaseModel], detail: ErrorDetails) -> str:
    location, value = detail["loc"], detail["input"]
    name = str(location[-1]) if location else ""
    owner, fields = _fields_at(model, location)
    if detail["type"] == "missing":
        field = fields[-1]
        return "this key is required" + (f": {field.description}" if field and field.description else "")
    if detail["type"] == "extra_forbidden":
        known = owner.model_fields if owner else {}
        # The key may be a misspelled name of a secret.
        found = HIDDEN if any(map(_is_secret, known.values())) else _shown(value, name)
        hint = getattr(owner, "unknown_key_advice", {}).get(name)
        near = suggestion(name, list(known))
        accepted = near or (f"; known keys: {', '.join(known)}" if known else "")
        return f"unknown key, with the value {found}{f'; {hint}' if hint else accepted}"
    wanted = _reworded(detail["msg"])
    examples = fields[-1].examples if fields and fields[-1] else None
    if detail["type"] == "string_pattern_mismatch" and examples:
        wanted = f"expected a text such as {' or '.join(examples)}"
    if isinstance(value, Mapping) and detail["type"] == "value_error":  # a check of several settings together
        return wanted
    is_hidden = any(map(_is_secret, fields)) or any(is_secret_name(str(part)) for part in location)
    if wanted == _TEXT_WANTED and value is not None and not isinstance(value, (Mapping, list, tuple)):
        return f"{wanted}; put it in quotes"  # YAML reads another value than the file shows: 1.10 is 1.1, `on` is true
    found = HIDDEN if is_hidden else _shown(value, name)
    words = re.findall(r"'([^']*)'", detail["ctx"]["expected"]) if detail["type"] == "literal_error" else []
    return f"{wanted}, found {found}{suggestion(str(value), words)}"


def _reworded(message: str) -> str:
    for prefix in ("Value error, ", "Assertion failed, "):
        message = message.removeprefix(prefix)
    for prefix, ours in _REWORDED.items():
        if message.startswith(prefix):
            rest = message.removeprefix(prefix)
            for detail in _WITHOUT_DETAIL:
                rest = rest.partition(detail)[0]
            return ours + rest
    return message


def _is_secret(field: FieldInfo | None) -> bool:
    return field is not None and not {SecretStr, SecretBytes}.isdisjoint(_types_in(field.annotation))


def _shown(value: object, name: str) -> str:
    if isinstance(value, Mapping):  # any of its values may be a secret
        return repr({str(key): HIDDEN for key in value})[:_SHOWN_CHARACTERS_MAX]
    if isinstance(value, (list, tuple)) and not all(isinstance(item, str) for item in value):
        return "a list"
    public = redact(value, name)
    if isinstance(public, bool) or public is None:
        return {True: "true", False: "false", None: "nothing"}[public]
    text = HIDDEN if public == HIDDEN else repr(public)
    return text if len(text) <= _SHOWN_CHARACTERS_MAX else f"{text[:_SHOWN_CHARACTERS_MAX]}…"


def _fields_at(model: type[BaseModel], location: Location) -> tuple[type[BaseModel] | None, list[FieldInfo | None]]:
    """Return the model that has the last key of `location`, and the field of each key; None where ambiguous."""
    inner: type[BaseModel] | None = model
    owner, fields = inner, []
    for part in location:
        owner = inner
        field = owner.model_fields.get(str(part)) if owner else None
        fields.append(field)
        known = _types_in(field.annotation) if field else ()
        models = [each for each in known if isinstance(each, type) and issubclass(each, BaseModel)]
        inner = models[0] if len(models) == 1 else None
    return owner, fields


def _types_in(annotation: object) -> Iterator[Any]:  # Any: the annotation of a field
    yield annotation
    for argument in get_args(annotation):
        yield from _types_in(argument)
