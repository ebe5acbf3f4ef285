"""`tiered-kv doctor`: what a running engine gains by its stack, what limits it, and which setting to change.

It reads the counters once, so its shares are those since the stack was opened.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Final

from tiered_kv._cli.arguments import describe_use, seconds
from tiered_kv._cli.ask import DEFAULT_ADDRESS, StatusAddress, address_of, fetch, is_address, read_status
from tiered_kv._cli.diagnosis import Advice, Readings, advice, gains
from tiered_kv._cli.output import Status, one_line, print_json, print_text, progress
from tiered_kv._cli.stacks import administer
from tiered_kv.config.namespace import differences
from tiered_kv.config.reading import fill_variables, from_source
from tiered_kv.config.settings import TierSettings
from tiered_kv.config.validation import raise_problems
from tiered_kv.errors import ConfigError, TieredKVError, TierUnavailableError
from tiered_kv.hooks import check_entry
from tiered_kv.toolkit.administration import StoredNamespace, TierAdministration

_TIMEOUT_S: Final = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say what a running engine gains by its stack, what limits that, and which setting to change. It reads the "
        "counters of the engine (vLLM's /metrics) or of the stack (metrics: {listen: ADDRESS}). With --stack, or the "
        "stack's file in place of the URL, it looks for other namespaces in the tiers' storage too. It changes nothing."
    )
    parser.add_argument(
        "where",
        metavar="URL|STACK",
        nargs="?",
        default=f"http://{DEFAULT_ADDRESS}",
        help="http://HOST:PORT of the engine or the stack, or the stack's YAML file (default: %(default)s)",
    )
    parser.add_argument("--stack", metavar="STACK", help="the stack's YAML file, beside an engine's URL")
    parser.add_argument("--timeout", metavar="TIME", type=seconds, default=_TIMEOUT_S, help="for each answer (10s)")
    describe_use(
        parser,
        ("tiered-kv doctor http://127.0.0.1:8000/metrics", "an engine, such as vLLM's server"),
        ("tiered-kv doctor http://127.0.0.1:8000/metrics --stack stack.yaml", "and the storage of its tiers"),
        ("tiered-kv doctor stack.yaml", "the stack of this file, which has 'metrics'"),
        found="something limits the gain",
    )


def run(args: argparse.Namespace) -> Status:
    address = address_of(args.where)
    file = args.stack or (None if is_address(args.where) else args.where)
    with progress("asking", None):
        try:
            readings = Readings(fetch(address, "/metrics", args.timeout).decode("utf-8", "replace"))
        except TierUnavailableError as error:
            raise TierUnavailableError(
                f"no answer from {address}/metrics: {error}; start the engine, or give the address of its metrics"
            ) from error
        if not readings.tiers:
            raise TierUnavailableError(
                f"{address}/metrics has no counter of Tiered KV: is its connector in the engine's configuration, or "
                "'metrics' in the stack's file? Send a request, and ask again"
            )
    limits = [*advice(readings), *(() if file is None else _of_storage(file, _own_digest(address), args.timeout))]
    if args.json:
        print_json({"url": str(address), "gains": [*gains(readings)], "limits": [asdict(each) for each in limits]})
    else:
        for sentence in gains(readings):
            print_text(sentence)
        for number, each in enumerate(limits, 1):
            print_text(f"\n{number}. {one_line(each.sentence)}\n   To change: {one_line(each.setting)}")
        if not limits:
            print_text("\nNothing limits it that the counters show.")
    return Status.FOUND if limits else Status.OK


def _own_digest(address: StatusAddress) -> str:
    """Return the namespace of the running stack; "" if only an engine answers, which does not show it."""
    try:
        return read_status(fetch(address, "/status")).namespace
    except (TieredKVError, OSError):
        return ""


def _of_storage(file: str, own: str, timeout_s: float) -> Iterator[Advice]:
    """Yield advice about namespaces of the same model in the storage of the tiers of a stack's file."""

    def entries(raw: Mapping[str, object]) -> list[TierSettings]:
        found = fill_variables({"secondary": raw.get("secondary") or []}, os.environ)["secondary"]
        if not isinstance(found, list):
            raise ConfigError("expected a list of tiers", location="secondary")
        return [raise_problems(check_entry(each, ("secondary", at))) for at, each in enumerate(found)]

    with progress("looking for namespaces", None):
        for settings in from_source(file, entries):
            stored: list[StoredNamespace] = []
            deadline = time.monotonic() + timeout_s
            administer(settings, partial(_survey, stored, deadline))
            yield from _of_namespaces(settings.name, own, stored)


def _survey(stored: list[StoredNamespace], deadline: float, administration: TierAdministration) -> None:
    stored += administration.survey(deadline).namespaces


def _of_namespaces(tier: str, own: str, stored: list[StoredNamespace]) -> Iterator[Advice]:
    newest = min(stored, key=lambda each: each.written.newest_s if each.written else float("inf"), default=None)
    ours = next((each for each in stored if each.digest == own), newest)
    if ours is None:
        return
    changes = [
        differences(ours.described, each.described) for each in stored if each.digest != ours.digest and each.blocks
    ]
    same_model = [each for each in changes if each and "namespace.model" not in each and "namespace.tenant" not in each]
    if same_model:
        fields = ", ".join(f"`{name}`" for name in dict.fromkeys(name for each in same_model for name in each))
        sentence = (
            f"{tier} has blocks of this model in {len(same_model)} other namespaces, which are never hit: they were "
            f"stored under another value of {fields}."
        )
        setting = f"keep {fields} the same in each start; `tiered-kv purge STACK --namespace DIGEST` frees the room."
        yield Advice("namespaces", tier, 0.5, sentence, setting)
