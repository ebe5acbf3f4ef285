"""What limits the gain of a running stack, by its counters in Prometheus's text format: a table of rules.

The counters are those since the stack was opened, and so are all shares.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from tiered_kv._cli.output import printable
from tiered_kv.config.settings import PRIMARY_NAME
from tiered_kv.config.units import rounded_bytes, rounded_seconds
from tiered_kv.metrics.vocabulary import PREFIX, TIER_PREFIX
from tiered_kv.reasons import reason_of

_BLOCKS_MIN: Final = 100
"""Blocks that requests must have asked for before their shares say anything."""
_SAMPLE: Final = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? ([^ ]+)(?: -?\d+)?")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_PROMPT_TOKENS: Final = ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total")


@dataclass(frozen=True, slots=True)
class Advice:
    """What limits the gain: which share of the blocks it concerns, the sentence, and the setting to change."""

    name: str
    tier: str
    share: float
    sentence: str
    setting: str


class Readings:
    """The samples of Prometheus's text format, by name and labels."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for line in text.splitlines():
            if (found := _SAMPLE.fullmatch(line)) is not None:
                labels = {name: printable(value) for name, value in _LABEL.findall(found[2] or "")}
                self._samples.setdefault(found[1], []).append((labels, _number(found[3])))
        self.tiers = list(
            dict.fromkeys(
                labels["tier"]
                for name, samples in self._samples.items()
                if name.startswith(PREFIX)
                for labels, _ in samples
                if "tier" in labels
            )
        )
        self.tiers.sort(key=lambda tier: tier != PRIMARY_NAME)

    def total(self, name: str, **labels: str) -> float:
        """Return the sum over all engines, and over all other labels."""
        return sum(value for of, value in self._samples.get(name, []) if labels.items() <= of.items())

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """Return the sums by the values of a label."""
        found: dict[str, float] = {}
        for of, value in self._samples.get(name, []):
            if labels.items() <= of.items():
                found[of.get(label, "")] = found.get(of.get(label, ""), 0.0) + value
        return found

    def highest(self, name: str, **labels: str) -> float:
        """Return the highest value of all engines, for what is no count."""
        return max((value for of, value in self._samples.get(name, []) if labels.items() <= of.items()), default=0.0)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 <= value < float("inf") else 0.0


class TierReading:
    """The counters of one tier."""

    def __init__(self, readings: Readings, name: str) -> None:
        self.name, self._readings = name, readings
        self.is_last = name == readings.tiers[-1]

    def count(self, name: str, *values: str, label: str = "reason") -> float:
        """Return a counter, or the sum of its series with one of these values of a label."""
        found = self._readings.by(label, f"{PREFIX}{name}", tier=self.name)
        return sum(number for value, number in found.items() if not values or value in values)

    def own(self, name: str) -> float:
        """Return a counter that the tier itself counts."""
        return self._readings.total(f"{TIER_PREFIX}{name}", tier=self.name)

    @property
    def asked(self) -> float:
        return self.count("blocks_total")

    @property
    def hits(self) -> float:
        return self.count("blocks_total", "hit", label="result")

    @property
    def failed(self) -> float:
        return self.count("failed_blocks_total")

    def missed_last(self, reason: str) -> float:
        """Return the blocks that no tier had, if this is the last one: others may have what it does not."""
        return self.count("misses_total", reason) if self.is_last else 0.0

    @property
    def offered(self) -> float:
        return self.count("stored_blocks_total") + self.count("skipped_blocks_total")

    @property
    def used(self) -> float:
        """Blocks that requests loaded or stored, of which the ghosts know the hits with other sizes."""
        return max(self.asked, self.count("stored_blocks_total") + self.count("loaded_blocks_total"))

    @property
    def ghost_gain(self) -> float:
        """Blocks that twice the capacity would have hit in addition."""
        twice, once = (self.count("ghost_hits_total", size, label="size") for size in ("2", "1"))
        return max(0.0, twice - once)

    def words(self) -> dict[str, str]:
        """Return the words that sentences may use."""
        highest = partial(self._readings.highest, tier=self.name)
        capacity = highest(f"{PREFIX}capacity_bytes") or highest(f"{TIER_PREFIX}capacity_bytes")
        failed = self._readings.by("reason", f"{PREFIX}failed_blocks_total", tier=self.name)
        reason = max(failed, key=failed.__getitem__, default="")
        is_primary = self.name == PRIMARY_NAME
        return {
            "tier": self.name,
            "capacity": rounded_bytes(int(capacity)),
            "capacity_setting": "`primary.capacity`" if is_primary else f"`capacity` of {self.name}",
            "budget": rounded_bytes(int(highest(f"{PREFIX}store_budget_bytes"))),
            "load": rounded_seconds(highest(f"{PREFIX}expected_block_seconds")),
            "compute": rounded_seconds(self._readings.highest(f"{PREFIX}compute_block_seconds")),
            "recovered": f"{self.own('recovered_blocks_total'):,.0f}",
            "reason": f"{reason}: {reason_of(reason).sentence}",
        }


@dataclass(frozen=True, slots=True)
class Rule:
    """What may limit a tier: the blocks concerned, out of how many, the share from which it counts, and the advice."""

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
    Rule(
        "small_pages",
        lambda tier: tier.count("lacks_huge_pages"),
        lambda tier: tier.count("lacks_huge_pages"),
        1.0,
        "The memory of the host's cache has no huge pages, with which disks are faster.",
        "reserve {capacity} of huge pages (`sysctl vm.nr_hugepages`), and start the server again.",
        blocks_min=1,
    ),
)
"""What may limit a stack, the most important first.

The texts are formatted with `TierReading.words`, `blocks`, `out_of` and `share`."""


def advice(readings: Readings) -> Iterator[Advice]:
    """Yield what limits the gain of a stack with these counters."""
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
    """Yield sentences about what hits have spared the engine."""
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
