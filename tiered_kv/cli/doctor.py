"""`tiered-kv doctor`: what a running engine gains by its stack, what limits it, and which setting to change.

`main` calls `run` on the main thread; a `TimeLimit` asks each storage on another thread. The verb reads the counters
once, in Prometheus's text format. So its shares are shares of all blocks since the stack was opened. What must stay
true: the verb changes nothing.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final

from tiered_kv.cli.arguments import describe_use, seconds
from tiered_kv.cli.ask import DEFAULT_ADDRESS, fetch, is_address, url_of
from tiered_kv.cli.output import Status, one_line, print_json, print_text, printable, progress
from tiered_kv.cli.stacks import administer, operated_stack
from tiered_kv.cli.time_limit import TimeLimit
from tiered_kv.config.namespace import differences
from tiered_kv.config.settings import PRIMARY_NAME
from tiered_kv.config.units import rounded_bytes, rounded_seconds
from tiered_kv.errors import TierUnavailableError
from tiered_kv.metrics.vocabulary import PREFIX, TIER_PREFIX
from tiered_kv.reasons import Reason
from tiered_kv.toolkit.administration import StoredNamespace

_TIMEOUT_S: Final = 10.0
_BLOCKS_MIN: Final = 100
"""The least number of blocks of which a share is taken: a share of fewer blocks says nothing."""
_SAMPLE: Final = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? ([^ ]+)(?: -?\d+)?")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_PROMPT_TOKENS: Final = ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total")


@dataclass(frozen=True, slots=True)
class Advice:
    """A limit of the gain: the share of the blocks that it concerns (0 to 1), a sentence, and the setting to change."""

    name: str
    tier: str
    share: float
    sentence: str
    setting: str


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
    url = url_of(args.where)
    file = args.stack or (None if is_address(args.where) else args.where)
    with progress("asking", None):
        try:
            readings = Readings(fetch(url, "/metrics", args.timeout).decode("utf-8", "replace"))
        except TierUnavailableError as error:
            raise TierUnavailableError(
                f"no answer from {url}/metrics: {error}; start the engine, or give the address of its metrics"
            ) from error
        if not readings.tiers:
            raise TierUnavailableError(
                f"{url}/metrics has no counter of Tiered KV: is its connector in the engine's configuration, or "
                "'metrics' in the stack's file? Send a request, and ask again"
            )
    limits = [*advice(readings), *(() if file is None else _of_storage(file, args.timeout))]
    if args.json:
        print_json({"url": url, "gains": [*gains(readings)], "limits": [asdict(each) for each in limits]})
    else:
        for sentence in gains(readings):
            print_text(sentence)
        for number, each in enumerate(limits, 1):
            print_text(f"\n{number}. {one_line(each.sentence)}\n   To change: {one_line(each.setting)}")
        if not limits:
            print_text("\nNothing limits it that the counters show.")
    return Status.FOUND if limits else Status.OK


def _of_storage(file: str, timeout_s: float) -> Iterator[Advice]:
    """Yield advice about namespaces of the same model in the storage of the tiers of a stack's file."""
    stack = operated_stack(argparse.Namespace(stack=file, timeout=timeout_s))
    with progress("looking for namespaces", None):
        for settings in stack.config.secondary:
            survey, error = administer(
                settings, lambda found: found.survey(time.monotonic() + timeout_s), TimeLimit(timeout_s)
            )
            if error:
                sentence = f"The storage of {settings.name} could not be looked at: {error}."
                yield Advice("storage", settings.name, 0.0, sentence, "`tiered-kv check STACK` shows what it lacks.")
            yield from _of_namespaces(settings.name, stack.digest, () if survey is None else survey.namespaces)


def _of_namespaces(tier: str, own: str | None, stored: Sequence[StoredNamespace]) -> Iterator[Advice]:
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


class Readings:
    """The samples of Prometheus's text format: name, labels and value."""

    def __init__(self, text: str) -> None:
        self._samples: list[tuple[str, dict[str, str], float]] = []
        for line in text.splitlines():
            if (found := _SAMPLE.fullmatch(line)) is not None:
                labels = {name: printable(value) for name, value in _LABEL.findall(found[2] or "")}
                with suppress(ValueError):
                    self._samples.append((found[1], labels, float(found[3])))
        named = {labels["tier"] for name, labels, _ in self._samples if name.startswith(PREFIX) and "tier" in labels}
        order = [labels.get("tier", "") for _, labels, _ in self._samples]
        self.tiers = sorted(named, key=lambda tier: (tier != PRIMARY_NAME, order.index(tier)))

    def values(self, name: str, by: str = "", **labels: str) -> list[tuple[str, float]]:
        """Return a metric's finite values of all engines, of the samples that have these `labels`.

        With each value comes the sample's text of the label that is called `by`; an empty text without such a label.
        """
        return [
            (of.get(by, ""), value)
            for each, of, value in self._samples
            if each == name and labels.items() <= of.items() and 0 <= value < math.inf
        ]

    def total(self, name: str, **labels: str) -> float:
        """Return the sum over all engines, and over all other labels."""
        return sum(value for _, value in self.values(name, **labels))

    def highest(self, name: str, **labels: str) -> float:
        """Return the highest value of all engines, for a metric that is no count."""
        return max((value for _, value in self.values(name, **labels)), default=0.0)


class TierReading:
    """The counters of one tier."""

    def __init__(self, readings: Readings, name: str) -> None:
        self.name, self._readings = name, readings
        self.is_last = name == readings.tiers[-1]
        self.asked = self.count("blocks_total")
        self.hits = self.count("blocks_total", "hit", label="result")
        self.failed = self.count("failed_blocks_total")
        self.offered = self.count("stored_blocks_total") + self.count("skipped_blocks_total")
        # Blocks that requests loaded or stored. `ghost_hits_total` counts hits among them, with other capacities.
        self.used = max(self.asked, self.count("stored_blocks_total") + self.count("loaded_blocks_total"))

    def count(self, name: str, *values: str, label: str = "reason") -> float:
        """Return a counter: the sum of all its series, or of the series whose `label` has one of these `values`."""
        found = self._readings.values(f"{PREFIX}{name}", label, tier=self.name)
        return sum(number for value, number in found if not values or value in values)

    def own(self, name: str) -> float:
        """Return a counter that the tier itself counts."""
        return self._readings.total(f"{TIER_PREFIX}{name}", tier=self.name)

    def missed_last(self, reason: str) -> float:
        """Return the misses of the last tier; 0 for other tiers, since a lower tier may still have the block."""
        return self.count("misses_total", reason) if self.is_last else 0.0

    @property
    def ghost_gain(self) -> float:
        """Blocks that twice the capacity would have hit in addition."""
        twice, once = (self.count("ghost_hits_total", size, label="size") for size in ("2", "1"))
        return max(0.0, twice - once)

    def words(self) -> dict[str, str]:
        highest = partial(self._readings.highest, tier=self.name)
        capacity = highest(f"{PREFIX}capacity_bytes") or highest(f"{TIER_PREFIX}capacity_bytes")
        failed = self._readings.values(f"{PREFIX}failed_blocks_total", "reason", tier=self.name)
        reason, _ = max(failed, key=lambda each: each[1], default=("", 0))
        is_primary = self.name == PRIMARY_NAME
        return {
            "tier": self.name,
            "capacity": rounded_bytes(int(capacity)),
            "capacity_setting": "`primary.capacity`" if is_primary else f"`capacity` of {self.name}",
            "budget": rounded_bytes(int(highest(f"{PREFIX}store_budget_bytes"))),
            "load": rounded_seconds(highest(f"{PREFIX}expected_block_seconds")),
            "compute": rounded_seconds(self._readings.highest(f"{PREFIX}compute_block_seconds")),
            "recovered": f"{self.own('recovered_blocks_total'):,.0f}",
            "reason": f"{reason}: {Reason.of(reason).sentence}",
        }


@dataclass(frozen=True, slots=True)
class Rule:
    """A possible limit of a tier, with the advice about it: a `sentence`, and the `setting` to change.

    The rule holds if `blocks` is at least the share `least` of `out_of`, and `out_of` is at least `blocks_min`.
    """

    name: str
    blocks: Callable[[TierReading], float]
    out_of: Callable[[TierReading], float]
    least: float
    sentence: str
    setting: str
    blocks_min: int = _BLOCKS_MIN


RULES: Final = (
    Rule(
        "out_of_use",
        lambda tier: tier.count("breaker_state") + tier.count("skipped_blocks_total", "disabled"),
        lambda tier: tier.count("breaker_state") + tier.count("skipped_blocks_total", "disabled"),
        0.5,
        "{tier} is out of use: its breaker is not closed, or it was disabled.",
        "no setting: see the log of the process, and run `tiered-kv check STACK`.",
        blocks_min=1,
    ),
    Rule(
        "failures",
        lambda tier: tier.count("failed_blocks_total"),
        lambda tier: tier.count("stored_blocks_total") + tier.count("loaded_blocks_total") + tier.failed,
        0.05,
        "{tier} failed for {blocks} of {out_of} blocks ({share}), most often by {reason}.",
        "no setting: see the log of the process, and run `tiered-kv check STACK`.",
    ),
    Rule(
        "too_small",
        lambda tier: tier.ghost_gain,
        lambda tier: tier.used,
        0.03,
        "{tier} is too small: twice its {capacity} would have hit {blocks} more of {out_of} blocks ({share}).",
        "raise {capacity_setting}, or add a tier behind the last one.",
    ),
    Rule(
        "evicted",
        lambda tier: 0 if tier.count("ghost_hits_total") else tier.missed_last("evicted"),
        lambda tier: tier.asked,
        0.03,
        "{tier} is too small: {blocks} of {out_of} blocks ({share}) had been evicted when they were asked for.",
        "raise {capacity_setting}, or add a tier behind the last one.",
    ),
    Rule(
        "no_room",
        lambda tier: tier.count("refused_promotion_blocks_total"),
        lambda tier: tier.count("refused_promotion_blocks_total") + tier.count("loaded_blocks_total"),
        0.05,
        "The primary tier had no room for {blocks} of {out_of} blocks ({share}) that {tier} had.",
        "raise `primary.capacity`, or `primary.promotion_budget`, or `load_budget` of {tier}.",
    ),
    Rule(
        "budget",
        lambda tier: tier.count("skipped_blocks_total", "budget"),
        lambda tier: tier.offered,
        0.05,
        "{tier} did not get {blocks} of {out_of} blocks to store ({share}): its store budget of {budget} was used up.",
        "raise `store_budget` of {tier}, and `primary.capacity`, of which it is a part. If it is used up again, "
        "{tier} is slower than the engine stores: set `admit_after: 2`, or give it faster storage.",
    ),
    Rule(
        "too_slow",
        lambda tier: tier.count("too_slow_blocks_total", "late", "cut", "not_asked"),
        lambda tier: tier.count("too_slow_blocks_total") + tier.count("loaded_blocks_total"),
        0.2,
        "{tier} is too slow: the engine computed {blocks} of {out_of} blocks that it may have had ({share}), since "
        "that was sooner. A block takes {load} to load, and {compute} to compute.",
        "give {tier} faster storage, make blocks larger, or leave it out. `prefill: off` loads them all the same.",
    ),
    Rule(
        "late",
        lambda tier: tier.count("misses_total", "too_late", "timeout"),
        lambda tier: tier.asked,
        0.05,
        "Requests stopped waiting for {blocks} of {out_of} blocks ({share}) of {tier}.",
        "give {tier} faster storage, or raise `primary.request_wait` and `lookup_timeout` of {tier}.",
    ),
    Rule(
        "other_keys",
        lambda tier: tier.asked if tier.own("recovered_blocks_total") and not tier.hits else 0,
        lambda tier: tier.asked,
        1.0,
        "{tier} began with {recovered} blocks of earlier starts, and none of the {out_of} blocks that it was asked for "
        "was among them: the names of blocks change with each start, or all prompts are new.",
        "keep the engine's hashes the same in each start: in vLLM set `PYTHONHASHSEED`. Then compare "
        "the namespaces that `tiered-kv inspect STACK` shows.",
    ),
    Rule(
        "no_common_prefixes",
        lambda tier: tier.missed_last("absent") if tier.hits < 0.1 * tier.asked else 0,
        lambda tier: tier.asked,
        0.8,
        "The prompts have few common prefixes: {blocks} of {out_of} blocks that {tier} was asked for ({share}) had "
        "never been stored.",
        "no setting: put what prompts share at their beginning, what differs (names, dates) at their end, and send the "
        "requests of a session to one server.",
    ),
    Rule(
        "unread",
        lambda tier: tier.own("wasted_bytes_total"),
        lambda tier: tier.count("stored_bytes_total"),
        0.8,
        "{share} of the bytes that {tier} stored were evicted before anybody read them.",
        "set `admit_after: 2` of {tier}, so that it stores what comes again.",
    ),
)
"""The possible limits of a stack, the most important first.

The texts are formatted with `TierReading.words`, `blocks`, `out_of` and `share`."""


def advice(readings: Readings) -> Iterator[Advice]:
    """Yield the limits of the gain that a stack's counters show."""
    tiers = [TierReading(readings, name) for name in readings.tiers]
    asked = max(tier.asked for tier in tiers)
    if not asked and not any(tier.used for tier in tiers):
        yield Advice("no_traffic", "", 1.0, "No request has asked for a block yet.", "send requests, and ask again.")
    elif not asked:
        sentence = "The stack keeps no history, so that hits and the reasons for misses are not known."
        yield Advice("no_history", "", 0.0, sentence, "remove `history: 0` from the stack's file.")
    for rule in RULES:
        for tier in tiers:
            blocks, out_of = rule.blocks(tier), rule.out_of(tier)
            if out_of < rule.blocks_min or blocks < rule.least * out_of:
                continue
            counts = {"blocks": f"{blocks:,.0f}", "out_of": f"{out_of:,.0f}", "share": f"{blocks / out_of:.0%}"}
            texts = (text.format_map({**tier.words(), **counts}) for text in (rule.sentence, rule.setting))
            yield Advice(rule.name, tier.name, round(min(1.0, blocks / out_of), 4), *texts)


def gains(readings: Readings) -> Iterator[str]:
    """Yield sentences about the work that hits have spared the engine."""
    tiers = [TierReading(readings, name) for name in readings.tiers]
    hits, asked = sum(tier.hits for tier in tiers), max(tier.asked for tier in tiers)
    tokens = readings.total(f"{PREFIX}restored_tokens_total")
    prompts = sum(readings.total(name) for name in _PROMPT_TOKENS)
    share = f", {tokens / prompts:.0%} of {prompts:,.0f} tokens of prompts" if prompts else ""
    loaded = readings.total(f"{PREFIX}loaded_blocks_total", tier=PRIMARY_NAME)
    compute_s = loaded * readings.highest(f"{PREFIX}compute_block_seconds")
    spared = f" That is at least {rounded_seconds(compute_s)} of its work." if compute_s else ""
    yield f"The engine did not have to compute {tokens:,.0f} tokens{share}.{spared}"
    if asked:
        parts = ", ".join(f"{tier.name} {tier.hits:,.0f}" for tier in tiers)
        percent = int(100 * hits / asked)  # rounded down: 100% means no miss
        yield f"{hits:,.0f} of {asked:,.0f} blocks that requests asked for were hits ({percent}%): {parts}."
