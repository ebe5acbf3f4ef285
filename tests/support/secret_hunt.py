"""Secrets planted in the settings of a tier type, and looked for in all that a stack shows of itself.

The settings are found in the model of the tier type's entry. A marker is found as it is, in hexadecimal,
percent-encoded, and in base64 at any of its three alignments.
"""

from __future__ import annotations

import base64
import io
import logging
import secrets
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import get_args, get_origin

import numpy as np
from pydantic import BaseModel, SecretBytes, SecretStr

from tests.support.stacks import manager_of
from tiered_kv.config.hooks import tier_plugins
from tiered_kv.config.secrets import KEY_BYTES
from tiered_kv.config.settings import StrictModel, TierSettings
from tiered_kv.config.stack_config import StackConfig, load_config
from tiered_kv.errors import ConfigError, TieredKVError
from tiered_kv.stack.exporters.metrics import StackCollector, exposition
from tiered_kv.stack.exporters.status import status
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.testing.control import wait_until

_CONDITION_WAIT_S = 20.0
_BLOCKS = 2


def new_marker() -> str:
    """Return a unique text of letters and digits, which few encodings change; a valid key for settings of keys."""
    return secrets.token_hex(KEY_BYTES)


def forms_of(marker: str) -> dict[str, str]:
    """Return a marker in each encoding, by its name."""
    raw = marker.encode()
    forms = {"as it is": marker, "in hex": raw.hex(), "percent-encoded": "".join(f"%{byte:02x}" for byte in raw)}
    for shift in range(3):
        encoded = base64.b64encode(bytes(shift) + raw).decode()
        # Without the characters that also encode bits of the neighbours.
        forms[f"in base64, alignment {shift}"] = encoded[-(-shift * 8 // 6) : (shift + len(raw)) * 8 // 6]
    return forms


class Sheet:
    """Texts that a stack has shown, searched as they come. One thread at a time."""

    def __init__(self, markers: Mapping[str, str]) -> None:
        self._forms = [
            (name, form, text) for name, marker in markers.items() for form, text in forms_of(marker).items()
        ]
        self._findings: list[str] = []
        self._notes = 0

    def __len__(self) -> int:
        return self._notes

    def note(self, place: str, *shown: object) -> None:
        """Search the `str` and `repr` of each of `shown`; findings name `place`."""
        for each in shown:
            self._search(place, each if isinstance(each, str) else f"{each!s}\n{each!r}")

    def note_error(self, place: str, error: BaseException) -> None:
        """Search an error, its attributes, its causes, and its traceback."""
        link: BaseException | None = error
        while link is not None:
            self.note(f"{place}: {type(link).__name__}", link, link.args, vars(link), getattr(link, "__notes__", ""))
            link = link.__cause__ or link.__context__
        self.note(f"{place}: the traceback", "".join(traceback.format_exception(error)))

    def findings(self) -> list[str]:
        return list(self._findings)

    def _search(self, place: str, text: str) -> None:
        self._notes += 1
        lower = text.lower()
        for name, form, wanted in self._forms:
            # Base64 depends on case; the other forms may have lost it.
            at = text.find(wanted) if "base64" in form else lower.find(wanted.lower())
            if at >= 0:
                self._findings.append(f"{name}, {form}, in {place}: {text[max(0, at - 80) : at + 60]!r}")


def show_running_stack(
    sheet: Sheet,
    place: str,
    source: Mapping[str, object],
    until: Callable[[Stack], bool] = lambda stack: True,
    wait_s: float = 1.0,
) -> bool:
    """Open a stack, use it, close it, and note all that can be seen from outside, including the log at level DEBUG.

    Tests whose tiers complete their jobs set a longer `wait_s`, for busy machines.
    """
    is_open = False
    with _log_of_everything() as log:
        try:
            with open_stack(source) as stack:
                is_open = True
                _use(sheet, place, stack, wait_s)
                wait_until(lambda: until(stack), _CONDITION_WAIT_S, what="what the stack was to do")
        except TieredKVError as error:
            sheet.note_error(place, error)
    sheet.note(f"{place}: the log", log.getvalue())
    return is_open


def process_as_seen() -> Iterator[str]:
    """Yield the names that other processes see of this one and its threads."""
    yield Path("/proc/self/cmdline").read_text()
    for task in Path("/proc/self/task").iterdir():
        try:
            yield (task / "comm").read_text()
        except OSError:  # the thread has ended
            continue


def _use(sheet: Sheet, place: str, stack: Stack, wait_s: float) -> None:
    keys = [bytes([number]) * 32 for number in range(_BLOCKS)]
    blocks = np.zeros((_BLOCKS, stack.config.block.bytes), dtype=np.uint8)
    sheet.note(f"{place}: put", stack.put(keys, blocks, timeout=wait_s), stack.flush(wait_s))
    manager_of(stack).reset_cache()
    sheet.note(f"{place}: get", stack.get(keys, blocks, wait_s))
    sheet.note(f"{place}: counters", stack.counters())
    sheet.note(f"{place}: metrics", exposition(StackCollector(stack.counters, secrets=stack.config.secret_texts())))
    sheet.note(f"{place}: status", status(stack.observed()))
    for name, tier in zip(stack.tier_names, stack.secondary_tiers, strict=True):
        sheet.note(f"{place}: the tier '{name}'", tier, vars(tier), tier.stats())
        try:
            sheet.note(f"{place}: what '{name}' says of itself", tier.describe())
        except TieredKVError as error:
            sheet.note_error(f"{place}: what '{name}' says of itself", error)
    for each in (stack, manager_of(stack), stack.config, *stack.config.secondary):
        sheet.note(f"{place}: {type(each).__name__}", each, vars(each))
    sheet.note(f"{place}: the threads", *threading.enumerate(), *process_as_seen())


@contextmanager
def _log_of_everything() -> Iterator[io.StringIO]:
    """Collect the log of all loggers, at the levels they have while the root's is DEBUG."""
    text, root = io.StringIO(), logging.getLogger()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s %(threadName)s %(message)s"))
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield text
    finally:
        root.setLevel(level)
        root.removeHandler(handler)


# Planting.

STACK: dict[str, object] = {
    "namespace": {"model": "m"},
    "block": {"bytes": "4KiB"},
    "primary": {"capacity": "64KiB"},
}
BY_CLASS = "tests.support.faulty:FourMethodTier"
"""A tier without a model: every further key is an argument of its class."""

ENTRIES: dict[str, dict[str, object]] = {
    "memory": {"capacity": "64MiB"},
    "nvme": {"path": "blocks", "capacity": "64MiB"},
    "fs": {"path": "blocks", "capacity": "64MiB"},
    "redis": {"url": "redis://127.0.0.1:1", "connect_timeout": "100ms"},
    "host": {"socket": "unix:/nonexistent"},
    "gcs": {"bucket": "bucket", "endpoint": "http://127.0.0.1:1", "attempts": 1},
    "azure": {"account": "store", "container": "blocks", "endpoint": "http://127.0.0.1:1", "attempts": 1},
    "s3": {"bucket": "bucket", "endpoint_url": "http://127.0.0.1:1", "region": "us-east-1", "attempts": 1},
}
"""What a tier of the type needs to be valid, and to fail soon."""

WAYS = {
    "as it is": "{}",
    "as a variable": "${{PLANTED}}",
    "within a variable": "x${{PLANTED}}x",
    "in a URL": "http://user:{}@127.0.0.1:1",
    "in a URL, encoded": "http://user:%2F{}%40@127.0.0.1:1",
    "in a URL, not encoded": "http://user:a/b?c#{} d@127.0.0.1:1",
    "in a URL's user": "http://{}:pw@127.0.0.1:1",
    "in a URL's query": "http://127.0.0.1:1/?token={}",
    "in an address": "user:{}@127.0.0.1:1",
    "in half a URL": "http:/user:{}@127.0.0.1:1",
}
"""How a secret gets into a setting."""
QUICK = {way: WAYS[way] for way in ("as it is", "as a variable", "in a URL, not encoded")}

MISTAKES: dict[str, dict[str, object]] = {
    "alone": {},
    "beside mistakes": {"colour": "red", "job_timeout": "soon"},
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a model, or of a model in it; with `has_numbers` a mapping of numbers to values."""

    path: tuple[str, ...]
    is_secret: bool
    has_numbers: bool = False

    def value(self, text: object) -> object:
        return {1: text} if self.has_numbers else text


def settings_of(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[Setting]:
    for name, info in model.model_fields.items():
        types = set(_types_in(info.annotation))
        yield Setting((*path, name), bool(types & {SecretStr, SecretBytes}), get_origin(info.annotation) is dict)
        for inner in types:
            if isinstance(inner, type) and issubclass(inner, StrictModel):
                yield from settings_of(inner, (*path, name))


def entry_of(type_name: str) -> dict[str, object]:
    entry = {"type": type_name, **ENTRIES.get(type_name, {})}
    load_config({**STACK, "secondary": [entry]})
    return entry


def model_of(type_name: str) -> type[TierSettings]:
    return tier_plugins().resolve(type_name).settings


def with_value(tree: Mapping[str, object], path: Sequence[str], value: object) -> dict[str, object]:
    """Return `tree` with `value` at `path`."""
    head, *rest = path
    inner = tree.get(head)
    return {**tree, head: with_value(inner if isinstance(inner, dict) else {}, rest, value) if rest else value}


def show_config(sheet: Sheet, place: str, source: Mapping[str, object], planted: str) -> StackConfig | None:
    """Load a configuration with the marker in it, and note what it shows or the error."""
    try:
        config = load_config(source, environ={"PLANTED": planted})
    except TieredKVError as error:
        sheet.note_error(place, error)
        return None
    sheet.note(place, config, *config.secondary, config.shown())
    return config


def places_of(type_name: str) -> list[Setting]:
    """Return the settings of a tier type; for a class, which takes any, some likely names."""
    if type_name == BY_CLASS:
        names = ("password", "api_key", "auth", "db_pwd", "connection_string", "url", "anything")
        return [Setting((name,), name not in ("url", "anything")) for name in names]
    return list(settings_of(model_of(type_name)))


def hunt_in_configuration(type_name: str, ways: Mapping[str, str] = WAYS, *, secret_only: bool = False) -> Sheet:
    """Plant a marker in each setting, in each way, and note what the configuration shows."""
    entry, planted = entry_of(type_name), new_marker()
    sheet = Sheet({"the secret": planted})
    for setting in places_of(type_name):
        if secret_only and not setting.is_secret:
            continue
        for way, form in ways.items():
            if way == "as it is" and not setting.is_secret:
                continue
            value = setting.value(form.format(planted))
            for mistakes, further in MISTAKES.items():
                place = f"{type_name}.{'.'.join(setting.path)} {way}, {mistakes}"
                changed = {**with_value(entry, setting.path, value), **further}
                config = show_config(sheet, place, {**STACK, "secondary": [changed]}, planted)
                if config is not None and setting.is_secret and type_name != BY_CLASS:
                    tier = config.secondary[0]
                    sheet.note(f"{place}, inspected", vars(tier), tier.model_dump(), tier.model_dump_json())
        if setting.is_secret:
            for odd in (planted, [planted], {"x": planted}, {planted: 1}, [[planted]], {1: [planted]}):
                changed = with_value(entry, setting.path, odd)
                changed["job_timeout"] = "soon"
                show_config(sheet, f"{type_name}.{'.'.join(setting.path)}", {**STACK, "secondary": [changed]}, planted)
    return sheet


def scenes_of(type_name: str, port: int, file: Path) -> list[dict[str, object]]:
    """Return changes of an entry by which its secrets are used in different ways; with the first no server listens."""
    if type_name == "redis":
        files = {"tls_ca": str(file), "tls_cert": str(file), "tls_key": str(file)}
        return [
            {},
            {"url": f"redis://127.0.0.1:{port}"},
            {"url": f"redis://127.0.0.1:{port}", "mode": "cluster"},
            {"url": f"redis://127.0.0.1:{port}", "mode": "sentinel", "service": "blocks"},
            {"url": f"rediss://127.0.0.1:{port}"},
            {"url": f"rediss://127.0.0.1:{port}", **files},
        ]
    if type_name == "s3":
        return [
            {},
            {"endpoint_url": f"http://127.0.0.1:{port}"},
            {"endpoint_url": f"https://127.0.0.1:{port}"},
            {"endpoint_url": f"https://127.0.0.1:{port}", "ca_file": str(file)},
        ]
    return [{}]


def with_markers(entry: dict[str, object], markers: Mapping[str, str]) -> dict[str, object]:
    """Return the entry with the markers, which are given by the dotted paths of settings."""
    settings = {".".join(each.path): each for each in places_of(str(entry["type"]))}
    for path, text in markers.items():
        entry = with_value(entry, path.split("."), settings[path].value(text))
    # A key that encrypts nothing would have less occasion to be shown.
    return {**entry, "codec": "aes-256-gcm"} if "encryption" in entry else entry


def planted_entries(
    entry: dict[str, object], markers: dict[str, str]
) -> Iterator[tuple[dict[str, object], Mapping[str, str]]]:
    """Yield the entry with all secrets, or with all but one if some exclude each other; and the secrets."""
    for left_out in ("", *markers):
        chosen = {path: text for path, text in markers.items() if path != left_out}
        planted = with_markers(entry, chosen)
        try:
            load_config({**STACK, "secondary": [planted]})
        except ConfigError:
            continue
        yield planted, chosen
        if not left_out:
            return


def hunt_in_running_stacks(type_name: str, port: int, directory: Path, wait_s: float = 1.0) -> Sheet:
    """Plant a marker in each secret setting of the type, and note what stacks that use them show."""
    markers = {".".join(each.path): new_marker() for each in settings_of(model_of(type_name)) if each.is_secret}
    in_file = new_marker()
    file = directory / "file.pem"
    file.write_text(f"-----BEGIN PRIVATE KEY-----\n{in_file}\n-----END PRIVATE KEY-----\n")
    in_key_file = new_marker()
    key_file = directory / "a.key"
    key_file.touch(mode=0o600)
    key_file.write_text(in_key_file)
    sheet = Sheet({**markers, "a file's content": in_file, "a key file's content": in_key_file})
    used: set[str] = set()
    fields = model_of(type_name).model_fields
    by_files: list[dict[str, object]] = []
    if "encryption" in fields:
        by_files = [{"encryption": {"key_files": {2: str(path)}, "write_key": 2}} for path in (key_file, file)]
    own_path = {"path": str(directory / "blocks")} if "path" in fields else {}
    for scene in [*scenes_of(type_name, port, file), *by_files]:
        plain = {**entry_of(type_name), "job_timeout": "2s", **own_path, **scene}
        for entry, chosen in planted_entries(plain, markers):
            used |= chosen.keys()
            show_running_stack(sheet, f"{type_name} {scene}", {**STACK, "secondary": [entry]}, wait_s=wait_s)
    assert used == markers.keys(), "every secret was in a stack that was opened"
    return sheet


def _types_in(annotation: object) -> Iterator[object]:
    yield annotation
    for argument in get_args(annotation):
        yield from _types_in(argument)
