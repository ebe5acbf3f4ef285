"""`tiered-kv why`: why blocks of a running stack were misses.

`main` calls `run` on the main thread, which asks the process that has the stack open. What must stay true: it changes
nothing, and an answer of another form is a `TierUnavailableError`.
"""

from __future__ import annotations

import argparse
import json
import urllib.parse
from collections.abc import Mapping
from typing import Any, Final

from tiered_kv.cli import inspect
from tiered_kv.cli.arguments import describe_use, seconds
from tiered_kv.cli.ask import fetch, is_address, url_of
from tiered_kv.cli.output import Status, one_line, print_json, print_table, print_text, progress, quantity
from tiered_kv.cli.stacks import add_namespace_argument
from tiered_kv.config.units import rounded_seconds
from tiered_kv.errors import ConfigError, TierUnavailableError
from tiered_kv.reasons import SENTENCES

_TIMEOUT_S: Final = 10.0

Answer = Mapping[str, Any]  # Any: JSON


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Ask the process that has a stack open why blocks were misses. It opens no tier, and changes nothing. "
        "The stack needs metrics: {listen: ADDRESS}."
    )
    parser.add_argument("stack", metavar="STACK|URL", help="the stack's YAML file, or http://HOST:PORT")
    parser.add_argument("keys", metavar="KEY", nargs="*", default=[], help="keys of blocks, in hexadecimal")
    parser.add_argument("--request", metavar="ID", help="a request that has ended")
    parser.add_argument("--last", action="store_true", help="the last request that missed a block")
    parser.add_argument("--namespaces", action="store_true", help="the stored namespaces, as `tiered-kv inspect STACK`")
    add_namespace_argument(parser)
    parser.add_argument("--timeout", metavar="TIME", type=seconds, default=_TIMEOUT_S, help="for each answer (10s)")
    describe_use(
        parser,
        ("tiered-kv why stack.yaml --last", "why the last request that missed a block missed it"),
        ("tiered-kv why http://127.0.0.1:9464 --request chat-7", "one request, of a process that is named by its URL"),
        found="with --request: the request is not known",
    )


def run(args: argparse.Namespace) -> Status:
    query = [("key", key) for key in args.keys]
    query += [("request", args.request)] if args.request is not None else []
    query += [("last", "1")] if args.last else []
    if args.namespaces:
        if query or is_address(args.stack):
            raise ConfigError("--namespaces needs the stack's file, and no other question")
        return inspect.run(argparse.Namespace(**vars(args), tier=None, verify=False, repair=False, rate=None))
    if args.namespace is not None:
        raise ConfigError("it needs --namespaces", location="--namespace")
    if not query:
        raise ConfigError("expected keys, --request, --last or --namespaces")
    url = url_of(args.stack)
    try:
        with progress("asking", None):
            answer: Answer = json.loads(fetch(url, f"/explain?{urllib.parse.urlencode(query)}", args.timeout))
        requests = answer["requests"]
        if args.json:
            print_json(answer)
        else:
            _show(answer, args.request)
    except TierUnavailableError as error:
        raise TierUnavailableError(
            f"no process answers at {url}: {error}; the stack has to be open there, with 'metrics' and 'history'"
        ) from error
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise TierUnavailableError(f"what answers at {url} is no stack of this kind") from error
    return Status.FOUND if args.request is not None and not requests else Status.OK


def _show(answer: Answer, req_id: str | None) -> None:
    for request in answer["requests"]:
        _show_request(request)
        for tier, reasons in request["misses"].items():
            if count := reasons.get("too_slow", 0):
                print_text(f"{tier}: too_slow {count:,}: {SENTENCES['too_slow']}")
    if req_id is not None and not answer["requests"]:
        print_text(f"request {one_line(req_id)}: unknown, still running, or not among the last that ended")
    elif not answer["requests"] and not answer["keys"]:
        print_text("none of the last requests that ended missed a block")
    for key in answer["keys"]:
        _show_key(key, f"block {key['key']}")
    if any(fate["fate"] in ("unknown", "absent") for key in answer["keys"] for fate in key["tiers"].values()):
        print_text("a block may also be stored under another namespace: see --namespaces")


def _show_request(request: Answer) -> None:
    title = f"request {one_line(request['request'])}, ended {_ago(request['age_seconds'])}"
    title = f"{title}: {quantity(request['missed_blocks'], 'block')} missed"
    groups = request["missed_groups"]
    if groups.keys() - {"0"}:
        title += f" ({', '.join(f'{count:,} of KV cache group {group}' for group, count in groups.items())})"
    tiers = dict.fromkeys([*request["misses"], *request["hits"]])
    rows = [[tier, f"{request['hits'].get(tier, 0):,}", _reasons(request["misses"].get(tier, {}))] for tier in tiers]
    print_table(["tier", "hits", "misses"], rows, title=title, numbers=False)
    first = request["first_missed"]
    if first is not None:
        reasons = ", ".join(f"{tier}: {reason}" for tier, reason in request["first_missed_because"].items())
        print_text(f"the first block that it missed: {reasons}")
        _show_key(first, f"what is known of that block now, {first['key']}")


def _reasons(reasons: Mapping[str, int]) -> str:
    ordered = sorted(reasons.items(), key=lambda item: -item[1])
    return ", ".join(f"{reason} {count:,}" for reason, count in ordered) or "-"


def _show_key(key: Answer, title: str) -> None:
    rows = [
        [tier, fate["fate"], _ago(fate["age_seconds"]), SENTENCES.get(fate["fate"], "")]
        for tier, fate in key["tiers"].items()
    ]
    print_table(["tier", "what", "when", "that is"], rows, title=title, numbers=False)


def _ago(age_s: float | None) -> str:
    return "-" if age_s is None else f"{rounded_seconds(age_s)} ago"
