"""The Zstandard library: Python's own `compression.zstd`, from 3.14 on, or else the package zstandard.

The codec `zstd` calls it. A compressor and a decompressor belong to one thread. Both libraries make the same bytes,
if they were built with the same libzstd, and each reads every frame of the other.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, Final, Protocol, TypeAlias

from tiered_kv.errors import MissingExtraError

_LEVEL: Final = 1
"""Higher levels gain nothing on KV blocks, whose mantissas are noise, and take up to three times as long."""
_PARAMETERS: Final = {
    "window_log": 19,
    "chain_log": 13,
    "search_log": 1,
    "min_match": 7,
    "target_length": 0,
    "strategy": 1,  # ZSTD_fast
}
"""Those of level 1 for a content of unknown size (`ZSTD_getCParams` of libzstd 1.5.7), but for `hash_log`."""

Buffer: TypeAlias = Any
"""A memoryview or an array of bytes."""
Compress: TypeAlias = Callable[[Buffer], bytes]
Decompress: TypeAlias = Callable[[memoryview, int], bytes | None]
"""Returns the content of a frame; None unless it is one frame that states this content size, whole, and no more."""


class ZstdLibrary(Protocol):
    def compressor(self, hash_log: int | None = None) -> Compress:
        """Return what makes a frame of a plane, by level 1, or with a table of 2**hash_log places."""

    def decompressor(self, window_bytes: int) -> Decompress:
        """Return what reads a frame whose window is at most so large. No other exception than MemoryError."""


class StandardZstd:
    """Python's own."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def compressor(self, hash_log: int | None = None) -> Compress:
        names = self._module.CompressionParameter
        options = {names.compression_level: _LEVEL}
        if hash_log is not None:
            options |= {names.hash_log: hash_log, **{names[name]: value for name, value in _PARAMETERS.items()}}
        compressor = self._module.ZstdCompressor(options=options)
        compress, mode = compressor.compress, compressor.FLUSH_FRAME
        return lambda plane: compress(plane, mode)

    def decompressor(self, window_bytes: int) -> Decompress:
        module = self._module
        options = {module.DecompressionParameter.window_log_max: (window_bytes - 1).bit_length()}

        def decompress(frame: memoryview, size: int) -> bytes | None:
            try:
                # The library allocates the content size that a frame states, so that is checked first.
                if module.get_frame_info(frame).decompressed_size != size:
                    return None
                one = module.ZstdDecompressor(options=options)  # for one frame only
                plane: bytes = one.decompress(frame, size)
                is_whole = one.eof or (not one.needs_input and one.decompress(b"", 1) == b"" and one.eof)
            except (module.ZstdError, EOFError):
                return None
            return plane if is_whole and not one.unused_data else None

        return decompress


class PackagedZstd:
    """The package zstandard."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def compressor(self, hash_log: int | None = None) -> Compress:
        module = self._module
        if hash_log is None:
            compress: Compress = module.ZstdCompressor(level=_LEVEL).compress
        else:
            parameters = module.ZstdCompressionParameters(hash_log=hash_log, **_PARAMETERS)
            compress = module.ZstdCompressor(compression_params=parameters).compress
        return compress

    def decompressor(self, window_bytes: int) -> Decompress:
        module, one = self._module, self._module.ZstdDecompressor(max_window_size=window_bytes)

        def decompress(frame: memoryview, size: int) -> bytes | None:
            try:
                # The library allocates the content size that a frame states, so that is checked first.
                if module.frame_content_size(frame) != size:
                    return None
                plane: bytes = one.decompress(frame, allow_extra_data=False)
            except module.ZstdError:
                return None
            return plane

        return decompress


def zstd_library() -> ZstdLibrary:
    """Return the library that there is.

    Raises:
        MissingExtraError: There is none.
    """
    try:
        return StandardZstd(import_module("compression.zstd"))
    except ImportError:  # before 3.14, or a Python that was built without it
        pass
    try:
        return PackagedZstd(import_module("zstandard"))
    except ImportError as error:
        raise MissingExtraError("codec 'zstd'", "zstd") from error
