"""Entries of `secondary`: each is checked by the settings' model of its tier type.

The stack's configuration calls these functions when it is read, and the factory when a tier is opened, on the caller's
thread. An entry's tier type is found once: its settings remember it.
"""

from __future__ import annotations

from collections.abc import Mapping

from tiered_kv.config.hooks import REFERENCE, TierType, tier_plugins
from tiered_kv.config.secrets import HIDDEN, EnvironmentText, redact, scrub
from tiered_kv.config.settings import TierSettings
from tiered_kv.config.validation import Location, Problems, check, dotted, raise_problems
from tiered_kv.errors import ConfigError
from tiered_kv.metrics.metric import Metric
from tiered_kv.metrics.vocabulary import COMMON


def tier_settings(entry: object) -> TierSettings:
    """Return an entry of `secondary`, checked by the model of its type; settings are returned as they are."""
    return raise_problems(check_entry(entry, ()))


def tier_type_of(settings: TierSettings) -> TierType:
    """Return the type of an entry. It was found when the entry was checked; for other settings it is found now."""
    tier_type = getattr(settings, "_tier_type", None)
    if not isinstance(tier_type, TierType):
        settings._tier_type = tier_type = tier_plugins().resolve(settings.type)
    return tier_type


def declared_metrics(settings: TierSettings) -> dict[str, Metric]:
    """Return by name the metrics that the type of an entry declares, and the ones that several tiers share.

    Settings that a program has made have no tier type.
    """
    tier_type = getattr(settings, "_tier_type", None)
    own = tier_type.metrics if isinstance(tier_type, TierType) else ()
    return COMMON | {metric.name: metric for metric in own}


def check_entries(entries: object, location: Location, taken: Mapping[str, str]) -> tuple[TierSettings, ...]:
    """Return a list of tiers as the settings of their types, for a validator; no tier may have a name in `taken`.

    Raises:
        Problems: It is no list, or an entry cannot be used, or two have one name.
    """
    if not isinstance(entries, (list, tuple)):  # the message hides the value: it may be a secret at the wrong place
        message = "expected a list of tiers, each a mapping with the key 'type'"
        raise Problems([ConfigError(message, location=dotted(location))])
    names, tiers, problems = dict(taken), list[TierSettings](), list[ConfigError]()
    for index, entry in enumerate(entries):
        checked = check_entry(entry, (*location, index))
        if isinstance(checked, list):
            problems += checked
        elif checked.name in names:
            message = f"the name '{checked.name}' is taken by {names[checked.name]}; give each tier a name of its own"
            problems.append(ConfigError(message, location=dotted((*location, index, "name"))))
        else:
            names[checked.name] = "another tier"
            tiers.append(checked)
    if problems:
        raise Problems(problems)
    return tuple(tiers)


def check_entry(entry: object, location: Location) -> TierSettings | list[ConfigError]:
    """Return an entry of `secondary` as the settings of its type, or an error for each key that cannot be used."""
    if isinstance(entry, TierSettings):
        return entry
    name = entry.get("type") if isinstance(entry, Mapping) else None
    if not isinstance(name, str):
        if isinstance(entry, Mapping) and "type" in entry:
            problems = check(TierSettings, {"type": name}, location)
            if isinstance(problems, list):
                return problems
        known = ", ".join([*tier_plugins().tier_types(), "'module:Class'"])
        message = f"expected a mapping with the key 'type', which is one of: {known}"
        return [ConfigError(message, location=dotted(location))]
    if ":" in name and not REFERENCE.fullmatch(name):
        shown = HIDDEN if isinstance(name, EnvironmentText) else f"'{redact(name)}'"
        message = f"expected a tier type, or 'module:Class', found {shown}"
        return [ConfigError(message, location=dotted((*location, "type")))]
    try:
        tier_type = tier_plugins().resolve(name)
    except ConfigError as error:
        message = scrub(str(error), {name}) if isinstance(name, EnvironmentText) else str(error)
        return [ConfigError(message, location=dotted((*location, "type")))]
    checked = check(tier_type.settings, entry, location)
    if isinstance(checked, TierSettings):
        checked._tier_type = tier_type
    return checked
