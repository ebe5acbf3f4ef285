"""The settings of compression and encryption; every built-in tier has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from tiered_kv.config.secret_keys import is_key_for_path, parse_key, problem_of_key, read_key_file
from tiered_kv.config.settings import StrictModel, TierSettings
from tiered_kv.config.units import Count
from tiered_kv.toolkit.codecs import CODEC_IDS, ENCRYPTED_IDS, CodecSet
from tiered_kv.toolkit.encryption import KEY_ID_MAX, Cipher

KEYS_MAX = 64

KeyId = Annotated[Count, Field(ge=1, le=KEY_ID_MAX)]


class EncryptionSettings(StrictModel):
    """The keys that a tier's blocks are encrypted with."""

    keys: dict[KeyId, SecretStr] = Field(
        default={},
        max_length=KEYS_MAX,
        description="Keys by their ids, numbers from 1: each 32 bytes in hexadecimal or base64; "
        'write {1: "${KV_KEY_1}"}.',
    )
    key_files: dict[KeyId, Annotated[str, Field(min_length=1)]] = Field(
        default={},
        max_length=KEYS_MAX,
        description="Files that hold keys, by the keys' ids; closed to other users. Beside `keys`, or instead.",
    )
    write_key: KeyId | None = Field(
        default=None, description="Id of the key to encrypt with; by default the only one. The others are for reading."
    )
    accept_plain: bool = Field(
        default=False,
        description="Also read blocks that are not encrypted, which anybody who can write into the storage can plant.",
    )

    @model_validator(mode="before")
    @classmethod
    def _names_are_no_keys(cls, data: object) -> object:
        """Refuse a key in place of a setting's name: an error would show it as an unknown name."""
        if isinstance(data, Mapping) and any(not problem_of_key(str(name)) for name in data):
            raise ValueError("expected keys by their ids in 'keys', found one in place of a setting's name")
        return data

    @field_validator("keys", "key_files", mode="before")
    @classmethod
    def _ids_are_ids(cls, by_id: object) -> object:
        """Refuse an invalid id here: an error would show it, and it may be a key in the wrong place."""
        if isinstance(by_id, Mapping) and not all(map(_is_id, by_id)):
            raise ValueError(f"expected whole numbers from 1 to {KEY_ID_MAX} before the colons, as ids of keys")
        if isinstance(by_id, Mapping) and len({int(key_id) for key_id in by_id}) < len(by_id):  # 1 and "01"
            raise ValueError("one id stands here twice, in two ways to write it")
        return by_id

    @field_validator("keys")
    @classmethod
    def _keys_are_keys(cls, keys: dict[int, SecretStr]) -> dict[int, SecretStr]:
        for key_id, text in keys.items():
            problem = problem_of_key(text.get_secret_value())
            if problem:
                raise ValueError(f"key {key_id}: {problem}")
        return keys

    @model_validator(mode="after")
    def _ids_fit(self) -> Self:
        both = sorted(self.keys.keys() & self.key_files.keys())
        if both:
            raise ValueError(f"'keys' and 'key_files' both give key {both[0]}; give one of them")
        if any(map(is_key_for_path, self.key_files.values())):
            raise ValueError("'key_files' holds a key, not the path of a file; keys go into 'keys'")
        ids = self.keys.keys() | self.key_files.keys()
        if not ids:
            raise ValueError("expected a key in 'keys' or 'key_files'")
        if self.write_key is None and len(ids) > 1:
            raise ValueError("expected 'write_key', the id of the key to encrypt with: there are several")
        if self.write_key is not None and self.write_key not in ids:
            raise ValueError(f"'write_key' names key {self.write_key}, which neither 'keys' nor 'key_files' has")
        return self

    def read_keys(self) -> dict[int, bytes]:
        """Return all keys by their ids; reads the files.

        Raises:
            ConfigError: A file cannot be used.
        """
        found = {key_id: parse_key(text.get_secret_value()) for key_id, text in self.keys.items()}
        for key_id, path in self.key_files.items():
            location = f"encryption.key_files.{key_id}"
            found[key_id] = read_key_file(path, location=location, secrets=self.secret_texts())
        return found


class CodecSettings(TierSettings):
    """The settings of a tier whose blocks may be encoded."""

    codec: Literal["raw", "zstd", "aes-256-gcm", "zstd+aes-256-gcm"] = Field(
        default="raw",
        description="How blocks are stored: as they are, compressed (extra `zstd`), encrypted (extra `crypto`), "
        "or both.",
    )
    encryption: EncryptionSettings | None = Field(
        default=None,
        description="Keys to encrypt blocks with, and to read encrypted ones with whatever `codec` says.",
    )

    @model_validator(mode="after")
    def _has_keys(self) -> Self:
        if CODEC_IDS[self.codec] in ENCRYPTED_IDS and self.encryption is None:
            raise ValueError(f"codec '{self.codec}' needs 'encryption' with a key, keys: {{1: \"${{KV_KEY_1}}\"}}")
        return self

    def open_codecs(self) -> CodecSet:
        """Return the codecs of these settings; reads key files.

        Raises:
            ConfigError: A key file cannot be used.
            MissingExtraError: A library is not installed.
        """
        settings = self.encryption
        if settings is None:
            return CodecSet(self.codec)
        keys, write_key = settings.read_keys(), None
        if CODEC_IDS[self.codec] in ENCRYPTED_IDS:
            write_key = settings.write_key if settings.write_key is not None else next(iter(keys))
        return CodecSet(self.codec, Cipher(keys, write_key), accept_plain=settings.accept_plain)


def _is_id(name: object) -> bool:
    """Return whether `name` is the id of a key; in JSON it is a text."""
    if isinstance(name, str) and name.isascii() and name.isdecimal() and len(name) <= len(str(KEY_ID_MAX)):
        name = int(name)
    return isinstance(name, int) and not isinstance(name, bool) and 1 <= name <= KEY_ID_MAX
