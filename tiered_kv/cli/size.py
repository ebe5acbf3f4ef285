"""`tiered-kv size`: what a model's blocks take, what memory and disk a load needs, and a stack that fits.

`main` calls `run` on the main thread. The verb computes: it opens no tier, and reads the model's `config.json`, and
with `--prefill URL` the counters of a running engine. What must stay true: a stack that it prints can be checked and
opened.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from tiered_kv.cli.arguments import describe_use, file_path, interval, positive_int, share, size, tokens
from tiered_kv.cli.ask import fetch, is_address, url_of
from tiered_kv.cli.doctor import Readings
from tiered_kv.cli.output import Status, one_line, print_json, print_table, print_text, printable, quantity
from tiered_kv.config.stack_config import load_config
from tiered_kv.config.units import format_bytes, rounded_bytes, rounded_seconds
from tiered_kv.engines.model.architectures import LAYERS_MAX, check_ranks, read_model
from tiered_kv.engines.model.layers import DTYPE_BYTES, Kind, KVModel, Layers
from tiered_kv.engines.model.sizing import Load, Machine, Plan, per_s, plan
from tiered_kv.engines.prefill_meter import TokenCost
from tiered_kv.errors import ConfigError, TierUnavailableError
from tiered_kv.metrics.vocabulary import PREFIX

_BLOCK_TOKENS: Final = 16
_HIT_RATE: Final = 0.9
_RANKS: Final = (1, 2, 4, 8)
_TIMEOUT_S: Final = 10.0
_NUMBERS: Final = ("layers", "kv_heads", "head_size", "latent_size", "window_layers", "window", "state_layers", "state")
_LOAD: Final = ("users", "context", "turn_gap")
_MACHINE: Final = ("hit_rate", "memory", "disk", "disk_rate", "prefill", "path", "write")
"""Options that say nothing without a load."""
_MOST: Final = {
    **dict.fromkeys(("layers", "window_layers", "state_layers"), LAYERS_MAX),
    **dict.fromkeys(("kv_heads", "head_size", "latent_size"), 1 << 20),
    "tensor_parallel": 1 << 10,
    "users": 1 << 30,
}
_RATE_MAX: Final = 1 << 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say what a token and a block of a model take, by the type of keys and values and the tensor parallel ranks. "
        "With --users, --context and --turn-gap: how much memory and disk these users need, from which rate on a disk "
        "beats computing, and a stack that fits, with a reason for each number. Nothing is opened or measured."
    )
    describe_use(
        parser,
        ("tiered-kv size ./Llama-3.1-8B-Instruct", "bytes of a token and a block"),
        ("tiered-kv size ./Llama-3.1-8B-Instruct --users 200 --context 32k --turn-gap 5m", "a stack for this load"),
        (
            "tiered-kv size ./model --users 200 --context 32k --turn-gap 5m --prefill 20000 --disk-rate 5GB/s",
            "does the disk beat computing?",
        ),
        ("tiered-kv size --layers 32 --kv-heads 8 --head-size 128", "a model by its numbers"),
        found="what was given does not suffice for the load",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        type=file_path,
        help="a model's folder on this machine, or its config.json",
    )
    parser.add_argument("--kv-dtype", choices=DTYPE_BYTES, help="type of keys and values (default: the model's)")
    parser.add_argument("--tensor-parallel", metavar="N", type=positive_int, help="ranks of an engine (default: 1)")
    parser.add_argument(
        "--block-tokens", metavar="N", type=tokens, default=_BLOCK_TOKENS, help="tokens of a block (default: 16)"
    )
    _add_numbers(parser)
    _add_load(parser)


def _add_numbers(parser: argparse.ArgumentParser) -> None:
    numbers = parser.add_argument_group("a model by its numbers, without MODEL")
    for name, about in {
        "layers": "layers that keep every token",
        "kv-heads": "KV heads of a layer",
        "head-size": "elements of a head",
        "latent-size": "elements of a latent layer (MLA): its rank and its rotary part; instead of heads",
        "window-layers": "layers that keep a window of tokens, beside --layers",
    }.items():
        numbers.add_argument(f"--{name}", metavar="N", type=positive_int, help=about)
    numbers.add_argument("--window", metavar="TOKENS", type=tokens, help="tokens of that window")
    numbers.add_argument("--state-layers", metavar="N", type=positive_int, help="layers with a recurrent state")
    numbers.add_argument("--state", metavar="SIZE", type=size, help="bytes of the state of one such layer")


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("a load")
    load.add_argument("--users", metavar="N", type=positive_int, help="users with a conversation at the same time")
    load.add_argument("--context", metavar="TOKENS", type=tokens, help="tokens of a prompt, with all that came before")
    load.add_argument("--turn-gap", metavar="TIME", type=interval, help="time between two prompts of a user")
    load.add_argument(
        "--hit-rate",
        metavar="SHARE",
        type=share,
        help=f"share of a prompt's tokens that came in an earlier one (default: {_HIT_RATE})",
    )
    machine = parser.add_argument_group("a machine, for a load")
    machine.add_argument("--memory", metavar="SIZE", type=size, help="CPU memory to spare (default: what suffices)")
    machine.add_argument("--disk", metavar="SIZE", type=size, help="room on the disk (default: what suffices)")
    machine.add_argument("--disk-rate", metavar="RATE", type=size, help="what the disk reads, such as 5GB/s")
    machine.add_argument(
        "--prefill",
        metavar="RATE|URL",
        help="tokens of prompts that the engine computes a second; or the address of a running engine that measures it",
    )
    machine.add_argument("--path", metavar="DIR", help="directory of the nvme tier (default: /mnt/nvme0/kv-cache)")
    machine.add_argument(
        "--whole", action="store_true", help="a stack with `block` and `namespace`: for programs, replay and simulate"
    )
    machine.add_argument("--write", metavar="FILE", type=file_path, help="write the stack to this new file, too")


def run(args: argparse.Namespace) -> Status:
    for name, most in _MOST.items():
        if (getattr(args, name) or 0) > most:
            raise ConfigError(f"expected at most {most:,}", location=_option(name))
    model = _model(args, args.kv_dtype, args.tensor_parallel or 1)
    block_tokens = model.block_tokens(args.block_tokens)
    found = _plan(args, model, block_tokens)
    text = "" if found is None else _yaml(args, model, found)
    if args.write is not None:
        _write(args.write, text)
    if args.json:
        print_json(_described(args, model, block_tokens, found, text))
    else:
        _show(args, model, block_tokens, found, text)
    return Status.FOUND if found is not None and found.problems else Status.OK


# What was asked.


def _model(args: argparse.Namespace, kv_dtype: str | None, ranks: int) -> KVModel:
    given = [name for name in _NUMBERS if getattr(args, name) is not None]
    if args.model is not None:
        if given:
            raise ConfigError(f"{_option(given[0])} is a number of a model: give MODEL, or its numbers, not both")
        return read_model(args.model, kv_dtype=kv_dtype, ranks=ranks)
    if not given:
        raise ConfigError("expected a model's folder, its config.json, or --layers, --kv-heads and --head-size")
    return KVModel("model", tuple(_layers(args, ranks)), kv_dtype or "bfloat16", ranks)


def _layers(args: argparse.Namespace, ranks: int) -> Iterator[Layers]:
    """Yield the layers that the options describe; raise ConfigError for options that contradict each other."""
    if args.latent_size is not None and (args.kv_heads or args.head_size or args.window_layers):
        raise ConfigError("--latent-size is for layers without KV heads: leave out the heads and the window, or it")
    for one, other in (("kv_heads", "head_size"), ("window_layers", "window"), ("state_layers", "state")):
        _together(args, (one, other))
    has_size = args.latent_size is not None or args.kv_heads is not None
    if args.layers is None and (args.latent_size is not None or args.window_layers is None) and has_size:
        raise ConfigError("expected --layers: how many layers keep every token")
    if (args.layers or args.window_layers) and not has_size:
        raise ConfigError("expected --kv-heads and --head-size, or --latent-size: what a layer keeps of a token")
    if args.kv_heads is not None:
        check_ranks(args.kv_heads, ranks, "--tensor-parallel")
    if args.latent_size is not None:
        yield Layers(Kind.LATENT, args.layers, elements=args.latent_size)
    elif args.layers is not None:
        yield Layers(Kind.FULL, args.layers, args.kv_heads, 2 * args.head_size)
    if args.window_layers is not None:
        yield Layers(Kind.WINDOW, args.window_layers, args.kv_heads, 2 * args.head_size, args.window)
    if args.state_layers is not None:
        yield Layers(Kind.STATE, args.state_layers, state_bytes=args.state, name="as given")


def _plan(args: argparse.Namespace, model: KVModel, block_tokens: int) -> Plan | None:
    _together(args, _LOAD)
    if args.users is None:
        given = [name for name in _MACHINE if getattr(args, name) is not None] + ["whole"] * args.whole
        if given:
            raise ConfigError(f"{_option(given[0])} needs a load: --users, --context and --turn-gap")
        return None
    if args.context < block_tokens:
        raise ConfigError(
            f"a prompt of {quantity(args.context, 'token')} has no whole block: a block has {block_tokens:,}",
            location="--context",
        )
    hit_rate = _HIT_RATE if args.hit_rate is None else args.hit_rate
    load = Load(args.users, args.context, args.turn_gap, hit_rate)
    cost = None if args.prefill is None else _cost(args.prefill)
    where = {} if args.path is None else {"path": args.path}
    return plan(model, block_tokens, load, Machine(args.memory, args.disk, args.disk_rate, cost, **where))


def _cost(text: str) -> TokenCost:
    """Return what a token of a prompt costs an engine: by a rate, or as a running engine has measured it."""
    if not is_address(text):
        try:
            return TokenCost(1 / min(_RATE_MAX, positive_int(text.removesuffix("/s"))), 0.0)
        except argparse.ArgumentTypeError:
            raise ConfigError(
                f"expected tokens a second, such as 20000, or the address of an engine, such as "
                f"http://127.0.0.1:8000/metrics, found {text!r}",
                location="--prefill",
            ) from None
    url = url_of(text)
    try:
        readings = Readings(fetch(url, "/metrics", _TIMEOUT_S).decode("utf-8", "replace"))
    except TierUnavailableError as error:
        raise TierUnavailableError(
            f"no answer from {url}/metrics: {error}; give a number of tokens a second"
        ) from error
    block_s, growth_s, block_tokens = (
        readings.highest(f"{PREFIX}{name}")
        for name in ("compute_block_seconds", "compute_growth_seconds", "block_tokens")
    )
    if not block_s or not block_tokens:
        raise TierUnavailableError(
            f"{url} has not measured what a prompt costs: send it long prompts, and ask again, or give a number of "
            "tokens a second"
        )
    return TokenCost(block_s / block_tokens, growth_s / block_tokens**2)


def _together(args: argparse.Namespace, names: Sequence[str]) -> None:
    given = [name for name in names if getattr(args, name) is not None]
    if given and len(given) < len(names):
        missing = next(name for name in names if name not in given)
        raise ConfigError(f"{_option(given[0])} needs {_option(missing)}")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# What is answered.


def _yaml(args: argparse.Namespace, model: KVModel, found: Plan) -> str:
    """Return the stack as YAML, with a comment for each reason; raise ConfigError if it cannot be validated."""
    whole = {
        "namespace": {"model": model.name if args.whole else "model", "revision": "main", "dtype": model.dtype},
        "block": {"bytes": found.block_bytes, "tokens": found.block_tokens},
    }
    stack: Mapping[str, Any] = {**whole, **found.stack} if args.whole else found.stack
    reasons = dict(found.reasons)
    if args.whole and found.rates.prefill_tokens_per_s is not None:
        stack = {**stack, "prefill": {"tokens_per_s": max(1, int(found.rates.prefill_tokens_per_s))}}
        reasons["prefill.tokens_per_s"] = "blocks that are computed sooner than they would be loaded are computed"
    load_config({**whole, **stack}, environ=os.environ)
    heading = (
        f"# For {model.name}: {quantity(args.users, 'user')}, prompts of {quantity(args.context, 'token')}, one every"
    )
    lines = [
        f"{printable(heading)} {rounded_seconds(args.turn_gap)}.",
        *_lines(stack, reasons, ""),
    ]
    return "\n".join(lines) + "\n"


def _lines(values: Mapping[str, Any], reasons: Mapping[str, str], path: str, indent: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from _lines(value, reasons, f"{path}{name}.", f"{indent}  ")
        elif isinstance(value, list):
            yield f"{indent}{name}:"
            for number, each in enumerate(value):
                first, *others = _lines(each, reasons, f"{path}{name}.{number}.")
                yield f"{indent}  - {first}"
                yield from (f"{indent}    {line}" for line in others)
        else:
            reason = reasons.get(f"{path}{name}")
            text = json.dumps(value) if name in ("path", "model") else str(value)
            yield f"{indent}{name}: {text}" + (f"  # {reason}" if reason else "")


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"the stack cannot be written to '{path}': {error.strerror}", location="--write") from error


def _described(
    args: argparse.Namespace, model: KVModel, block_tokens: int, found: Plan | None, text: str
) -> dict[str, object]:
    described: dict[str, object] = {
        "model": model.name,
        "layers": [
            {**asdict(each), "token_bytes": each.token_bytes(model.dtype, model.ranks)} for each in model.layers
        ],
        "dtype": model.dtype,
        "tensor_parallel": model.ranks,
        "token_bytes": model.token_bytes,
        "window_token_bytes": model.window_token_bytes,
        "state_bytes": model.state_bytes,
        "block_tokens": block_tokens,
        "block_bytes": model.row_bytes(block_tokens),
    }
    if found is None:
        return described
    return {
        **described,
        "hit_rate": _HIT_RATE if args.hit_rate is None else args.hit_rate,
        **asdict(found),
        "yaml": text,
    }


def _show(args: argparse.Namespace, model: KVModel, block_tokens: int, found: Plan | None, text: str) -> None:
    print_text(f"{one_line(model.name)}: {'; '.join(map(str, model.layers))}")
    print_table(["type", "ranks", "a token", "on each GPU", "in windows", "states", "a block"], _table(args, model))
    if found is None:
        return
    print_text("")
    print_table(["what", "value", "why"], [[*row] for row in _figures(args, model, found)], numbers=False)
    print_text("\nA stack that fits:\n")
    print_text(text)
    check = f" --block-bytes {format_bytes(found.block_bytes)}" if not args.whole else ""
    print_text(f"Check it on the server: tiered-kv check {shlex.quote(str(args.write or 'stack.yaml'))}{check}")
    for number, problem in enumerate(found.problems, 1):
        print_text(f"\n{number}. {problem}.")


def _table(args: argparse.Namespace, model: KVModel) -> list[list[str]]:
    """Return the bytes for the types and ranks that were asked for; without any, for the usual ones."""
    dtypes = [model.dtype] if args.kv_dtype else [model.dtype, "fp8"]
    rows = []
    for dtype in dtypes:
        for ranks in [args.tensor_parallel] if args.tensor_parallel else _RANKS:
            try:
                each = _model(args, dtype, ranks)
            except ConfigError:  # so many ranks cannot share the heads
                continue
            block_tokens = each.block_tokens(args.block_tokens)
            kept = (each.token_bytes, each.rank_token_bytes, each.window_token_bytes, each.state_bytes)
            shown = [rounded_bytes(size_bytes) if size_bytes else "-" for size_bytes in kept]
            block = f"{rounded_bytes(each.row_bytes(block_tokens))} ({quantity(block_tokens, 'token')})"
            rows.append([dtype, str(ranks), *shown, block])
    return rows


def _figures(args: argparse.Namespace, model: KVModel, found: Plan) -> Iterator[tuple[str, str, str]]:
    rates, memory, disk = found.rates, found.memory, found.disk
    hits = f"{args.hit_rate:.0%} of each" if args.hit_rate is not None else f"{_HIT_RATE:.0%} of each (assumed)"
    parts = (
        "whole blocks" + ", the last window" * bool(model.window_token_bytes) + ", a state" * bool(model.state_bytes)
    )
    yield "a prompt", rounded_bytes(found.prompt_bytes), f"{quantity(args.context, 'token')}: {parts}"
    yield "all prompts", rounded_bytes(found.all_bytes), f"one of each of {quantity(args.users, 'user')}"
    yield "memory holds", quantity(memory.prompts, "prompt"), f"{rounded_bytes(memory.capacity_bytes)}: {memory.reason}"
    if disk is not None:
        yield "disk holds", quantity(disk.prompts, "prompt"), f"{rounded_bytes(disk.capacity_bytes)}: {disk.reason}"
    yield "loads", per_s(rates.load_bytes_per_s), f"{rates.prompts_per_s:.3g} prompts/s, {hits}"
    missing = "what memory does not hold, if users return in any order"
    yield "of these, from the disk", per_s(rates.disk_load_bytes_per_s), missing
    day_bytes = rounded_bytes(int(rates.store_bytes_per_s * 86_400))
    yield "stores", per_s(rates.store_bytes_per_s), f"what is new: {day_bytes} a day"
    if rates.break_even_bytes_per_s is None:
        per_1000 = 1000 * found.prompt_bytes / args.context
        yield "break-even of a disk", per_s(per_1000), "for each 1,000 tokens/s of prefill: give --prefill"
        return
    yield "prefill", f"{rates.prefill_tokens_per_s:,.0f} tokens/s", "of such prompts"
    yield "break-even of a disk", per_s(rates.break_even_bytes_per_s), "a disk that reads more beats computing"
    if args.disk_rate is not None:
        ratio = f"{args.disk_rate / rates.break_even_bytes_per_s:.2f}"
        yield "this disk", f"{ratio} x", f"its {per_s(args.disk_rate)} over the break-even"
    yield "prompts without a cache", f"{rates.engine_share:.0%}", "of the engine's time"
    yield "prompts with every hit", f"{rates.engine_share_with_hits:.0%}", "of the engine's time"
