"""The user's part of a namespace."""

from __future__ import annotations

from tiered_kv.config.reading import fill_variables
from tiered_kv.config.validation import validate
from tiered_kv.integrations.user_namespace import UserModelNamespace

LOCATION = ("namespace",)


def test_a_value_from_the_environment_is_not_shown() -> None:
    given = fill_variables({"tenant": "${TENANT}", "revision": "main"}, {"TENANT": "a tenant"})
    user = validate(UserModelNamespace, given, LOCATION)
    namespace = user.complete("vLLM", {"model": "m"}, {"weights": "w"}, LOCATION)
    assert namespace.tenant == "a tenant"
    assert namespace.shown() == {
        "model": "m",
        "revision": "main",
        "tenant": "***",
        "extra": {"weights": "w"},
    }
    assert "a tenant" not in repr(namespace)
    assert namespace.secret_texts() == {"a tenant"}
