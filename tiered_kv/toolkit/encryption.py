"""Authenticated encryption of blocks: AES-256-GCM (NIST SP 800-38D), with the library `cryptography`.

`CodecSet` calls it, on the thread that stores or loads a block. A payload can be decrypted only in the place for which
it was encrypted. No nonce is used twice under one key; the last paragraph names an exception.

A payload is an envelope: key id, key check, salt, nonce, ciphertext, tag. `docs/reference/formats.md` describes it. The
tag also covers the namespace, the whole key, the codec and the block's length, so that a payload is valid in one place.

Random nonces of 96 bits are safe for 2**32 messages (SP 800-38D, 8.3), and processes that share a key may reach this
number. So a `Cipher` draws a random salt of 128 bits, derives a *session key* from key and salt by HKDF-SHA256
(RFC 5869), and counts its nonces from 0. A new session begins after `SESSION_MESSAGES_MAX` messages and in a forked
child. A copy of a running process, such as a resumed snapshot of its machine, is not detected.
"""

from __future__ import annotations

import functools
import os
import struct
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from tiered_kv.config.secrets import KEY_BYTES
from tiered_kv.errors import MissingExtraError
from tiered_kv.reasons import RecordStatus

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_ID_MAX: Final = (1 << 32) - 1

SESSION_MESSAGES_MAX: Final = 1 << 24
"""Messages under one session key. TLS 1.3 changes its key after 2**24.5 records of 16 KiB (2**34.5 AES blocks), for a
margin of 2**-57 (RFC 8446, 5.5). The margin grows with the square of the AES blocks. Here 2**24 messages of 1 MiB are
2**40 AES blocks, with a margin of 2**-46."""
SESSIONS_CACHED_MAX: Final = 1024  # session keys that a reader keeps; to derive one takes microseconds

_HEAD = struct.Struct("<I8s16s12s")  # key id, key check, salt, nonce
_CONTEXT = struct.Struct("<HQ")  # codec, bytes of the block
_SALT_BYTES = 16
_NONCE_BYTES = 12
_CHECK_BYTES = 8
_TAG_BYTES = 16
ENVELOPE_BYTES: Final = _HEAD.size + _TAG_BYTES
"""Bytes by which an envelope is longer than its content."""

# Each kind of derivation from a key has a text of its own.
_SESSION_INFO = b"tiered-kv aes-256-gcm session 1"
_CHECK_INFO = b"tiered-kv aes-256-gcm key check 1"

_forks = 0  # forks between the process that imported this module and this process


def _note_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_note_fork)


class _Session:
    """A session key and its next nonce, which threads share."""

    def __init__(self, key_id: int, check: bytes, salt: bytes, aead: AESGCM) -> None:
        self.fields = (key_id, check, salt)
        self.aead = aead
        self.forks = _forks
        self._lock = threading.Lock()
        self._next = 0

    def nonce(self) -> bytes | None:
        """Return an unused nonce; None if all are used."""
        with self._lock:
            number = self._next
            if number >= SESSION_MESSAGES_MAX:
                return None
            self._next = number + 1
        return number.to_bytes(_NONCE_BYTES, "big")


class Cipher:
    """Encrypts with one key and decrypts with several. Any thread may call, in forked children too.

    `keys` have 32 bytes and ids from 1 to `KEY_ID_MAX`. `write_key` encrypts; None if blocks are not encrypted.
    Raises `MissingExtraError`: the library is not installed, or too old.
    """

    def __init__(self, keys: Mapping[int, bytes], write_key: int | None) -> None:
        assert all(0 < key_id <= KEY_ID_MAX and len(key) == KEY_BYTES for key_id, key in keys.items())
        try:
            import cryptography
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        except ImportError as error:
            raise MissingExtraError("codec 'aes-256-gcm'", "crypto") from error
        if not hasattr(AESGCM, "encrypt_into"):  # versions before 47 lack the method
            found = f"cryptography {cryptography.__version__}"
            raise MissingExtraError("codec 'aes-256-gcm'", "crypto", found=found)

        def derive(key: bytes, salt: bytes | None, info: bytes, size_bytes: int) -> bytes:
            return HKDF(SHA256(), size_bytes, salt, info).derive(key)

        self._aead_of, self._invalid_tag, self._derive = AESGCM, InvalidTag, derive
        self._keys = dict(keys)
        self._checks = {key_id: self._derive(key, None, _CHECK_INFO, _CHECK_BYTES) for key_id, key in keys.items()}
        self._session_of = functools.lru_cache(SESSIONS_CACHED_MAX)(self._session_key)
        self.write_key = write_key or 0
        self._session = self._new_session() if write_key is not None else None

    def encrypt_into(
        self, content: memoryview, target: memoryview, codec_id: int, raw_bytes: int, binding: bytes
    ) -> None:
        """Write the envelope of `content` into `target`, which is `ENVELOPE_BYTES` longer."""
        session, nonce = self._take_nonce()
        head = _HEAD.pack(*session.fields, nonce)
        target[: _HEAD.size] = head
        associated = head + _CONTEXT.pack(codec_id, raw_bytes) + binding
        session.aead.encrypt_into(nonce, content, associated, target[_HEAD.size :])

    def decrypt_into(
        self, payload: memoryview, target: memoryview, codec_id: int, raw_bytes: int, binding: bytes
    ) -> RecordStatus:
        """Decrypt an envelope into `target`, which is `ENVELOPE_BYTES` shorter. An error leaves undefined bytes."""
        head = bytes(payload[: _HEAD.size])
        key_id, check, salt, nonce = _HEAD.unpack(head)
        if self._checks.get(key_id) != check:
            return RecordStatus.UNKNOWN_KEY
        associated = head + _CONTEXT.pack(codec_id, raw_bytes) + binding
        try:
            self._session_of(key_id, salt).decrypt_into(nonce, payload[_HEAD.size :], associated, target)
        except self._invalid_tag:
            return RecordStatus.BAD_TAG
        return RecordStatus.OK

    def has_key_of(self, payload: memoryview) -> bool:
        key_id, check, _, _ = _HEAD.unpack(payload[: _HEAD.size])
        return bool(self._checks.get(key_id) == check)

    def _take_nonce(self) -> tuple[_Session, bytes]:
        session = self._session
        assert session is not None, "there is a key to write with"
        # In a forked child the session's lock may be held by a thread that does not exist there.
        if session.forks == _forks and (nonce := session.nonce()) is not None:
            return session, nonce
        # If several threads do this at once, each uses a session of its own. The last session is kept.
        session = self._session = self._new_session()
        nonce = session.nonce()
        assert nonce is not None, "the session is new"
        return session, nonce

    def _new_session(self) -> _Session:
        salt = os.urandom(_SALT_BYTES)
        return _Session(self.write_key, self._checks[self.write_key], salt, self._session_key(self.write_key, salt))

    def _session_key(self, key_id: int, salt: bytes) -> AESGCM:
        return self._aead_of(self._derive(self._keys[key_id], salt, _SESSION_INFO, KEY_BYTES))


def key_id_of(payload: memoryview) -> int:
    """Return the key id in an envelope; 0 if the payload is too short for one."""
    return int.from_bytes(payload[:4], "little") if len(payload) >= ENVELOPE_BYTES else 0
