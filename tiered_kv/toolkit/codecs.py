"""Codecs of blocks: compression, encryption, both, or none; and their settings.

A tier opens one `CodecSet`. The threads that store or load blocks call it, several threads at once. What must stay
true: a payload decodes to the block that was stored, or to a status that says why it does not.
`docs/reference/formats.md` describes the payloads.
"""

from __future__ import annotations

import functools
import mmap
import threading
from contextlib import suppress
from typing import Annotated, Final, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, SecretStr, field_validator, model_validator

from tiered_kv.config.secrets import parse_key, problem_of_key, read_key_file
from tiered_kv.config.settings import StrictModel, TierSettings
from tiered_kv.config.units import Count, FilePath
from tiered_kv.errors import MissingExtraError
from tiered_kv.reasons import RecordStatus
from tiered_kv.toolkit.encryption import ENVELOPE_BYTES, KEY_ID_MAX, Cipher
from tiered_kv.toolkit.zstd import Zstd

_PRIVATE: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
HUGE_PAGE_BYTES: Final = 2 << 20
"""The size of a huge page. A large request from huge pages reaches a disk as one request. A large request from small
pages reaches a disk in pieces of about 1 MiB. If a kernel has only larger huge pages, a buffer gets small pages."""

RAW_ID: Final = 0
ZSTD_ID: Final = 1
AES_ID: Final = 2
ZSTD_AES_ID: Final = 3
CODEC_IDS: Final = {"raw": RAW_ID, "zstd": ZSTD_ID, "aes-256-gcm": AES_ID, "zstd+aes-256-gcm": ZSTD_AES_ID}
"""Numbers, 0 to 65535, by name. A number is never given to another codec."""
COMPRESSED_IDS: Final = frozenset({ZSTD_ID, ZSTD_AES_ID})
ENCRYPTED_IDS: Final = frozenset({AES_ID, ZSTD_AES_ID})

OVERHEAD_BYTES_MAX: Final = ENVELOPE_BYTES  # by how much a payload may exceed its block, in any codec


def payload_bytes_range(codec_id: int, raw_bytes: int) -> range:
    """Return the possible payload lengths of a block of `raw_bytes`; all lengths for an unknown codec.

    Only a `raw` payload is as long as its block, so a reader may read a payload of that length straight into the block.
    """
    overhead_bytes = ENVELOPE_BYTES if codec_id in ENCRYPTED_IDS else 0
    if codec_id in COMPRESSED_IDS:
        return range(overhead_bytes, raw_bytes)
    if codec_id in CODEC_IDS.values():
        return range(raw_bytes + overhead_bytes, raw_bytes + overhead_bytes + 1)
    return range(raw_bytes + OVERHEAD_BYTES_MAX + 1)


def binding_of(namespace_digest: bytes, key: bytes) -> bytes:
    """Return the bytes that bind an encrypted payload to its namespace and its whole key."""
    return namespace_digest + key  # unique, since all digests have one length


class ThreadBuffer(threading.local):
    """A page-aligned buffer for each calling thread. It never shrinks.

    A new buffer for each block would cost more time than a codec: the kernel clears each page.
    """

    _memory = memoryview(bytearray())  # writable, like every view that `take` returns

    def take(self, size_bytes: int) -> memoryview:
        """Return `size_bytes` of this thread's buffer, with undefined content. Earlier results become invalid."""
        if size_bytes > len(self._memory):
            self._memory = _map(-(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        return self._memory[:size_bytes]


def _map(size_bytes: int) -> memoryview:
    """Map memory, in huge pages if it is large enough and the kernel has them."""
    if size_bytes < HUGE_PAGE_BYTES:
        return memoryview(mmap.mmap(-1, size_bytes, flags=_PRIVATE))
    mapping = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=_PRIVATE)
    with suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    start = -np.frombuffer(mapping, dtype=np.uint8).ctypes.data % HUGE_PAGE_BYTES
    return memoryview(mapping)[start : start + size_bytes]


class Draft(NamedTuple):
    """A block before it is stored: compressed if that pays, and not yet encrypted. Its payload's length is known."""

    codec_id: int
    raw_bytes: int  # the block's size
    content: memoryview  # the payload before encryption; it may be the block itself
    cipher: Cipher | None = None  # None if it is not encrypted

    @property
    def key_id(self) -> int:
        """The id of the key that encrypts it; 0 for none."""
        return 0 if self.cipher is None else self.cipher.write_key

    @property
    def payload_bytes(self) -> int:
        return len(self.content) if self.cipher is None else len(self.content) + ENVELOPE_BYTES

    def write_into(self, target: memoryview, binding: bytes) -> None:
        """Write the payload into `target`, `payload_bytes` long, which must not overlap `content`. See `binding_of`."""
        if self.cipher is None:
            target[:] = self.content
        else:
            self.cipher.encrypt_into(self.content, target, self.codec_id, self.raw_bytes, binding)


class CodecSet:
    """The codec that a tier writes with, and the codecs that it reads. Any thread may call.

    All codecs are read, so that the setting can change at any time. The exception: a tier that encrypts refuses plain
    blocks, which anyone who can write into the storage could plant.

    `name`, one of `CODEC_IDS`, is the codec to write with. With `accept_plain`, it also reads plain blocks.
    A block that would not get shorter is not compressed. Raises `MissingExtraError`: the codec's library is missing.
    """

    def __init__(self, name: str = "raw", cipher: Cipher | None = None, *, accept_plain: bool = False) -> None:
        codec_id = CODEC_IDS[name]
        self.name = name
        self.writes_raw = codec_id == RAW_ID  # whether blocks are stored unchanged
        self.encrypts = codec_id in ENCRYPTED_IDS  # what it writes
        assert cipher is not None or not self.encrypts, "there is a key to write with"
        self.accepts_plain = accept_plain or not self.encrypts
        self.overhead_bytes = ENVELOPE_BYTES if self.encrypts else 0  # by how much a payload may exceed its block
        self._cipher = cipher
        self._write_cipher = cipher if self.encrypts else None
        self._compresses = codec_id in COMPRESSED_IDS
        if self._compresses:
            self._zstd = Zstd()
        self._room = ThreadBuffer()  # for content that is decrypted, and still compressed

    def draft(self, block: memoryview) -> Draft:
        """Compress a block, and choose its codec. Encryption follows in `Draft.write_into`."""
        if self._compresses:
            assert self._zstd is not None, "__init__ has made it"
            content = self._zstd.compress(block)
            if len(content) + self.overhead_bytes < len(block):
                codec_id = ZSTD_ID if self._write_cipher is None else ZSTD_AES_ID
                return Draft(codec_id, len(block), memoryview(content), self._write_cipher)
        return Draft(RAW_ID if self._write_cipher is None else AES_ID, len(block), block, self._write_cipher)

    def refusal(self, codec_id: int, payload: memoryview | None = None) -> RecordStatus:
        """Return OK if a sound record of this codec can be read, else why not. With `payload`, check its key too."""
        is_encrypted = codec_id in ENCRYPTED_IDS
        if is_encrypted and (self._cipher is None or not (payload is None or self._cipher.has_key_of(payload))):
            return RecordStatus.UNKNOWN_KEY
        if codec_id not in CODEC_IDS.values() or (codec_id in COMPRESSED_IDS and self._zstd is None):
            return RecordStatus.UNKNOWN_CODEC
        return RecordStatus.OK if is_encrypted or self.accepts_plain else RecordStatus.UNENCRYPTED

    def decode(self, codec_id: int, payload: memoryview, block: memoryview, binding: bytes) -> RecordStatus:
        """Write the block of a payload into `block`. Any status but OK leaves undefined bytes there.

        The payload may be hostile: no allocation is much larger than `block`. The caller has verified the payload's
        checksum. An encrypted payload needs no checksum: its tag is checked here. For `binding` see `binding_of`.
        """
        status = self.refusal(codec_id)
        if status is not RecordStatus.OK:
            return status
        if len(payload) not in payload_bytes_range(codec_id, len(block)):
            return RecordStatus.BAD_PAYLOAD
        if codec_id in ENCRYPTED_IDS:
            assert self._cipher is not None, "refusal() has checked it"
            content = self._room.take(len(payload) - ENVELOPE_BYTES) if codec_id in COMPRESSED_IDS else block
            status = self._cipher.decrypt_into(payload, content, codec_id, len(block), binding)
            if status is not RecordStatus.OK:
                return status
            payload = content
        if codec_id in COMPRESSED_IDS:
            assert self._zstd is not None, "refusal() has checked it"
            return self._zstd.decompress(payload, block)
        if payload is not block:
            block[:] = payload
        return RecordStatus.OK

    @functools.cached_property
    def _zstd(self) -> Zstd | None:
        """The compressor, imported at its first use; None if its library is not installed."""
        try:
            return Zstd()
        except MissingExtraError:
            return None


PLAIN = CodecSet()


KEYS_MAX = 64

KeyId = Annotated[Count, Field(ge=1, le=KEY_ID_MAX)]


class EncryptionSettings(StrictModel):
    """The keys of a tier."""

    keys: dict[KeyId, SecretStr] = Field(
        default={},
        max_length=KEYS_MAX,
        description='Keys by their ids, numbers from 1: each 32 bytes in hexadecimal; write {1: "${KV_KEY_1}"}.',
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


class CodecSettings(TierSettings):
    """The base of the settings of a tier that offers compression and encryption."""

    codec: Literal["raw", "zstd", "aes-256-gcm", "zstd+aes-256-gcm"] = Field(
        default="raw",
        description="How blocks are stored: as they are, compressed (extra `zstd`), encrypted (extra `crypto`), "
        "or both.",
    )
    encryption: EncryptionSettings | None = Field(
        default=None, description="Keys to encrypt blocks with, and to read encrypted ones with whatever `codec` says."
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
        keys = {key_id: parse_key(text.get_secret_value()) for key_id, text in settings.keys.items()}
        for key_id, path in settings.key_files.items():
            keys[key_id] = read_key_file(path, location=f"encryption.key_files.{key_id}")
        write_key = None
        if CODEC_IDS[self.codec] in ENCRYPTED_IDS:
            write_key = settings.write_key if settings.write_key is not None else next(iter(keys))
        return CodecSet(self.codec, Cipher(keys, write_key), accept_plain=settings.accept_plain)
