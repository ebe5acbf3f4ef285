"""Reads a stack's YAML file, and fills in variables from the environment.

The configuration, the command and the engines' plugins call it, on any thread. What must stay true: the file is only
data, which PyYAML's safe loader reads. A limit of its size, and no aliases, bound the memory that it takes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TypeVar

import yaml

from tiered_kv.config.secrets import HIDDEN, EnvironmentText
from tiered_kv.config.units import expanded_path, format_bytes
from tiered_kv.config.validation import LINES, Location, dotted, line_of
from tiered_kv.errors import ConfigError

FILE_BYTES_MAX = 1 << 20
_NUMBER_CHARACTERS_MAX = 64
"""A limit for numbers: PyYAML reads a number to the base of 60 in quadratic time."""
_NUMBER_BITS_MAX = 256
"""Longer numbers fit no setting and no message."""

Result = TypeVar("Result")

_STACK_KEYS = "namespace, block and primary"

_VARIABLE = re.compile(r"\$\$|\$\{(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\})?")


def from_source(
    source: str | os.PathLike[str] | Mapping[str, object],
    use: Callable[[Mapping[str, object]], Result],
    *,
    what: str = "the stack's file",
    keys: str = _STACK_KEYS,
) -> Result:
    """Return the result of `use` on a mapping, or on the content of the YAML file at a path.

    Errors about a file name its path. `what` names the kind of file in errors, and `keys` its keys.
    """
    if isinstance(source, Mapping):
        return use(source)
    path = os.fspath(source)
    try:
        with open(expanded_path(path), "rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what} cannot be read: {getattr(error, 'strerror', error)}", location=path) from error
    if len(text) > FILE_BYTES_MAX:
        raise ConfigError(f"{what} has at most {format_bytes(FILE_BYTES_MAX)}", location=path)
    raw, lines = parse_stack_text(text, path, keys)
    token = LINES.set(lines)
    try:
        return use(raw)
    except ConfigError as error:
        line = line_of(error.location)
        raise ConfigError(error.message, location=error.location, file=f"{path}:{line}" if line else path) from None
    finally:
        LINES.reset(token)


def placed(error: ConfigError, path: str) -> ConfigError:
    """Return an error about the stack in the file at `path`, with the setting's line if the file has the setting."""
    if error.file or not error.location:
        return error
    first = error.location.partition(".")[0]

    def fail(raw: Mapping[str, object]) -> ConfigError:
        if first in raw:
            raise error
        return error

    try:
        return from_source(path, fail)
    except ConfigError as found:
        return found if found.message == error.message else error


def parse_stack_text(
    text: str | bytes, source: str = "the stack", keys: str = _STACK_KEYS
) -> tuple[dict[str, object], dict[str, int]]:
    """Return the mapping in a YAML `text`, and the line of each key by its path; `source` names the text in errors."""
    data, lines, problem = _load(text)
    if problem:
        # Raised outside of the handler: PyYAML's own error repeats lines of the file.
        raise ConfigError(problem, location=source)
    if data is None:
        raise ConfigError(f"the file is empty: expected a mapping with {keys}", location=source)
    if not isinstance(data, dict):
        found = "a list" if isinstance(data, list) else "a single value"  # hides the text: the file may be wrong
        raise ConfigError(f"expected a mapping with {keys}, found {found}", location=source)
    return data, lines


def _load(text: str | bytes) -> tuple[object, dict[str, int], str]:
    """Return the result of `parse_stack_text`, and the problem with a YAML `text`, if any."""
    try:
        data, lines = yaml.load(text, _StackLoader)  # noqa: S506  # a subclass of SafeLoader
        return data, lines, ""
    except yaml.MarkedYAMLError as error:
        problem = _problem_of(error, text)
    except yaml.reader.ReaderError as error:
        problem = f"this is not YAML: {error.reason}, at position {error.position}"
    except RecursionError:
        problem = "this is nested too deeply"
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
        # PyYAML raises the last five for a value that does not have the type of its tag.
        problem = f"this is not YAML: a value cannot be read ({type(error).__name__})"
    return None, {}, problem


def _problem_of(error: yaml.MarkedYAMLError, text: str | bytes) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    problem = _without_quotations(error)
    if isinstance(error, yaml.constructor.ConstructorError) and problem.startswith("could not determine a con"):
        problem = f"tags are not allowed, found {HIDDEN}; put a text that begins with '!' in quotes"
    elif mark and _is_bare_variable(text, mark):
        problem += "; within [...] and {...}, put a text with ${NAME} in quotes"
    return f"{where}{problem}"


def _without_quotations(error: yaml.MarkedYAMLError) -> str:
    """Return the problem without the words of the file that PyYAML quotes: one of them may be a password."""
    problem: str = error.problem or error.context or "this is not YAML"
    if isinstance(error, _StackFileError):
        return problem
    # It keeps single characters, and PyYAML's own names for parts of a file, such as '<block end>'.
    return re.sub(r"'([^']*)'", lambda quoted: quoted[0] if re.fullmatch(r".?|<.*>", quoted[1]) else HIDDEN, problem)


def _is_bare_variable(text: str | bytes, mark: yaml.Mark) -> bool:
    """Return whether `mark` is at the "{" of a variable."""
    lines = (text.decode("utf-8", "replace") if isinstance(text, bytes) else text).splitlines()
    return mark.line < len(lines) and lines[mark.line][max(0, mark.column - 1) : mark.column + 1] == "${"


def fill_variables(data: Mapping[str, object], environ: Mapping[str, str]) -> dict[str, object]:
    """Return `data` with each `${NAME}` and `${NAME:-default}` in its texts replaced, and `$$` by `$`."""
    return {key: _fill(value, str(key), environ) for key, value in data.items()}


def _fill(value: object, location: str, environ: Mapping[str, str]) -> object:
    if isinstance(value, Mapping):
        return {key: _fill(item, f"{location}.{key}", environ) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_fill(item, f"{location}.{index}", environ) for index, item in enumerate(value)]
    if isinstance(value, int) and value.bit_length() > _NUMBER_BITS_MAX:
        raise ConfigError("expected a number of a usual size, found one of hundreds of digits", location=location)
    return _fill_text(value, location, environ) if isinstance(value, str) and "$" in value else value


def _fill_text(text: str, location: str, environ: Mapping[str, str]) -> str:
    values: list[str] = []  # the values of variables

    def replacement(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        if match[0] == "$$":
            return "$"
        if name is None:
            raise ConfigError("expected ${NAME} or ${NAME:-default}, and $$ for a plain $", location=location)
        found = environ.get(name)
        if "${" in (default or ""):  # else two models could have one namespace, by the name "${...}"
            raise ConfigError("expected a default without a variable in ${NAME:-default}", location=location)
        if default is not None and not found:
            return default
        if found is None:
            raise ConfigError(
                f"the environment variable {name} is not set; set it, or write ${{{name}:-default}}",
                location=location,
            )
        values.append(found)
        return found

    filled = _VARIABLE.sub(replacement, text)
    return EnvironmentText(filled, values) if values else filled


class _StackFileError(yaml.MarkedYAMLError):
    """Valid YAML that a stack's file must not have."""

    def __init__(self, problem: str, mark: yaml.Mark) -> None:
        super().__init__(problem=problem, problem_mark=mark)


class _StackLoader(yaml.SafeLoader):
    """The safe loader, which refuses aliases, merges, duplicate keys, and keys without a value. It has lines, too."""

    def get_single_data(self) -> tuple[object, dict[str, int]]:
        node = self.get_single_node()
        if node is None:
            return None, {}
        data = self.construct_document(node)  # raises an error for keys that a file must not have
        return data, {dotted(place): each.start_mark.line + 1 for place, each in self._places(node)}

    def _places(self, node: yaml.Node, location: Location = ()) -> Iterator[tuple[Location, yaml.Node]]:
        """Yield each value with its place."""
        yield location, node
        if isinstance(node, yaml.MappingNode):
            for key_node, value_node in node.value:
                key = self.construct_object(key_node)
                yield from self._places(value_node, (*location, str(key)))
        elif isinstance(node, yaml.SequenceNode):
            for place, value_node in enumerate(node.value):
                yield from self._places(value_node, (*location, place))

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise _StackFileError("a stack's file has no aliases: write the value again", self.get_mark())
        node = super().compose_node(parent, index)
        if isinstance(node, yaml.ScalarNode) and node.tag in _NUMBER_TAGS and len(node.value) > _NUMBER_CHARACTERS_MAX:
            message = f"a number has at most {_NUMBER_CHARACTERS_MAX} characters: put a text in quotes"
            raise _StackFileError(message, node.start_mark)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen: set[Hashable] = set()  # keys and their texts: 1, 01 and "1" are the same key
        for key_node, value_node in node.value:
            mark = key_node.start_mark
            if not isinstance(key_node, yaml.ScalarNode):
                raise _StackFileError("a key must be a text", mark)
            if node.flow_style and value_node.start_mark.index == value_node.end_mark.index:
                # This may be the rest of a password with a comma, so the message does not repeat it.
                raise _StackFileError("a key has no value; within {...}, put a text with a comma in quotes", mark)
            if key_node.tag == _MERGE_TAG:
                raise _StackFileError("a stack's file merges nothing with '<<': write the keys here", mark)
            same = {key_node.value, self.construct_object(key_node, deep=True)}
            if not seen.isdisjoint(same):
                raise _StackFileError(f"the key '{key_node.value}' stands here twice", mark)
            seen |= same
        return super().construct_mapping(node, deep)


_MERGE_TAG = "tag:yaml.org,2002:merge"
_NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
