"""The kernel that copies short runs between a device and page-locked CPU memory. It needs Triton.

`short_runs` measures it, and `CudaCopier` launches it, both on the engine's thread. It copies exactly the runs of its
plan.

A device's copy engine takes microseconds for each run, however short. A kernel reads and writes the CPU's memory
through its mapped addresses, and has many runs in flight. It has few programs, which share the pieces of all runs, so
that the model keeps most multiprocessors.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

PROGRAMS = 4
WARPS = 16
PIECE_BYTES = 4 << 10
PIECES = 8
"""Pieces that a program copies at once. All programs together copy 128 KiB at once, about as much as the bus moves in
its latency of 2 us.

These are the fewest programs that are fast. On an H200, four programs copied pages of 8 and 16 KiB at 52 and 51 of
55 GB/s. More programs only slowed a matrix product beside stores: it took 1.2 times as long with 4, 2.3 times with 16.
"""
_PIECES_MAX = 1 << 30


def is_compiled() -> bool:
    """Return whether the kernel is compiled for the device, and not run by Triton's interpreter (TRITON_INTERPRET)."""
    return isinstance(_copy_runs, triton.JITFunction)


def launch(
    runs: Any,  # a torch.Tensor
    max_bytes: int,
    word_bytes: int,
    *,
    programs: int = PROGRAMS,
    warps: int = WARPS,
    piece_bytes: int = PIECE_BYTES,
    pieces: int = PIECES,
) -> None:
    """Begin to copy runs, on the current stream of the current device.

    Args:
        runs: int64 of shape (3, runs), contiguous, on the device: sources, destinations, and lengths in bytes.
        max_bytes: The longest run's length, at least 1 and below 2 GiB.
        word_bytes: 1, 2, 4, 8 or 16; it divides all addresses and lengths.
        programs, warps: How many programs copy, and the warps of each.
        piece_bytes, pieces: A program copies `pieces` pieces of `piece_bytes` at once. Both are powers of two. A piece
            has fewer bytes if `word_bytes` is less than 4.

    Raises:
        ValueError: There are too many pieces.
    """
    items_per_piece, item_bytes = piece_bytes // 4, min(word_bytes, 4)
    pieces_per_run = -(-max_bytes // (items_per_piece * item_bytes))
    num_runs = runs.shape[1]
    num_pieces = num_runs * pieces_per_run
    if num_pieces > _PIECES_MAX:
        raise ValueError(f"{num_runs} runs of up to {max_bytes} bytes are too many")
    _copy_runs[(min(programs, -(-num_pieces // pieces)),)](
        runs,
        num_runs,
        pieces_per_run,
        WORD_BYTES=word_bytes,
        ITEM={1: tl.int8, 2: tl.int16, 4: tl.int32}[item_bytes],
        ITEM_BYTES=item_bytes,
        PIECE_ITEMS=items_per_piece,
        PIECES=pieces,
        num_warps=warps,
    )


# One version for all counts: a job must not wait for the compiler.
@triton.jit(do_not_specialize=["num_runs", "pieces_per_run"])  # type: ignore[untyped-decorator,unused-ignore]
def _copy_runs(  # type: ignore[no-untyped-def]  # Triton's compiler reads the types
    runs,
    num_runs,
    pieces_per_run,
    WORD_BYTES: tl.constexpr,
    ITEM: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    PIECE_ITEMS: tl.constexpr,
    PIECES: tl.constexpr,
):
    PIECE_BYTES: tl.constexpr = PIECE_ITEMS * ITEM_BYTES
    items = tl.arange(0, PIECE_ITEMS)[None, :]
    num_pieces = num_runs * pieces_per_run
    first = tl.program_id(0) * PIECES
    while first < num_pieces:
        piece = first + tl.arange(0, PIECES)
        run = runs + piece // pieces_per_run
        begin = (piece % pieces_per_run) * PIECE_BYTES
        length = tl.load(run + 2 * num_runs, mask=piece < num_pieces, other=0) - begin
        source = tl.load(run, mask=piece < num_pieces, other=0) + begin
        destination = tl.load(run + num_runs, mask=piece < num_pieces, other=0) + begin
        count = tl.minimum(length, PIECE_BYTES).to(tl.int32) // ITEM_BYTES
        # Without these hints the compiler makes an access for each item, instead of one for each word.
        is_inside = tl.max_constancy(items < count[:, None], (1, WORD_BYTES // ITEM_BYTES))
        reads = tl.multiple_of(source.to(tl.pointer_type(ITEM))[:, None] + items, (1, WORD_BYTES))
        writes = tl.multiple_of(destination.to(tl.pointer_type(ITEM))[:, None] + items, (1, WORD_BYTES))
        values = tl.load(reads, mask=is_inside, cache_modifier=".cg")
        tl.store(writes, values, mask=is_inside, cache_modifier=".cs")
        first += tl.num_programs(0) * PIECES
