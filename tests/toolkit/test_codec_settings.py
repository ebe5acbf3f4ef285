"""Codecs are lossless and bounded on hostile bytes; their settings work, errors say why, and no key is shown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.stacks import ReplaceModule, stack_of
from tests.support.zstd import MODULES
from tiered_kv.config.entries import tier_settings
from tiered_kv.config.hooks import tier_plugins
from tiered_kv.config.stack_config import load_config, stack_schema
from tiered_kv.errors import ConfigError, MissingExtraError
from tiered_kv.reasons import RecordStatus
from tiered_kv.toolkit.codecs import (
    AES_ID,
    PLAIN,
    RAW_ID,
    ZSTD_AES_ID,
    ZSTD_ID,
    CodecSet,
    CodecSettings,
    binding_of,
    payload_bytes_range,
)
from tiered_kv.toolkit.encryption import Cipher

HEX = "a1" * 32
OTHER = bytes(range(32)).hex()
BINDING = binding_of(bytes(16), b"key")


def settings_of(codec: str = "aes-256-gcm", /, **encryption: object) -> CodecSettings:
    entry = {"type": "memory", "capacity": "1MiB", "codec": codec, **({"encryption": encryption} if encryption else {})}
    settings = tier_settings(entry)
    assert isinstance(settings, CodecSettings)
    return settings


def payload_of(codecs: CodecSet) -> bytes:
    draft = codecs.draft(memoryview(b"block"))
    target = bytearray(draft.payload_bytes)
    draft.write_into(memoryview(target), BINDING)
    return bytes(target)


def reads(codecs: CodecSet, payload: bytes, codec_id: int = AES_ID) -> RecordStatus:
    return codecs.decode(codec_id, memoryview(payload), memoryview(bytearray(5)), BINDING)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "kv.key"
    path.touch(mode=0o600)
    path.write_text(f"{OTHER}\n")
    return path


def test_the_schema_has_them() -> None:
    definitions = stack_schema()["$defs"]
    for name, tier_type in tier_plugins().tier_types().items():
        if not issubclass(tier_type.settings, CodecSettings):  # such as `host`, which keeps no records
            continue
        properties = definitions[f"tier-{name}"]["properties"]
        assert properties["codec"]["enum"] == ["raw", "zstd", "aes-256-gcm", "zstd+aes-256-gcm"]
        assert set(definitions[f"tier-{name}-EncryptionSettings"]["properties"]) == {
            "keys",
            "key_files",
            "write_key",
            "accept_plain",
        }


def test_keys_come_from_variables_and_files(key_file: Path) -> None:
    entry = {
        "type": "memory",
        "capacity": "1MiB",
        "codec": "aes-256-gcm",
        "encryption": {"keys": {"1": "${KV_KEY_1}"}, "key_files": {2: str(key_file)}, "write_key": 2},
    }
    config = load_config(stack_of(entry), environ={"KV_KEY_1": HEX})
    tier = config.secondary[0]
    assert isinstance(tier, CodecSettings)
    codecs = tier.open_codecs()
    assert codecs.name == "aes-256-gcm"
    assert codecs.draft(memoryview(b"block")).key_id == 2
    payload = payload_of(codecs)
    assert reads(settings_of(keys={2: OTHER}).open_codecs(), payload) is RecordStatus.OK
    assert reads(settings_of("raw", keys={2: OTHER}).open_codecs(), payload) is RecordStatus.OK
    assert reads(settings_of(keys={2: HEX}).open_codecs(), payload) is RecordStatus.UNKNOWN_KEY
    assert reads(codecs, payload_of(settings_of(keys={1: HEX}).open_codecs())) is RecordStatus.OK
    shown = repr(config)
    assert HEX not in shown
    assert OTHER not in shown
    assert str(key_file) in shown, "a path is no secret"


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_encryption_is_turned_off_by_the_codec_and_its_keys_stay(codec: str) -> None:
    codecs = settings_of(codec, keys={1: HEX}).open_codecs()
    assert codecs.name == codec
    assert codecs.accepts_plain
    assert settings_of(keys={1: HEX}, accept_plain=True).open_codecs().accepts_plain
    assert not settings_of(keys={1: HEX}).open_codecs().accepts_plain
    assert reads(codecs, payload_of(settings_of(keys={1: HEX}).open_codecs())) is RecordStatus.OK


@pytest.mark.parametrize(
    ("encryption", "message"),
    [
        ({}, "codec 'aes-256-gcm' needs 'encryption'"),
        ({"accept_plain": True}, "expected a key in 'keys' or 'key_files'"),
        ({"keys": {}}, "expected a key"),
        ({"keys": {1: HEX, 2: HEX}}, "expected 'write_key'"),
        ({"keys": {1: HEX}, "write_key": 2}, "'write_key' names key 2"),
        ({"keys": {1: HEX}, "key_files": {1: "x"}}, "both give key 1"),
        ({"keys": {0: HEX}}, "greater than or equal to 1"),
        ({"keys": {1 << 32: HEX}}, "less than or equal to 4294967295"),
        ({"keys": {True: HEX}}, "expected a whole number"),
        ({"keys": {"first": HEX}}, "expected a whole number"),
        ({"keys": {HEX: 7}}, "expected a whole number"),
        ({"key_files": {HEX: "x"}}, "expected a whole number"),
        ({"keys": {1: HEX[:-1]}}, "key 1: expected a key: 32 bytes as 64 hexadecimal digits"),
        ({"keys": {1: [HEX]}}, "expected a text"),
        ({"keys": HEX}, "expected a mapping"),
        ({"keys": {1: HEX}, "write_key": 0}, "write_key"),
        ({"keys": dict.fromkeys(range(1, 66), HEX), "write_key": 1}, "at most 64"),
        ({"keys": {1: HEX}, "algorithm": "aes"}, "unknown key"),
        ({HEX: 1}, "unknown key"),
        ({"key_files": HEX}, "expected a mapping"),
        ({"key_files": [HEX]}, "expected a mapping"),
    ],
)
def test_the_error_for_wrong_settings_does_not_show_the_key(encryption: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        settings_of(**encryption)
    said = str(raised.value)
    assert message in said
    assert HEX[:-1] not in said
    assert OTHER[:-4] not in said


@pytest.mark.parametrize("encryption", [HEX, [HEX]])
def test_a_key_in_the_wrong_place_is_not_shown(encryption: object) -> None:
    with pytest.raises(ConfigError, match="expected a mapping") as raised:
        tier_settings({"type": "memory", "capacity": "1MiB", "encryption": encryption})
    assert HEX not in str(raised.value)


def test_a_key_file_that_is_refused_is_named_with_its_setting(key_file: Path) -> None:
    key_file.chmod(0o604)
    with pytest.raises(ConfigError, match=r"encryption\.key_files\.3: .* chmod 600") as raised:
        settings_of(key_files={3: str(key_file)}).open_codecs()
    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None


OK = RecordStatus.OK


@given(block=st.binary(max_size=300), repeats=st.integers(1, 40))
def test_every_codec_gives_back_the_bytes_it_was_given(block: bytes, repeats: int) -> None:
    block = block * repeats
    for name in ("raw", "zstd"):
        draft = CodecSet(name).draft(memoryview(block))
        assert draft.payload_bytes == len(draft.content) <= len(block)
        assert draft.payload_bytes in payload_bytes_range(draft.codec_id, len(block))
        out = bytearray(len(block))
        assert PLAIN.decode(draft.codec_id, draft.content, memoryview(out), b"") is OK
        assert out == block


def test_without_zstandard_zstd_names_the_extra_and_only_compressed_blocks_are_not_read(
    replace_module: ReplaceModule,
) -> None:
    for each in MODULES:
        replace_module(each)
    with pytest.raises(MissingExtraError, match=r"codec 'zstd' needs .*the extra 'zstd'"):
        CodecSet("zstd")
    assert CodecSet().refusal(ZSTD_ID) is RecordStatus.UNKNOWN_CODEC
    assert CodecSet().refusal(RAW_ID) is OK
    encrypting = CodecSet("aes-256-gcm", Cipher({1: bytes(32)}, 1))
    assert encrypting.refusal(AES_ID) is OK
    assert encrypting.refusal(ZSTD_AES_ID) is RecordStatus.UNKNOWN_CODEC


def test_the_toolkit_loads_neither_zstandard_nor_asyncio() -> None:
    script = (
        "import sys, tiered_kv.toolkit, tiered_kv.toolkit.record\n"
        "print([name for name in ('zstandard', 'asyncio') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
