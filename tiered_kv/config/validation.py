"""Turning what pydantic finds wrong into a `ConfigError`: which setting, what was found, what to write."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, SecretBytes, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from tiered_kv.config.redaction import HIDDEN, is_secret_name, redact, scrub, secrets_in, texts_in
from tiered_kv.errors import ConfigError

_SHOWN_CHARACTERS_MAX = 80
_SURELY_MEANT = 0.75
"""How similar an unknown key is, from 0 to 1, to the one that it is a misspelling of without much doubt."""

# The first that fits, so the general one is last.
_REWORDED = {
    "Input should be a valid string": "expected a text",
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

# What pydantic adds after these says nothing that a reader of the stack's file does not see.
_WITHOUT_DETAIL = (" or instance of", ", unable to ", ", got ")

Model = TypeVar("Model", bound=BaseModel)
Location = tuple[int | str, ...]


def validate(model: type[Model], data: object, location: Location = ()) -> Model:
    """Return `data` as a `model`; `location` is where `data` stands in the stack's configuration.

    Raises:
        ConfigError: With one line for each setting that cannot be used.
    """
    checked = check(model, data, location)
    if isinstance(checked, list):
        raise combined(checked)
    return checked


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
    except ConfigError as error:  # a validator of this project's own
        return [error]
    except ValidationError as error:
        # What pydantic says is reworded and not chained: it may hold what must not be shown.
        secrets = secrets_in(data) | _declared_secrets(model, data)
        return [
            ConfigError(scrub(_message(model, detail), secrets), location=dotted((*location, *detail["loc"])))
            for detail in error.errors(include_url=False)
        ]


def combined(problems: Sequence[ConfigError]) -> ConfigError:
    """Return one error that tells all of `problems`, of which there is at least one."""
    if len(problems) == 1:
        return problems[0]
    lines = "\n".join(f"  {problem}" for problem in problems)
    return ConfigError(f"{len(problems)} settings cannot be used:\n{lines}")


def dotted(location: Location) -> str:
    """Return the path of a setting as messages have it, such as "secondary.0.capacity"."""
    return ".".join(str(part) for part in location)


def suggestion(word: str, known: Sequence[str]) -> str:
    """Return "; did you mean 'x'?" for the known word nearest to `word`, or an empty text."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def _message(model: type[BaseModel], detail: ErrorDetails) -> str:
    location, value = detail["loc"], detail["input"]
    parent = _model_at(model, location[:-1])
    name = str(location[-1]) if location else ""
    field = parent.model_fields.get(name) if parent else None
    if detail["type"] == "missing":
        return "this key is required" + (f": {field.description}" if field and field.description else "")
    if detail["type"] == "extra_forbidden":
        known = list(parent.model_fields) if parent else []
        accepted = f"{suggestion(name, known)}; known keys: {', '.join(known)}" if known else ""
        found = HIDDEN if parent and _may_be_a_secret(parent, name) else _shown(value, name)
        hint = getattr(parent, "unknown_key_hints", {}).get(name)
        return f"unknown key, with the value {found}{f'; {hint}' if hint else accepted}"
    if detail["type"] == "string_type" and isinstance(value, (bool, int, float)) and not is_secret_name(name):
        return f"expected a text; put it in quotes: '{_shown(value, name)}'"
    wanted = _reworded(detail["msg"])
    if isinstance(value, Mapping) and detail["type"] == "value_error":  # a check of several settings together
        return wanted
    return f"{wanted}, found {HIDDEN if _leads_to_a_secret(model, location) else _shown(value, name)}"


def _reworded(message: str) -> str:
    """Return pydantic's `message` in the words of this project's."""
    for prefix in ("Value error, ", "Assertion failed, "):
        message = message.removeprefix(prefix)
    for prefix, ours in _REWORDED.items():
        if message.startswith(prefix):
            rest = message.removeprefix(prefix)
            for detail in _WITHOUT_DETAIL:
                rest = rest.partition(detail)[0]
            return ours + rest
    return message


def _may_be_a_secret(model: type[BaseModel], unknown: str) -> bool:
    """Return whether the key `unknown` may be meant for a secret: not where it looks like a setting that is none."""
    fields = model.model_fields
    if not any(_is_secret(field.annotation) for field in fields.values()):
        return False
    near = difflib.get_close_matches(unknown, fields, n=1, cutoff=_SURELY_MEANT)
    return not near or _is_secret(fields[near[0]].annotation)


def _declared_secrets(model: type[BaseModel], data: Mapping[str, object]) -> set[str]:
    """Return the texts in `data` that are meant for settings of a secret type, whatever they are called."""
    found: set[str] = set()
    for name, field in model.model_fields.items():
        value = data.get(name)
        if _is_secret(field.annotation):
            found |= texts_in(value)
        for item in value if isinstance(value, (list, tuple)) else (value,):
            for inner in filter(_is_model, _types_in(field.annotation)):
                found |= _declared_secrets(inner, item) if isinstance(item, Mapping) else set()
    return found


def _leads_to_a_secret(model: type[BaseModel], location: Location) -> bool:
    """Return whether a setting of a secret type stands at `location`, or around it."""
    for depth in range(len(location)):
        parent = _model_at(model, location[:depth])
        field = parent.model_fields.get(str(location[depth])) if parent else None
        if field and _is_secret(field.annotation):
            return True
    return False


def _is_secret(annotation: object) -> bool:
    return not {SecretStr, SecretBytes}.isdisjoint(_types_in(annotation))


def _shown(value: object, name: str) -> str:
    if isinstance(value, Mapping):  # whose own keys say nothing of what its values are
        return repr({str(key): HIDDEN for key in value})[:_SHOWN_CHARACTERS_MAX]
    if isinstance(value, (list, tuple)) and any(isinstance(item, (Mapping, list, tuple)) for item in value):
        return "a list"
    public = redact(value, name)
    if isinstance(public, bool) or public is None:
        return {True: "true", False: "false", None: "nothing"}[public]
    text = HIDDEN if public == HIDDEN else repr(public)
    return text if len(text) <= _SHOWN_CHARACTERS_MAX else f"{text[:_SHOWN_CHARACTERS_MAX]}…"


def _model_at(model: type[BaseModel], location: Location) -> type[BaseModel] | None:
    """Return the model of the mapping at `location` within a `model`, where a plain path leads to one."""
    for part in location:
        field = model.model_fields.get(part) if isinstance(part, str) else None
        inner = [item for item in _types_in(field.annotation) if _is_model(item)] if field else []
        if len(inner) != 1:
            return None
        model = inner[0]
    return model


def _types_in(annotation: object) -> Iterator[Any]:  # Any: whatever a field is annotated with
    """Yield `annotation`, and every type that it is made of."""
    yield annotation
    for argument in get_args(annotation):
        yield from _types_in(argument)


def _is_model(candidate: object) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, BaseModel)
