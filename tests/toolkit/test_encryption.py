"""Encryption: the bytes of the envelope, nonces that never come twice, and what is refused."""

from __future__ import annotations

import hashlib
import hmac
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tests.support.stacks import ReplaceModule
from tiered_kv.errors import MissingExtraError
from tiered_kv.reasons import RecordStatus
from tiered_kv.toolkit import encryption
from tiered_kv.toolkit.codecs import AES_ID, OVERHEAD_BYTES_MAX, ZSTD_AES_ID, CodecSet, binding_of
from tiered_kv.toolkit.encryption import Cipher

SECRET = bytes(range(32))
BLOCK = b"".join(value.to_bytes(2, "little") for value in range(256))
BINDING = binding_of(bytes(range(16)), b"a block's key")
HEAD_BYTES = 40


def sealed(cipher: Cipher, block: bytes = BLOCK) -> bytes:
    draft = CodecSet("aes-256-gcm", cipher).draft(memoryview(block))
    target = bytearray(draft.payload_bytes)
    draft.write_into(memoryview(target), BINDING)
    return bytes(target)


def opened(
    cipher: Cipher, payload: bytes, size: int = len(BLOCK), binding: bytes = BINDING, codec_id: int = AES_ID
) -> tuple[RecordStatus, bytes]:
    block = bytearray(size)
    return CodecSet("raw", cipher).decode(codec_id, memoryview(payload), memoryview(block), binding), bytes(block)


def hkdf(key: bytes, salt: bytes, info: bytes, size: int) -> bytes:
    """RFC 5869 with SHA-256, one block of output; an absent salt is 32 zeros."""
    extracted = hmac.digest(salt or bytes(32), key, hashlib.sha256)
    return hmac.digest(extracted, info + b"\x01", hashlib.sha256)[:size]


def test_the_envelope_is_what_the_format_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rebuilt from `formats.md` alone, and pinned: a mismatch means that stored blocks became unreadable."""
    salt = bytes(range(200, 216))
    monkeypatch.setattr("os.urandom", lambda size: salt[:size])
    cipher = Cipher({0x01020304: SECRET}, 0x01020304)
    sealed(cipher)  # takes nonce 0
    payload = sealed(cipher)
    nonce = bytes(11) + b"\x01"
    check = hkdf(SECRET, b"", b"tiered-kv aes-256-gcm key check 1", 8)
    head = bytes.fromhex("04030201") + check + salt + nonce
    session_key = hkdf(SECRET, salt, b"tiered-kv aes-256-gcm session 1", 32)
    associated = head + (2).to_bytes(2, "little") + len(BLOCK).to_bytes(8, "little") + BINDING
    assert payload == head + AESGCM(session_key).encrypt(nonce, BLOCK, associated)
    assert hashlib.sha256(payload).hexdigest() == "7fe018335f0b8cfb5597a2ab99ff24dd6478451009909906adea0bdad756598b"
    assert opened(cipher, payload) == (RecordStatus.OK, BLOCK)


def test_compression_comes_before_encryption_and_only_where_it_helps() -> None:
    cipher = Cipher({1: SECRET}, 1)
    codec = CodecSet("zstd+aes-256-gcm", cipher)
    short = codec.draft(memoryview(bytes(4096)))
    assert (short.codec_id, short.key_id) == (ZSTD_AES_ID, 1)
    assert short.payload_bytes < 200
    noise = hashlib.shake_256(b"noise").digest(4096)
    long = codec.draft(memoryview(noise))
    assert (long.codec_id, long.payload_bytes) == (AES_ID, 4096 + OVERHEAD_BYTES_MAX)
    assert long.content.obj is noise, "it is copied before it is encrypted"


def test_an_envelope_is_refused_in_any_other_place() -> None:
    cipher = Cipher({1: SECRET}, 1)
    payload = sealed(cipher)
    for binding in (b"", BINDING[:-1], BINDING + b"\0", bytes(16) + b"a block's key", BINDING[:16] + b"another key"):
        assert opened(cipher, payload, binding=binding)[0] is RecordStatus.BAD_TAG
    for codec_id, raw_bytes in ((ZSTD_AES_ID, len(BLOCK)), (AES_ID, len(BLOCK) + 1)):
        target = memoryview(bytearray(len(BLOCK)))
        assert cipher.decrypt_into(memoryview(payload), target, codec_id, raw_bytes, BINDING) is RecordStatus.BAD_TAG


def test_a_missing_key_and_a_change_have_different_statuses() -> None:
    payload = sealed(Cipher({1: SECRET}, 1))
    assert opened(Cipher({2: SECRET}, 2), payload)[0] is RecordStatus.UNKNOWN_KEY, "no key of this id"
    assert opened(Cipher({1: bytes(32)}, 1), payload)[0] is RecordStatus.UNKNOWN_KEY, "another key under this id"
    assert opened(Cipher({1: SECRET, 2: bytes(32)}, 2), payload) == (RecordStatus.OK, BLOCK)
    assert opened(Cipher({1: SECRET}, None), payload) == (RecordStatus.OK, BLOCK)
    damaged = payload[:-1] + bytes([payload[-1] ^ 1])
    assert opened(Cipher({1: SECRET}, 1), damaged)[0] is RecordStatus.BAD_TAG


# Nonces.


def nonces_of(payloads: list[bytes]) -> set[bytes]:
    """Return salt and nonce of each: what may not come twice under one key."""
    return {payload[12:HEAD_BYTES] for payload in payloads}


def test_threads_never_share_a_nonce_and_sessions_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encryption, "SESSION_MESSAGES_MAX", 50)
    cipher = Cipher({1: SECRET}, 1)
    written: list[list[bytes]] = [[] for _ in range(8)]

    def write(own: list[bytes]) -> None:
        own.extend(sealed(cipher, b"x") for _ in range(400))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, written))
    payloads = [payload for own in written for payload in own]
    assert len(nonces_of(payloads)) == len(payloads) == 3200
    by_salt: dict[bytes, int] = {}
    for payload in payloads:
        by_salt[payload[12:28]] = by_salt.get(payload[12:28], 0) + 1
    assert max(by_salt.values()) <= 50, "a session ends in time"
    assert all(opened(cipher, payload, 1) == (RecordStatus.OK, b"x") for payload in payloads)


def test_every_opening_has_a_session_of_its_own() -> None:
    payloads = [sealed(Cipher({1: SECRET}, 1)) for _ in range(300)]
    assert len({payload[12:28] for payload in payloads}) == 300
    reader = Cipher({1: SECRET}, None)
    assert all(opened(reader, payload) == (RecordStatus.OK, BLOCK) for payload in payloads)


FORKS = """
import os, sys, threading
sys.path.insert(0, sys.argv[1])
from test_encryption import SECRET, sealed
from tiered_kv.toolkit.encryption import Cipher

cipher = Cipher({1: SECRET}, 1)
print(sealed(cipher, b"x").hex(), flush=True)
locked, done = threading.Event(), threading.Event()

def hold():  # as a thread would that takes a nonce while another forks
    with cipher._session._lock:
        locked.set()
        done.wait()

thread = threading.Thread(target=hold, daemon=True)
thread.start()
locked.wait()
for _ in range(3):
    pid = os.fork()
    if not pid:
        print("\\n".join(sealed(cipher, b"x").hex() for _ in range(5)), flush=True)
        grandchild = os.fork()
        if not grandchild:
            print("\\n".join(sealed(cipher, b"x").hex() for _ in range(5)), flush=True)
            os._exit(0)
        os.waitpid(grandchild, 0)
        print("\\n".join(sealed(cipher, b"x").hex() for _ in range(5)), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)  # each in turn: what they print must not run together
done.set()
thread.join()
print("\\n".join(sealed(cipher, b"x").hex() for _ in range(5)), flush=True)
"""


def test_a_fork_never_shares_a_nonce_with_its_parent() -> None:
    # Python warns of forks beside threads, which is what this is about.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKS, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    payloads = [bytes.fromhex(line) for line in done.stdout.split()]
    assert len(payloads) == 1 + 3 * 15 + 5
    assert len(nonces_of(payloads)) == len(payloads)
    assert len({payload[12:28] for payload in payloads}) == 1 + 3 * 2, "one session a process"
    reader = Cipher({1: SECRET}, None)
    assert all(opened(reader, payload, 1) == (RecordStatus.OK, b"x") for payload in payloads)


def test_a_codec_set_that_encrypts_refuses_plain_blocks() -> None:
    cipher = Cipher({1: SECRET}, 1)
    encrypting = CodecSet("aes-256-gcm", cipher)
    assert not encrypting.accepts_plain
    for codec_id in (0, 1):
        assert encrypting.refusal(codec_id) is RecordStatus.UNENCRYPTED
    assert encrypting.refusal(65_000) is RecordStatus.UNKNOWN_CODEC
    for codecs in (CodecSet("aes-256-gcm", cipher, accept_plain=True), CodecSet("raw", cipher)):
        assert codecs.accepts_plain
        assert codecs.refusal(0) is codecs.refusal(AES_ID) is RecordStatus.OK
    assert CodecSet().refusal(AES_ID) is CodecSet().refusal(ZSTD_AES_ID) is RecordStatus.UNKNOWN_KEY


@pytest.mark.parametrize("found", [None, SimpleNamespace(AESGCM=object)], ids=["cryptography", "an older release"])
def test_without_its_library_encryption_names_the_extra(found: object, replace_module: ReplaceModule) -> None:
    replace_module("cryptography.hazmat.primitives.ciphers.aead", found)
    with pytest.raises(MissingExtraError, match=r"codec 'aes-256-gcm' needs .*: pip install 'cryptography>=") as caught:
        Cipher({1: SECRET}, 1)
    assert ("not installed" in str(caught.value)) is (found is None)
    assert (f"and cryptography {version('cryptography')} is installed" in str(caught.value)) is (found is not None)


def test_no_key_is_shown() -> None:
    cipher = Cipher({1: SECRET}, 1)
    for each in (cipher, CodecSet("aes-256-gcm", cipher)):
        assert SECRET.hex() not in repr(each)
        assert repr(SECRET) not in repr(each)
