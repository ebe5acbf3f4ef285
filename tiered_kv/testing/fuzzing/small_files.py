"""Fuzzing of the small files of a shared directory: the ledger, an owner's file, the epoch, the markers."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

import xxhash

from tiered_kv.errors import TierError
from tiered_kv.testing.fuzzing.target import Target
from tiered_kv_fs.layout import EPOCH_NAME, LEDGER_NAME, MARKER_NAME, NAMESPACE_NAME, OWNERS_NAME
from tiered_kv_fs.volume import Identity, Volume

NAMESPACE = bytes(range(16))
_OWNER_NAME = "0123456789abcdef"
_KINDS = (LEDGER_NAME, "sealed ledger", OWNERS_NAME, EPOCH_NAME, MARKER_NAME, NAMESPACE_NAME)


def small_files_target() -> Target:
    """Return the target: a byte that says which file it is, then the file."""
    made = _made()
    seeds = tuple(bytes([number]) + made[kind] for number, kind in enumerate(_KINDS))
    words = (b"null", b"-1", b"1e999", b"{}", b"[]", b'"x"', b"[" * 2000, NAMESPACE.hex().encode(), b"NaN", b"2")
    return Target("small-files", "fuzz/segment", seeds, _run, words)


@cache
def _made() -> dict[str, bytes]:
    """Return each kind of file as a directory in use has it."""
    with tempfile.TemporaryDirectory(prefix="tiered-kv-fuzz-") as name:
        path = Path(name) / "kv"
        volume = Volume(str(path), Identity(NAMESPACE, {"model": "fuzz"}, 512))
        try:
            found = {each: (path / each).read_bytes() for each in (LEDGER_NAME, MARKER_NAME)}
            found["sealed ledger"] = found[LEDGER_NAME]
            found |= {each: (Path(volume.namespace_path) / each).read_bytes() for each in (EPOCH_NAME, NAMESPACE_NAME)}
            (owner,) = (path / OWNERS_NAME).iterdir()
            found[OWNERS_NAME] = owner.read_bytes()
        finally:
            volume.close(gives_up=True)
    return found


def _run(data: bytes) -> None:
    kind, content = (_KINDS[data[0] % len(_KINDS)], data[1:]) if data else (LEDGER_NAME, b"")
    with tempfile.TemporaryDirectory(prefix="tiered-kv-fuzz-") as name:
        path = Path(name) / "kv"
        namespace = path / NAMESPACE.hex()
        for directory in (path, path / OWNERS_NAME, namespace):
            directory.mkdir(mode=0o700)
        made = _made()
        files = {
            path / LEDGER_NAME: made[LEDGER_NAME],
            path / MARKER_NAME: made[MARKER_NAME],
            path / OWNERS_NAME / _OWNER_NAME: made[OWNERS_NAME],
            namespace / EPOCH_NAME: made[EPOCH_NAME],
            namespace / NAMESPACE_NAME: made[NAMESPACE_NAME],
        }
        where = {OWNERS_NAME: path / OWNERS_NAME / _OWNER_NAME, "sealed ledger": path / LEDGER_NAME}
        changed = where.get(kind) or next(file for file in files if file.name == kind)
        files[changed] = _sealed(content) if kind == "sealed ledger" else content
        for file, text in files.items():
            file.write_bytes(text)
            file.chmod(0o600)
        _open(path, changed, kind)


def _sealed(content: bytes) -> bytes:
    """Return a ledger whose checksum is right."""
    head, _, body = content.partition(b"\n")
    return b"%s %s\n%s" % (head.split(b" ")[0], xxhash.xxh3_64_hexdigest(body).encode(), body)


def _open(path: Path, changed: Path, kind: str) -> None:
    before = changed.read_bytes()
    try:
        volume = Volume(str(path), Identity(NAMESPACE, {"model": "fuzz"}, 512))
    except TierError as error:
        said = str(error)
    else:
        _check_volume(volume)
        return
    assert kind in (MARKER_NAME, NAMESPACE_NAME), f"{kind}: {said}"
    assert changed.read_bytes() == before, f"{kind} is changed by a refusal"
    assert str(path) in said, f"the error names no directory: {said}"


def _check_volume(volume: Volume) -> None:
    """Look at what the files are taken for, and give the directory up."""
    try:
        assert len(volume.found_epoch) == 16
        assert set(volume.found_epoch) <= set("0123456789abcdef")
        with volume.ledger.locked() as state:
            for number in (state.total_bytes, state.granted_bytes, *state.grants.values()):
                assert number is None or type(number) is int, f"the ledger has {number!r} for a number"
                assert number is None or number >= 0, f"the ledger has {number}"
            assert isinstance(state.counted_at_s, int | float)
            assert all(isinstance(owner, str) for owner in state.grants)
            volume.reap(state)
        assert os.listdir(volume.owners_path) == [volume.owner.name], "an owner that has ended is still there"
    finally:
        volume.close(gives_up=True)
