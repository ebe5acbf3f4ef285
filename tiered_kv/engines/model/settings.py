"""The settings of a model's `config.json`, with the names that several families of models have for one thing.

`architectures` and `states` read them, on the thread that asks for a size. What must stay true: a value that is no
number, or cannot be one of a model, is a `ConfigError` with the setting's name, before anything is computed from it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

from tiered_kv.errors import ConfigError

FILE: Final = "config.json"
_FILE_BYTES_MAX: Final = 8 << 20
_NUMBER_MAX: Final = 1 << 24
_ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "hidden_size": ("n_embd", "d_model"),
    "dtype": ("torch_dtype",),
}
_TEXT_MODELS: Final = ("text_config", "llm_config", "language_config")
"""Where models that also see or hear keep the settings of their language model."""
_INSTEAD: Final = "give the numbers: --layers, --kv-heads and --head-size"


class ModelSettings:
    """The settings of a language model, read only.

    Args:
        raw: The object of the file, or a part of it.
        where: The file, for messages.
        outer: The object around `raw`, which may have what `raw` leaves out.
    """

    def __init__(self, raw: Mapping[str, object], where: str, outer: Mapping[str, object] | None = None) -> None:
        self._raw, self._outer, self.where = raw, outer or {}, where

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file, or the `config.json` of a folder; raise ConfigError if there is none that can be read."""
        file = _file_of(path)
        try:
            if file.stat().st_size > _FILE_BYTES_MAX:
                raise ConfigError(
                    f"has more than {_FILE_BYTES_MAX >> 20} MiB; give a model's {FILE}", location=str(file)
                )
            raw = json.loads(file.read_bytes())
        except OSError as error:
            raise ConfigError(f"cannot be read: {os.strerror(error.errno or 0)}", location=str(file)) from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"is no JSON; give a model's {FILE}, or {_INSTEAD}", location=str(file)) from error
        if not isinstance(raw, dict):
            raise ConfigError(f"expected an object with the model's settings; {_INSTEAD}", location=str(file))
        inner = next((raw[name] for name in _TEXT_MODELS if isinstance(raw.get(name), dict)), None)
        return cls(raw, str(file)) if inner is None else cls(inner, str(file), raw)

    @property
    def model_type(self) -> str:
        found = self._raw.get("model_type") or self._outer.get("model_type")
        if not isinstance(found, str):
            raise ConfigError(f"names no model_type; {_INSTEAD}", location=self.where)
        return found

    def get(self, name: str) -> object:
        """Return a setting by any of its names; None if the file has it not, or as null."""
        for each in (name, *_ALIASES.get(name, ())):
            for raw in (self._raw, self._outer):
                if raw.get(each) is not None:
                    return raw[each]
        return None

    def whole(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a setting that is a whole number; raise ConfigError if it is missing without a `default`, or wrong."""
        found = self.get(name)
        if found is None and default is not None:
            return default
        if found is None:
            raise ConfigError(f"has no {name}; {_INSTEAD}", location=self.where)
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= _NUMBER_MAX:
            raise self.wrong(name, f"a whole number from {least}")
        return found

    def texts(self, name: str) -> list[str] | None:
        """Return a setting that is a list of texts; None if it is missing."""
        found = self.get(name)
        if found is None:
            return None
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise self.wrong(name, "a list of texts")
        return found

    def wrong(self, name: str, expected: str) -> ConfigError:
        found = repr(self.get(name))
        shown = found if len(found) <= 60 else f"{found[:60]}..."
        return ConfigError(f"{name}: expected {expected}, found {shown}", location=self.where)


def _file_of(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise ConfigError(
            f"there is no such folder or file; give a model's folder on this machine, its {FILE}, or its numbers: "
            "--layers, --kv-heads and --head-size",
            location=str(path),
        )
    if (path / FILE).is_file():
        return path / FILE
    below = next(path.glob(f"snapshots/*/{FILE}"), None)
    hint = f"give {below.parent}" if below else f"give a folder that has one, or {_INSTEAD.removeprefix('give ')}"
    raise ConfigError(f"this folder has no {FILE}; {hint}", location=str(path))
