"""Planting secrets in the settings of a tier type, and noting all that is shown of configurations and running stacks.

The settings are found, not listed: in the model of the tier type's entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args, get_origin

from pydantic import BaseModel, SecretBytes, SecretStr

from tests.support.secret_hunt import Sheet, new_marker, show_running_stack
from tiered_kv.config.settings import StrictModel, TierSettings
from tiered_kv.config.stack_config import StackConfig, load_config
from tiered_kv.errors import ConfigError, TieredKVError
from tiered_kv.hooks import tier_plugins

STACK: dict[str, object] = {
    "namespace": {"model": "m"},
    "block": {"bytes": "4KiB"},
    "primary": {"capacity": "64KiB"},
}
BY_CLASS = "tiered_kv.testing.four_methods:FourMethodTier"
"""A tier without a model: every further key is an argument of its class."""

ENTRIES: dict[str, dict[str, object]] = {
    "memory": {"capacity": "64MiB"},
    "nvme": {"path": "blocks", "capacity": "64MiB"},
    "fs": {"path": "blocks", "capacity": "64MiB"},
    "redis": {"url": "redis://127.0.0.1:1", "connect_timeout": "100ms"},
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
    """A setting of a model, or of a model in it; one that `has_numbers` maps numbers to values."""

    path: tuple[str, ...]
    is_secret: bool
    has_numbers: bool = False

    def value(self, text: object) -> object:
        """Return the value of the setting that has `text` in it."""
        return {1: text} if self.has_numbers else text


def settings_of(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[Setting]:
    """Yield the settings of a model, and those of the models in it."""
    for name, info in model.model_fields.items():
        types = set(_types_in(info.annotation))
        yield Setting((*path, name), bool(types & {SecretStr, SecretBytes}), get_origin(info.annotation) is dict)
        for inner in types:
            if isinstance(inner, type) and issubclass(inner, StrictModel):
                yield from settings_of(inner, (*path, name))


def entry_of(type_name: str) -> dict[str, object]:
    """Return an entry of the type that is valid."""
    entry = {"type": type_name, **ENTRIES.get(type_name, {})}
    load_config({**STACK, "secondary": [entry]})
    return entry


def model_of(type_name: str) -> type[TierSettings]:
    """Return the model of a tier type's entry."""
    return tier_plugins().resolve(type_name).settings


def with_value(tree: Mapping[str, object], path: Sequence[str], value: object) -> dict[str, object]:
    """Return `tree` with `value` at `path`."""
    head, *rest = path
    inner = tree.get(head)
    return {**tree, head: with_value(inner if isinstance(inner, dict) else {}, rest, value) if rest else value}


def show_config(sheet: Sheet, place: str, source: Mapping[str, object], planted: str) -> StackConfig | None:
    """Load a configuration with the marker in it, and note all that is said of it."""
    try:
        config = load_config(source, environ={"PLANTED": planted})
    except TieredKVError as error:
        sheet.note_error(place, error)
        return None
    sheet.note(place, config, *config.secondary, config.shown())
    return config


def places_of(type_name: str) -> list[Setting]:
    """Return the settings of a tier type; of a class, which takes any, some that people would choose."""
    if type_name == BY_CLASS:
        names = ("password", "api_key", "auth", "db_pwd", "connection_string", "url", "anything")
        return [Setting((name,), name not in ("url", "anything")) for name in names]
    return list(settings_of(model_of(type_name)))


def hunt_in_configuration(type_name: str, ways: Mapping[str, str] = WAYS, *, secret_only: bool = False) -> Sheet:
    """Plant a marker in each setting of the type, in each way, and note what is shown of the configuration."""
    entry, planted = entry_of(type_name), new_marker()
    sheet = Sheet({"the secret": planted})
    for setting in places_of(type_name):
        if secret_only and not setting.is_secret:
            continue
        for way, form in ways.items():
            if way == "as it is" and not setting.is_secret:
                continue  # it is no secret there
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
    """Return what to change in an entry so that its secrets get used in different ways; nobody listens at first."""
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
    """Return the entry with the markers in the settings whose dotted paths they are given by."""
    settings = {".".join(each.path): each for each in places_of(str(entry["type"]))}
    for path, text in markers.items():
        entry = with_value(entry, path.split("."), settings[path].value(text))
    # A key that encrypts nothing would have less occasion to be shown.
    return {**entry, "codec": "aes-256-gcm"} if "encryption" in entry else entry


def planted_entries(
    entry: dict[str, object], markers: dict[str, str]
) -> Iterator[tuple[dict[str, object], Mapping[str, str]]]:
    """Yield the entry with all secrets in it, or, where they exclude each other, with all but one; and the secrets."""
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
    """Plant a marker in each secret setting of the type, and note what is shown of stacks that use them."""
    markers = {".".join(each.path): new_marker() for each in settings_of(model_of(type_name)) if each.is_secret}
    in_file = new_marker()
    file = directory / "file.pem"
    file.write_text(f"-----BEGIN PRIVATE KEY-----\n{in_file}\n-----END PRIVATE KEY-----\n")
    in_key_file = new_marker()
    key_file = directory / "name.key"
    key_file.touch(mode=0o600)
    key_file.write_text(in_key_file)
    sheet = Sheet({**markers, "a file's content": in_file, "a key file's content": in_key_file})
    used: set[str] = set()
    fields = model_of(type_name).model_fields
    by_files: list[dict[str, object]] = [{"name_key_file": str(path)} for path in (key_file, file)]
    if "encryption" in fields:
        by_files += [{"encryption": {"key_files": {2: str(path)}, "write_key": 2}} for path in (key_file, file)]
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
