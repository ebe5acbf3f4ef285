"""Keywords that a newer release of an engine passes to a class of ours.

An engine's factory makes our classes: a release that passes a keyword more would end the engine, although the keyword
seldom matters to us. The constructors in the engines' plugins call `known_to_base`, on the engine's thread. What must
stay true: no keyword is dropped without a warning, and a keyword that a user wrote is no matter of this module: a wrong
one is an error.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

_log = logging.getLogger(__name__)


def known_to_base(ours: type, unknown: Mapping[str, object]) -> dict[str, Any]:
    """Return the keywords that the engine's class below `ours` takes; warn of each, taken or not.

    Args:
        ours: The class that the engine makes.
        unknown: Keywords that its constructor does not know.
    """
    if not unknown:
        return {}
    base = ours.__mro__[1]
    taken = _parameters_of(base)
    passed_on = {name: value for name, value in unknown.items() if taken is None or name in taken}
    for name in unknown:
        where = f"passed on to {base.__name__}" if name in passed_on else "without effect"
        _log.warning(
            "%s got the keyword '%s', which this tiered_kv does not know: %s. The engine may be newer than the tested "
            "ones",
            ours.__name__,
            name,
            where,
        )
    return passed_on


def _parameters_of(base: type) -> frozenset[str] | None:
    """Return the names that a constructor takes; None if it takes any."""
    try:
        parameters = inspect.signature(base).parameters.values()
    except (ValueError, TypeError):  # of a class in C
        return frozenset()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return None
    return frozenset(each.name for each in parameters)
