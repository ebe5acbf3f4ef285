"""Settings of gcs and azure are checked when the file is read; and which identity is used is told in words."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tiered_kv.errors import ConfigError
from tiered_kv_object.identity import asks_for_tokens, identity_of, rival_of
from tiered_kv_object.settings import AzureSettings, GcsSettings

GCS: dict[str, object] = {"bucket": "kv-blocks"}
AZURE: dict[str, object] = {"account": "mystore", "container": "kv-blocks"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"bucket": "Kv"},
        {"endpoint": "127.0.0.1:80"},
        {"endpoint": "http://user:pw@host"},
        {"prefix": "a/../b"},
        {"access_token": "a\n"},
        {"access_token": "a", "service_account_file": "/a"},
        {"ttl": 0},
        {"container": "kv-blocks"},
    ],
)
def test_a_wrong_setting_of_gcs_is_an_error(wrong: dict[str, object]) -> None:
    GcsSettings.model_validate(GCS)
    with pytest.raises(ValidationError):
        GcsSettings.model_validate({**GCS, **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"account": "My-Store"},
        {"container": "a--b"},
        {"account_key": " key"},
        {"account_key": "a", "sas_token": "b"},
        {"capacity": 0},
        {"bucket": "kv-blocks"},
    ],
)
def test_a_wrong_setting_of_azure_is_an_error(wrong: dict[str, object]) -> None:
    AzureSettings.model_validate(AZURE)
    with pytest.raises(ValidationError):
        AzureSettings.model_validate({**AZURE, **wrong})


@pytest.mark.parametrize(
    ("entry", "environment", "identity"),
    [
        ({"access_token": "secret"}, {"GOOGLE_SERVICE_ACCOUNT": "/f"}, "the setting 'access_token'"),
        ({}, {"GOOGLE_APPLICATION_CREDENTIALS": "/f"}, "the variable GOOGLE_APPLICATION_CREDENTIALS"),
        ({}, {}, "the service account of this machine or pod (Google's metadata server)"),
    ],
)
def test_the_identity_of_gcs(entry: dict[str, object], environment: dict[str, str], identity: str) -> None:
    assert identity_of(GcsSettings.model_validate({**GCS, **entry}), environment) == identity


@pytest.mark.parametrize(
    ("entry", "environment", "identity"),
    [
        ({"account_key": "secret"}, {"AZURE_STORAGE_TOKEN": "t"}, "the setting 'account_key'"),
        ({}, {"AZURE_STORAGE_ACCOUNT_KEY": "k", "AZURE_USE_AZURE_CLI": "1"}, "the variable AZURE_STORAGE_ACCOUNT_KEY"),
        ({}, {"AZURE_USE_AZURE_CLI": "true"}, "the login of Azure's CLI (AZURE_USE_AZURE_CLI)"),
        ({}, {}, "the managed identity of this machine"),
    ],
)
def test_the_identity_of_azure(entry: dict[str, object], environment: dict[str, str], identity: str) -> None:
    assert identity_of(AzureSettings.model_validate({**AZURE, **entry}), environment) == identity


@pytest.mark.parametrize(
    ("entry", "environment", "rival"),
    [
        ({"account_key": "k"}, {"AZURE_STORAGE_TOKEN": "t"}, "AZURE_STORAGE_TOKEN"),
        ({"account_key": "k"}, {"AZURE_FEDERATED_TOKEN_FILE": "/f", "AZURE_STORAGE_ACCOUNT_KEY": "x"}, None),
        ({"sas_token": "s"}, {"AZURE_STORAGE_ACCOUNT_KEY": "k"}, "AZURE_STORAGE_ACCOUNT_KEY"),
        ({}, {"AZURE_STORAGE_TOKEN": "t"}, None),
    ],
)
def test_a_variable_that_takes_the_place_of_a_setting(
    entry: dict[str, object], environment: dict[str, str], rival: str | None
) -> None:
    found = rival_of(AzureSettings.model_validate({**AZURE, **entry}), environment)
    assert found == (rival and (*entry, rival))


@pytest.mark.parametrize("variable", ["AZURE_STORAGE_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY"])
def test_the_variable_is_an_error_that_names_both(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed")
    from tiered_kv_object.client import ObjectClient

    monkeypatch.setenv(variable, "c2VjcmV0")
    with pytest.raises(ConfigError, match=f"'sas_token', but the variable {variable}") as caught:
        ObjectClient(AzureSettings.model_validate({**AZURE, "sas_token": "sv=1&sig=a"}), "x")
    assert "c2VjcmV0" not in str(caught.value)
    assert "tier" not in str(caught.value)  # the stack names the tier's place


@pytest.mark.parametrize(
    ("entry", "environment", "expected"),
    [
        ({"account_key": "k"}, {}, False),
        ({}, {"AZURE_STORAGE_SAS_TOKEN": "s"}, False),
        ({}, {"AZURE_FEDERATED_TOKEN_FILE": "/f", "AZURE_STORAGE_SAS_TOKEN": "s"}, True),
        ({}, {}, True),
    ],
)
def test_whether_a_server_gives_tokens(entry: dict[str, object], environment: dict[str, str], expected: bool) -> None:
    assert asks_for_tokens(AzureSettings.model_validate({**AZURE, **entry}), environment) is expected
