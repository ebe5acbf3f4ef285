"""Frames of Zstandard by other writers and readers than the codec's own, by whichever library this Python has."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from tiered_kv.toolkit.zstd_library import PackagedZstd, StandardZstd, ZstdLibrary


def _found(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except ImportError:
        return None


_standard, _packaged = _found("compression.zstd"), _found("zstandard")
LIBRARIES: list[ZstdLibrary] = [
    *([StandardZstd(_standard)] if _standard else []),
    *([PackagedZstd(_packaged)] if _packaged else []),
]
"""All that are here: at least one, as the extra `test` has zstandard for Pythons before 3.14."""
MODULES = ("compression.zstd", "zstandard")
"""What is missing where there is no library."""


def frame_writer(level: int, *, has_checksum: bool = False) -> Callable[[bytes], bytes]:
    if _packaged:
        packaged: Callable[[bytes], bytes] = _packaged.ZstdCompressor(level=level, write_checksum=has_checksum).compress
        return packaged
    assert _standard
    names, module = _standard.CompressionParameter, _standard
    options = {names.compression_level: level, names.checksum_flag: int(has_checksum)}

    def write(plane: bytes) -> bytes:
        frame: bytes = module.compress(plane, options=options)
        return frame

    return write


def read_frame(frame: bytes) -> bytes:
    if _packaged:
        content: bytes = _packaged.ZstdDecompressor().decompress(frame)
        return content
    assert _standard
    content = _standard.decompress(frame)
    return content
