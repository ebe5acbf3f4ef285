"""Fuzzing of the small files of a shared directory: the ledger, the epoch's mark, the markers."""

from __future__ import annotations

import tempfile
import time
from functools import cache
from pathlib import Path

from tests.support.fuzzing import Target
from tiered_kv.errors import TierError
from tiered_kv.toolkit.claimed import Identity
from tiered_kv.toolkit.epoch import Epoch
from tiered_kv_fs.directory import Directory
from tiered_kv_fs.epoch import EpochFile
from tiered_kv_fs.layout import EPOCH_NAME, LEDGER_NAME, MARKER_NAME, NAMESPACE_NAME
from tiered_kv_fs.ledger import Holder, Ledger

NAMESPACE = bytes(range(16))
_KINDS = (LEDGER_NAME, EPOCH_NAME, MARKER_NAME, NAMESPACE_NAME)


def make() -> Target:
    """Return the target: a byte for the file, then the file."""
    made = _made()
    seeds = tuple(bytes([number]) + made[kind] for number, kind in enumerate(_KINDS))
    words = (b"null", b"-1", b"1e999", b"{}", b"[]", b'"x"', b"[" * 2000, NAMESPACE.hex().encode(), b"NaN", b"2")
    return Target("fuzz/segment", seeds, _run, words)


@cache
def _made() -> dict[str, bytes]:
    """Return each kind of file from a directory in use."""
    with tempfile.TemporaryDirectory(prefix="tiered-kv-fuzz-") as name:
        directory = _open(Path(name) / "kv")
        with Ledger(directory.path).locked() as state:
            state.total_bytes = 1 << 20
            state.holders["0123456789abcdef"] = Holder(directory.namespace, "f" * 16, 4096, state.now_s)
        return {kind: _path_of(Path(directory.path), kind).read_bytes() for kind in _KINDS}


def _run(data: bytes) -> None:
    kind, content = (_KINDS[data[0] % len(_KINDS)], data[1:]) if data else (LEDGER_NAME, b"")
    with tempfile.TemporaryDirectory(prefix="tiered-kv-fuzz-") as name:
        path = Path(name) / "kv"
        for directory in (path, path / NAMESPACE.hex()):
            directory.mkdir(mode=0o700)
        for each, text in {**_made(), kind: content}.items():
            file = _path_of(path, each)
            file.write_bytes(text)
            file.chmod(0o600)
        changed = _path_of(path, kind)
        before = changed.read_bytes()
        try:
            opened = _open(path)
        except TierError as error:
            message = str(error)
        else:
            _check_ledger(opened)
            return
        assert kind in (MARKER_NAME, NAMESPACE_NAME, EPOCH_NAME), f"{kind}: {message}"
        assert changed.read_bytes() == before, f"{kind} is changed by a refusal"
        assert ("format version" if kind == EPOCH_NAME else str(path)) in message, f"the error does not help: {message}"


def _open(path: Path) -> Directory:
    directory = Directory(str(path), Identity(NAMESPACE, {"model": "fuzz"}, 512))
    value = Epoch(EpochFile(directory)).value(time.monotonic() + 60.0)
    assert len(value) == 16
    assert set(value) <= set("0123456789abcdef")
    return directory


def _check_ledger(directory: Directory) -> None:
    with Ledger(directory.path).locked() as state:
        numbers = (state.total_bytes, state.pending_bytes, *(holder.granted_bytes for holder in state.holders.values()))
        for number in numbers:
            assert number is None or type(number) is int, f"the ledger has {number!r} for a number"
            assert number is None or number >= 0, f"the ledger has {number}"
        assert isinstance(state.surveyed_s, int | float)
        assert all(isinstance(owner, str) for owner in state.holders)


def _path_of(path: Path, kind: str) -> Path:
    return path / NAMESPACE.hex() / kind if kind in (EPOCH_NAME, NAMESPACE_NAME) else path / kind
