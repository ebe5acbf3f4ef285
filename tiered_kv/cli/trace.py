"""`tiered-kv trace`: what a trace of requests is and has, and the trace in our own form.

`main` calls `run` on the main thread. No tier is opened. What must stay true: the file that it writes is a trace of
`simulate` and `replay`, and is whole or absent.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace

from tiered_kv.cli.arguments import describe_use, file_path, positive_int, tokens
from tiered_kv.cli.output import Status, print_json, print_table, print_text, progress, quantity
from tiered_kv.config.units import rounded_seconds
from tiered_kv.errors import ConfigError
from tiered_kv.workload.prompts import BLOCK_TOKENS, PromptBlocks, open_tokenizer
from tiered_kv.workload.summary import Summary, summarize, write_trace
from tiered_kv.workload.trace import Trace

_UNITS = {"s": "seconds", "ms": "milliseconds", "ns": "nanoseconds"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say what a trace of requests is, how many requests, sessions and blocks it has, and which share of the blocks "
        "repeats. With --to: write it in the form that 'simulate' and 'replay' read. It reads the traces of Mooncake, "
        "Qwen-Bailian, LMCache, aiperf and kv-cache-tester, the logs of vLLM and SGLang, and the results of aiperf and "
        "guidellm."
    )
    describe_use(
        parser,
        ("tiered-kv trace requests.jsonl", "what is in this file?"),
        ("tiered-kv trace vllm.log --to trace.jsonl", "a log with tokens, as a trace"),
        ("tiered-kv trace benchmarks.json --tokenizer ./Llama-3.1-8B-Instruct --to trace.jsonl", "prompts as text"),
        ("tiered-kv trace seconds.jsonl --time-unit s", "a trace of guidellm, whose times are in seconds"),
    )
    parser.add_argument("file", metavar="FILE", type=file_path, help="a file, or a folder of agents' sessions")
    parser.add_argument("--to", metavar="OUT", type=file_path, help="a new file")
    parser.add_argument(
        "--tokenizer",
        metavar="MODEL",
        type=file_path,
        help="a model's folder, to make tokens of prompts that are texts (extra: transformers)",
    )
    parser.add_argument(
        "--block-tokens",
        metavar="N",
        type=tokens,
        help=f"tokens in a block of prompts that have no ids of blocks (default: {BLOCK_TOKENS})",
    )
    parser.add_argument("--time-unit", choices=("ms", "s"), help="of the trace's times (default: that of its form)")
    parser.add_argument("--requests", metavar="N", type=positive_int, help="read this many requests at most")


def run(args: argparse.Namespace) -> Status:
    if args.to is not None and args.to.exists():
        raise ConfigError(f"{args.to} exists already; remove it, or name another file", location="--to")
    tokenizer = None if args.tokenizer is None else open_tokenizer(args.tokenizer)
    blocks = PromptBlocks(args.block_tokens or BLOCK_TOKENS, tokenizer)
    trace = Trace(args.file, requests_max=args.requests, time_unit=args.time_unit or "", blocks=blocks)
    with progress("reading the requests", None):
        requests = list(trace.requests())
    for name in ("tokenizer", "block_tokens"):
        if getattr(args, name) is not None and not blocks.count:
            problem = "it is for prompts without ids of blocks, and this trace has ids"
            raise ConfigError(problem, location=f"--{name.replace('_', '-')}")
    assert trace.form is not None, "there is a request"
    found = summarize(requests)
    if blocks.count:
        found = replace(found, block_tokens=blocks.block_tokens)
    if args.to is not None:
        with progress("writing the trace", None):
            write_trace(requests, args.to)
    unit = args.time_unit if args.time_unit and trace.form.has_open_unit else trace.form.time_unit
    if args.json:
        to = None if args.to is None else str(args.to)
        about = {"trace": str(args.file), "form": trace.form.title, "time_unit": unit}
        print_json({**about, **asdict(found), "left_out": trace.left_out, "to": to})
    else:
        _show(args, trace, found, unit)
    return Status.OK


def _show(args: argparse.Namespace, trace: Trace, found: Summary, unit: str) -> None:
    assert trace.form is not None
    rows = [
        ("form", trace.form.title, f"times in {_UNITS[unit]}"),
        ("requests", f"{found.requests:,}", f"in {rounded_seconds(found.span_seconds)}"),
        ("sessions", f"{found.sessions:,}" if found.sessions else "none named", ""),
        ("prompts", f"{found.prompt_tokens:,}", "tokens"),
        ("outputs", f"{found.output_tokens:,}" if found.output_tokens else "unknown", "tokens"),
        ("a block", f"{found.block_tokens:,}" if found.block_tokens else "unknown", "tokens"),
        ("blocks", f"{found.blocks:,}", "that requests ask for"),
        ("different blocks", f"{found.distinct_blocks:,}", ""),
        ("repeated", f"{100 * found.repeated_share:.1f} %", "of these, more than one request asks for"),
        ("hit rate", f"{found.hit_rate:.4f}", "of a cache that keeps everything"),
    ]
    print_table(("trace", "value", ""), rows, title=str(args.file), numbers=False)
    if trace.left_out:
        print_text(f"left out: {quantity(trace.left_out, 'request')} without a prompt")
    if args.to is not None:
        print_text(f"{args.to}: {quantity(found.requests, 'request')}, times in milliseconds from the first")
