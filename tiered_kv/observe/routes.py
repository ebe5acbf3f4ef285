"""What the server of a stack answers: one function a path."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

from tiered_kv.errors import ConfigError
from tiered_kv.observe.explain import Explained, explain_query
from tiered_kv.observe.prometheus import CONTENT_TYPE, StackCollector, exposition, require_client
from tiered_kv.observe.server import Answer, QueryError, Routes
from tiered_kv.observe.status import Observed, status

Query = Mapping[str, Sequence[str]]
"""The values of each name in a query."""


class Served(Observed, Explained, Protocol):
    """What is looked at: a `Stack`."""


def metrics(stack: Served, query: Query) -> Answer:
    """Return all metrics, as Prometheus reads them."""
    collector = StackCollector(stack.counters, secrets=stack.config.secret_texts())
    return Answer(exposition(collector), CONTENT_TYPE)


def status_page(stack: Served, query: Query) -> Answer:
    """Return the status, as JSON."""
    return json_answer(status(stack))


def health(stack: Served, query: Query) -> Answer:
    """Return that the process serves; what its tiers do is in the status."""
    return Answer(b"ok\n", "text/plain; charset=utf-8")


def explanation(stack: Served, query: Query) -> Answer:
    """Return why blocks were misses, as JSON."""
    try:
        return json_answer(explain_query(stack, query))
    except ConfigError as error:
        raise QueryError(str(error)) from error


ROUTES: Final[Mapping[str, Callable[[Served, Query], Answer]]] = {
    "/metrics": metrics,
    "/status": status_page,
    "/explain": explanation,
    "/healthz": health,
}
"""By path; each may raise `QueryError`, and runs on a thread of the server's."""


def json_answer(value: object) -> Answer:
    """Return an answer of JSON."""
    return Answer(json.dumps(value, allow_nan=False).encode(), "application/json")


def routes_of(stack: Served) -> Routes:
    """Return the routes of one stack.

    Raises:
        MissingExtraError: `prometheus_client` is not installed.
    """
    require_client()
    return {path: partial(route, stack) for path, route in ROUTES.items()}
