"""The codecs of one tier: the one that it writes with, and those that it reads."""

from __future__ import annotations

from tiered_kv.errors import MissingExtraError
from tiered_kv.toolkit.codecs import ENCRYPTED_IDS, RAW, Codec, Draft, codec_by_id, codec_by_name
from tiered_kv.toolkit.encryption import AesGcmCodec, Cipher, ZstdAesGcmCodec
from tiered_kv.toolkit.status import RecordStatus


class CodecSet:
    """The codecs of a tier. Any thread may call, several at once.

    Every installed codec is read, whatever is written, so that the setting can be changed at any time. But where
    blocks are encrypted, plain ones are refused: an attacker who can write into the storage could plant them.

    Args:
        writer: How blocks are written.
        cipher: The keys, if there are any.
        accept_plain: Whether to read plain blocks even if `writer` encrypts.
    """

    def __init__(self, writer: Codec, cipher: Cipher | None = None, *, accept_plain: bool = False) -> None:
        self.writer = writer
        self.accepts_plain = accept_plain or writer.codec_id not in ENCRYPTED_IDS
        self._encrypted: dict[int, Codec | RecordStatus] = dict.fromkeys(ENCRYPTED_IDS, RecordStatus.UNKNOWN_KEY)
        if cipher is not None:
            self._encrypted |= encrypting_codecs(cipher)

    @property
    def writes_raw(self) -> bool:
        """Whether blocks are stored unchanged."""
        return self.writer is RAW

    @property
    def overhead_bytes(self) -> int:
        """By how many bytes a written payload may exceed its block."""
        return self.writer.overhead_bytes

    def draft(self, block: memoryview) -> Draft:
        """Return how a block will be stored."""
        return self.writer.draft(block)

    def reader(self, codec_id: int) -> Codec | RecordStatus:
        """Return the codec to read a sound record with, or why it is not read."""
        if codec_id in ENCRYPTED_IDS:
            return self._encrypted[codec_id]
        codec = codec_by_id(codec_id)
        if codec is None:
            return RecordStatus.UNKNOWN_CODEC
        return codec if self.accepts_plain else RecordStatus.UNENCRYPTED

    def decode(self, codec_id: int, payload: memoryview, block: memoryview, binding: bytes) -> RecordStatus:
        """Decode a payload into `block`; return why not, and then `block` is undefined.

        Args:
            codec_id: The codec that the record names.
            payload: The payload. The caller has verified its checksum, unless it is encrypted: then the tag
                authenticates it, and the checksum may be verified afterwards.
            block: The block's place.
            binding: As in `Draft.write_into`.
        """
        codec = self.reader(codec_id)
        return codec if isinstance(codec, RecordStatus) else codec.decode(payload, block, binding)


def encrypting_codecs(cipher: Cipher) -> dict[int, Codec | RecordStatus]:
    """Return the codecs that encrypt, by number; a status in place of one whose library is not installed."""
    codecs: dict[int, Codec | RecordStatus] = {AesGcmCodec.codec_id: AesGcmCodec(cipher)}
    try:
        codecs[ZstdAesGcmCodec.codec_id] = ZstdAesGcmCodec(cipher)
    except MissingExtraError:
        codecs[ZstdAesGcmCodec.codec_id] = RecordStatus.UNKNOWN_CODEC
    return codecs


def plain_codecs(name: str = "raw") -> CodecSet:
    """Return the codecs of a tier that writes with the codec called `name` and has no keys.

    Raises:
        ConfigError: There is no such codec, or it needs keys.
        MissingExtraError: The library that it needs is not installed.
    """
    return CodecSet(codec_by_name(name))


PLAIN = CodecSet(RAW)
"""Codecs that write blocks unchanged."""
