"""The settings of compression and encryption."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from tiered_kv.config.secret_keys import parse_key, problem_of_key, read_key_file
from tiered_kv.config.settings import StrictModel, TierSettings
from tiered_kv.config.units import Count, FilePath
from tiered_kv.toolkit.codecs import CODEC_IDS, ENCRYPTED_IDS, CodecSet
from tiered_kv.toolkit.encryption import KEY_ID_MAX, Cipher

KEYS_MAX = 64

KeyId = Annotated[Count, Field(ge=1, le=KEY_ID_MAX)]


class EncryptionSettings(StrictModel):
    """The keys of a tier."""

    keys: dict[KeyId, SecretStr] = Field(
        default={},
        max_length=KEYS_MAX,
        description="Keys by their ids, numbers from 1: each 32 bytes in hexadecimal or base64; "
        'write {1: "${KV_KEY_1}"}.',
    )
    key_files: dict[KeyId, FilePath] = Field(
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
        ids = self.keys.keys() | self.key_files.keys()
        if not ids:
            raise ValueError("expected a key in 'keys' or 'key_files'")
        if self.write_key is None and len(ids) > 1:
            raise ValueError("expected 'write_key', the id of the key to encrypt with: there are several")
        if self.write_key is not None and self.write_key not in ids:
            raise ValueError(f"'write_key' names key {self.write_key}, which neither 'keys' nor 'key_files' has")
        return self

    def read_keys(self) -> dict[int, bytes]:
        found = {key_id: parse_key(text.get_secret_value()) for key_id, text in self.keys.items()}
        for key_id, path in self.key_files.items():
            found[key_id] = read_key_file(path, location=f"encryption.key_files.{key_id}")
        return found


class CodecSettings(TierSettings):
    """The base of the settings of a tier that offers compression and encryption."""

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
        """Return the codecs of these settings. Reads the key files.

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
