"""`tiered-kv drain` and `attach`: take a tier of a running stack out, for a disk that is replaced, and put it back.

`main` calls `run` on the main thread. It asks the stack over HTTP, and then waits, with a limit, until the stack's
status says that it is done. Nothing is opened here.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from typing import Final

from tiered_kv.cli.arguments import describe_use, seconds
from tiered_kv.cli.ask import TierStatus, fetch, read_status, token_of, url_of
from tiered_kv.cli.output import Status, print_json, print_text
from tiered_kv.errors import ConfigError, TierUnavailableError

_POLL_S: Final = 0.1
_WAIT_S: Final = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    if parser.prog.endswith("drain"):
        parser.description = (
            "Take a secondary tier of a running stack out, for a disk that is replaced. Its jobs end, then its threads "
            "end and its files are closed. Requests go on without it, until 'tiered-kv attach' or a restart."
        )
        describe_use(
            parser,
            ("tiered-kv drain 127.0.0.1:9464 nvme", "take a disk out; then 'umount' it"),
            found="the tier is not out within --wait",
        )
    else:
        parser.description = "Open a tier again that 'tiered-kv drain' has taken out, from the settings of its stack."
        describe_use(
            parser,
            ("tiered-kv attach 127.0.0.1:9464 nvme", "use the new disk, once it is mounted"),
            found="the tier is not in use within --wait: the stack goes on trying",
        )
    parser.add_argument("address", metavar="ADDRESS", help="URL or HOST:PORT of the stack's metrics, or its file")
    parser.add_argument("tier", metavar="TIER", help="the tier's name")
    parser.add_argument("--namespace", default="", metavar="DIGEST", help="its first characters, if several are open")
    parser.add_argument("--wait", type=seconds, default=_WAIT_S, metavar="TIME", help="how long to wait (1m)")


def run(args: argparse.Namespace) -> Status:
    url, verb = url_of(args.address), args.verb
    headers = token_of(args.address)
    asked = json.dumps({"tier": args.tier, "namespace": args.namespace}).encode()
    try:
        if verb == "attach" and (tier := _tier(url, args, headers)).removal == "draining":
            raise ConfigError(
                f"{args.tier} still drains: {tier.note}; wait until 'tiered-kv drain' says that it is out"
            )
        fetch(url, f"/{verb}", headers=headers, body=asked)
    except TierUnavailableError as error:
        raise TierUnavailableError(f"{url}: {error}") from error
    wanted, was_attaching = "drained" if verb == "drain" else "", False
    end_s = time.monotonic() + args.wait
    while not (is_done := (tier := _tier(url, args, headers)).removal == wanted) and time.monotonic() < end_s:
        if was_attaching and tier.removal == "drained":  # it was opened, and cannot be used
            break
        was_attaching = tier.removal == "attaching"
        time.sleep(_POLL_S)
    if args.json:
        print_json({"tier": args.tier, "removal": tier.removal, "note": tier.note})
    elif is_done:
        print_text(f"{args.tier} is {'out: its files are closed' if verb == 'drain' else 'in use'}")
    else:
        print_text(f"{args.tier} is {tier.removal or 'in use'}: {tier.note or 'the log of its process says why'}")
    return Status.OK if is_done else Status.FOUND


def _tier(url: str, args: argparse.Namespace, headers: Mapping[str, str]) -> TierStatus:
    page = "/status" + (f"?namespace={args.namespace}" if args.namespace else "")
    for tier in read_status(fetch(url, page, headers=headers)).tiers:
        if tier.name == args.tier:
            return tier
    raise ConfigError(f"there is no tier {args.tier!r}")
