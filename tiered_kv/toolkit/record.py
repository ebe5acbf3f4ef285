"""The block record: the header before a block in a secondary tier's storage, and its verification.

The tiers memory, fs, redis and s3 call it, on the thread that stores or loads. Data is hostile until its checksum has
been verified: bad bytes raise no exception, and no length in them is used to allocate memory.
`docs/reference/formats.md` describes the record byte by byte.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import xxhash

from tiered_kv.base import OffloadKey
from tiered_kv.reasons import RecordStatus as RecordStatus  # authors import it from here
from tiered_kv.system.step import give_way
from tiered_kv.tiering.base import TierSpec
from tiered_kv.toolkit.codecs import (
    ENCRYPTED_IDS,
    OVERHEAD_BYTES_MAX,
    PLAIN,
    RAW_ID,
    ZSTD_ID,
    CodecSet,
    CodecSettings,
    Draft,
    binding_of,
    payload_bytes_range,
)
from tiered_kv.toolkit.encryption import key_id_of

MAGIC = b"\x89TKVREC\n"  # detects programs that strip the eighth bit or translate line ends
FORMAT_VERSION = 1
HEADER_BYTES = 128
DIGEST_BYTES = 16

# magic, version, codec, flags, key id, reserved, raw bytes, payload bytes, namespace, key, checksum, reserved
_LAYOUT = struct.Struct("<8sHHIIIQQ16s16s16s40s")
_CHECKSUM_OFFSET = 72
_NO_CHECKSUM = bytes(DIGEST_BYTES)
_RESERVED = bytes(40)
assert _LAYOUT.size == HEADER_BYTES

_PLAIN_IDS = (RAW_ID, ZSTD_ID)

Bytes = bytes | bytearray | memoryview
Allocate = Callable[[int], memoryview]  # returns a buffer of that many bytes, valid until the record has been written
Name = TypeVar("Name", bound=Hashable)
UNREADABLE_MAX: Final = 65_536
"""Names that `Unreadable` keeps, the newest ones; about 19 MB if each has 90 characters (by tracemalloc)."""
UNREADABLE_S: Final = 300.0  # how long a name is kept; a block that stays unreadable fails one load in this time


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """The fields of a header, not verified. The last three have 16 bytes each."""

    codec_id: int
    key_id: int  # the key that encrypted the payload; 0 for none
    raw_bytes: int  # the block's size
    payload_bytes: int
    namespace_digest: bytes  # see `tiered_kv.config.namespace`
    key_digest: bytes  # see `digest_of`
    checksum: bytes  # XXH3-128 over the header, with this field zero, and the payload


def digest_of(key: OffloadKey) -> bytes:
    """Return the digest of `key` in a header: XXH3-128, seed 0, in canonical byte order."""
    return xxhash.xxh3_128_digest(key)


def record_bytes_max(block_bytes: int) -> int:
    """Return the greatest length of a record, in any codec."""
    return HEADER_BYTES + block_bytes + OVERHEAD_BYTES_MAX


def encode_record(
    key: OffloadKey,
    block: memoryview,
    namespace_digest: bytes,
    codecs: CodecSet = PLAIN,
    room: Allocate = lambda size_bytes: memoryview(bytearray(size_bytes)),
) -> tuple[bytes, memoryview]:
    """Return a block's header and payload, to be written one after the other.

    A payload that is neither compressed nor encrypted is `block` itself, not a copy. A block that would not get shorter
    is not compressed.

    `block` is one-dimensional; `room` allocates the buffer of an encrypted payload. With `WholeRecords` it is a record.
    """
    give_way()
    draft = codecs.draft(block)
    payload = draft.content
    if isinstance(codecs, WholeRecords):
        return bytes(block[:HEADER_BYTES]), payload
    if draft.cipher is not None:
        payload = room(draft.payload_bytes)
        draft.write_into(payload, binding_of(namespace_digest, key))
    return _header(digest_of(key), draft.codec_id, draft.key_id, len(block), payload, namespace_digest), payload


class WholeRecords(CodecSet):
    """In place of a tier's codecs while the tier gets whole records (`TierSpec.holds_records`), and not blocks.

    Their checksums have been verified: see `check_record`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.writes_raw = False
        self.overhead_bytes = OVERHEAD_BYTES_MAX

    def draft(self, block: memoryview) -> Draft:
        header = read_header(block[:HEADER_BYTES])
        assert isinstance(header, RecordHeader), f"no record: {header}"
        return Draft(header.codec_id, header.raw_bytes, block[HEADER_BYTES : HEADER_BYTES + header.payload_bytes])


def codecs_of(spec: TierSpec, settings: CodecSettings) -> CodecSet:
    """Return the codecs of a tier; for a tier that gets whole records, the ones that leave these as they are.

    Raises:
        ConfigError: A key file cannot be used.
        MissingExtraError: A library is not installed.
    """
    return WholeRecords() if spec.holds_records else settings.open_codecs()


def write_header(
    row: memoryview, key: OffloadKey, codec_id: int, raw_bytes: int, payload_bytes: int, namespace_digest: bytes
) -> None:
    """Write the header of a payload that a storage keeps without one. It begins `HEADER_BYTES` behind that of `row`."""
    payload = row[HEADER_BYTES : HEADER_BYTES + payload_bytes]
    key_id = key_id_of(payload) if codec_id in ENCRYPTED_IDS else 0
    row[:HEADER_BYTES] = _header(digest_of(key), codec_id, key_id, raw_bytes, payload, namespace_digest)


def check_record(row: memoryview, record_bytes: int, key: OffloadKey, namespace_digest: bytes) -> RecordStatus:
    """Return OK if `row` begins with a sound record of this block, `record_bytes` long, whoever can decode it.

    `row` has the greatest length of a record, `record_bytes_max` of the block's size. Like `verify_record`, it does not
    check the tag of an encrypted payload.
    """
    record, block_bytes = row[:record_bytes], len(row) - record_bytes_max(0)
    found = _checked_header(record, record[HEADER_BYTES:], digest_of(key), block_bytes, namespace_digest)
    return found if isinstance(found, RecordStatus) else RecordStatus.OK


def read_header(header: Bytes) -> RecordHeader | RecordStatus:
    """Return the fields in the first 128 bytes of a record, or why they are not a header of this version."""
    if len(header) < HEADER_BYTES:
        return RecordStatus.TRUNCATED
    magic, version, codec_id, flags, key_id, reserved, *rest, reserved_tail = _LAYOUT.unpack_from(header)
    raw_bytes, payload_bytes, *_ = rest
    if magic != MAGIC:
        return RecordStatus.BAD_MAGIC
    if version != FORMAT_VERSION:
        return RecordStatus.BAD_VERSION
    if flags or reserved or reserved_tail != _RESERVED:
        return RecordStatus.BAD_HEADER
    if key_id if codec_id in _PLAIN_IDS else codec_id in ENCRYPTED_IDS and not key_id:
        return RecordStatus.BAD_HEADER
    if payload_bytes not in payload_bytes_range(codec_id, raw_bytes):
        return RecordStatus.BAD_LENGTH
    return RecordHeader(codec_id, key_id, *rest)


def decode_record(
    header: Bytes, payload: Bytes, key: OffloadKey, block: memoryview, namespace_digest: bytes, codecs: CodecSet = PLAIN
) -> RecordStatus:
    """Verify a record and write its block into `block`. Any status but OK is a miss, and leaves undefined bytes there.

    Args:
        header: The first 128 bytes of the record.
        payload: The bytes after the header, one-dimensional, to the end of the record. If the payload is as long as the
            block and has been read into `block`, pass `block` itself: then nothing is copied.
        block: One-dimensional, writable, of the block's size.
    """
    give_way()
    key_digest = digest_of(key)
    if len(payload) == len(block) and codecs.accepts_plain:
        if payload is not block:
            block[:] = payload
        payload = block  # verify the copied bytes, so that they cannot change between the check and the copy
        if header == _header(key_digest, RAW_ID, 0, len(block), block, namespace_digest):
            return RecordStatus.OK
    parsed = _checked_header(header, payload, key_digest, len(block), namespace_digest)
    if isinstance(parsed, RecordStatus):
        return parsed
    if parsed.codec_id == RAW_ID:
        return RecordStatus.UNENCRYPTED  # an accepted one has been returned above
    return codecs.decode(parsed.codec_id, memoryview(payload), block, binding_of(namespace_digest, key))


def verify_record(
    record: memoryview,
    namespace_digest: bytes,
    block: memoryview | None,
    codecs: CodecSet = PLAIN,
    key_digest: bytes | None = None,
) -> RecordStatus:
    """Check a whole record without knowledge of its key. So the tag of an encrypted payload is not checked.

    `record` is the header and the payload, one-dimensional. `block` is a buffer to decompress into; None if the size of
    blocks is unknown. `key_digest` is the digest of the block's key, if the record's name contains it.
    """
    give_way()
    payload = record[HEADER_BYTES:]
    parsed = _checked_header(record, payload, key_digest, None if block is None else len(block), namespace_digest)
    if isinstance(parsed, RecordStatus):
        return parsed
    if parsed.codec_id in ENCRYPTED_IDS:
        return codecs.refusal(parsed.codec_id, payload)
    if block is None or parsed.codec_id == RAW_ID:
        return codecs.refusal(parsed.codec_id)
    return codecs.decode(parsed.codec_id, payload, block, b"")


def _checked_header(
    header: Bytes, payload: Bytes, key_digest: bytes | None, block_bytes: int | None, namespace_digest: bytes
) -> RecordHeader | RecordStatus:
    """Return the header of a sound record of this block, else the status of its fault. None accepts any key or any
    size."""
    parsed = read_header(header)
    if isinstance(parsed, RecordStatus):
        return parsed
    if parsed.namespace_digest != namespace_digest:
        return RecordStatus.WRONG_NAMESPACE
    if key_digest not in (None, parsed.key_digest):
        return RecordStatus.WRONG_KEY
    if block_bytes not in (None, parsed.raw_bytes):
        return RecordStatus.BAD_LENGTH
    if len(payload) != parsed.payload_bytes:
        return RecordStatus.TRUNCATED if len(payload) < parsed.payload_bytes else RecordStatus.BAD_LENGTH
    codec_id, key_id = parsed.codec_id, parsed.key_id
    written = _header(parsed.key_digest, codec_id, key_id, parsed.raw_bytes, payload, namespace_digest)
    if written[_CHECKSUM_OFFSET : _CHECKSUM_OFFSET + DIGEST_BYTES] != parsed.checksum:
        return RecordStatus.BAD_CHECKSUM
    if codec_id in ENCRYPTED_IDS and key_id_of(memoryview(payload)) != key_id:
        return RecordStatus.BAD_HEADER
    return parsed


def _header(
    key_digest: bytes, codec_id: int, key_id: int, raw_bytes: int, payload: Bytes, namespace_digest: bytes
) -> bytes:
    fields = (codec_id, 0, key_id, 0, raw_bytes, len(payload), namespace_digest, key_digest)
    unsigned = _LAYOUT.pack(MAGIC, FORMAT_VERSION, *fields, _NO_CHECKSUM, _RESERVED)
    state = xxhash.xxh3_128(unsigned)
    state.update(payload)
    return b"".join((unsigned[:_CHECKSUM_OFFSET], state.digest(), unsigned[_CHECKSUM_OFFSET + DIGEST_BYTES :]))


class Unreadable(Generic[Name]):
    """The names of records in shared storage that this process can neither read nor delete. Any thread may call.

    A record may need a codec or a key that this process lacks. Other processes may be able to read it, so a failed load
    does not delete it. A damaged record is deleted, but the storage may refuse that. If this process took such a record
    for the block, each load of it would fail, and no store would replace it. So a tier with shared storage keeps the
    names of such records:

    - A load that finds an unreadable record, or cannot delete a damaged one, notes its name.
    - A lookup of a noted name is a miss.
    - A store replaces the record and forgets the name. A load that succeeds forgets it too.

    A name stands for one place in the storage in one epoch. A name that is dropped early costs one more failed load.
    `docs/how-to/encryption.md` describes a change of keys.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # guards the names; never held during I/O
        self._noted_s: OrderedDict[Name, float] = OrderedDict()  # oldest first

    def note(self, names: Iterable[Name]) -> None:
        with self._lock:
            for name in names:
                self._noted_s[name] = self._clock()
                self._noted_s.move_to_end(name)
                if len(self._noted_s) > UNREADABLE_MAX:
                    self._noted_s.popitem(last=False)

    def forget(self, names: Iterable[Name]) -> None:
        """Drop names of records that can be read now. If no name is kept, `names` is not iterated."""
        if self._noted_s:
            with self._lock:
                for name in names:
                    self._noted_s.pop(name, None)

    def __contains__(self, name: Name) -> bool:
        noted_s = self._noted_s.get(name)
        return noted_s is not None and self._clock() < noted_s + UNREADABLE_S
