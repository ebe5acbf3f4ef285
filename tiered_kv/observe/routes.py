"""What the server of a stack answers, by path."""

from __future__ import annotations

import json

from tiered_kv.errors import ConfigError
from tiered_kv.observe.explain import Observed, explain_query
from tiered_kv.observe.prometheus import CONTENT_TYPE, StackCollector, exposition
from tiered_kv.observe.server import Answer, Query, QueryError, Routes
from tiered_kv.observe.status import status


def routes_of(stack: Observed) -> Routes:
    """Return the routes of one stack; each runs on a thread of the server's.

    Raises:
        MissingExtraError: `prometheus_client` is not installed.
    """
    collector = StackCollector(stack.counters, secrets=stack.config.secret_texts())

    def explanation(query: Query) -> Answer:
        try:
            return _json(explain_query(stack, query))
        except ConfigError as error:
            raise QueryError(str(error)) from error

    return {
        "/metrics": lambda _: Answer(exposition(collector), CONTENT_TYPE),
        "/status": lambda _: _json(status(stack)),
        "/explain": explanation,
        "/healthz": lambda _: Answer(b"ok\n", "text/plain; charset=utf-8"),
    }


def _json(value: object) -> Answer:
    return Answer(json.dumps(value, allow_nan=False).encode(), "application/json")
