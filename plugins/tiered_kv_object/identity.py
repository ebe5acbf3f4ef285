"""Which credentials a store uses, in words for messages, and whether a server must give tokens for them.

obstore tries them, and does not say which.

`ObjectClient` asks when it opens a store, on any thread. The order is that of obstore 0.12. What must stay true: the
words name a setting, a variable or a file, and never its value.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tiered_kv_object.settings import AzureSettings, GcsSettings, ObstoreSettings

_GOOGLE: Final = (
    ("GOOGLE_BEARER_TOKEN",),
    ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH"),
    ("GOOGLE_SERVICE_ACCOUNT_KEY",),
    ("GOOGLE_APPLICATION_CREDENTIALS",),
)
_AZURE: Final = (
    ("AZURE_STORAGE_TOKEN",),
    ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY"),
    ("AZURE_STORAGE_CLIENT_SECRET", "AZURE_CLIENT_SECRET"),
    ("AZURE_FEDERATED_TOKEN_FILE",),
    ("AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN"),
    ("AZURE_USE_AZURE_CLI",),
)
_MEANS: Final = {
    "AZURE_FEDERATED_TOKEN_FILE": "the workload identity of the variable AZURE_FEDERATED_TOKEN_FILE",
    "AZURE_USE_AZURE_CLI": "the login of Azure's CLI (AZURE_USE_AZURE_CLI)",
}
_RIVALS: Final = {
    "access_token": _GOOGLE[1] + _GOOGLE[2],
    "service_account_file": _GOOGLE[0] + _GOOGLE[2],
    "account_key": _AZURE[0],
    "sas_token": _AZURE[0] + _AZURE[1] + _AZURE[2] + _AZURE[3],
}
"""Variables that obstore uses in place of a setting, or does not open with it."""
_WITHOUT_SERVER: Final = (*_GOOGLE[:3], *_AZURE[:2], _AZURE[4])
_GCLOUD: Final = Path(".config/gcloud/application_default_credentials.json")


def identity_of(settings: ObstoreSettings, environment: Mapping[str, str] = os.environ) -> str:
    """Return which identity a store with these settings uses in this environment."""
    if isinstance(settings, GcsSettings):
        for name in ("access_token", "service_account_file"):
            if getattr(settings, name) is not None:
                return f"the setting '{name}'"
        home = Path(environment.get("HOME", "/nonexistent"))
        otherwise = (
            f"the application default credentials in ~/{_GCLOUD}"
            if (home / _GCLOUD).exists()
            else "the service account of this machine or pod (Google's metadata server)"
        )
        return _of_environment(_GOOGLE, environment) or otherwise
    assert isinstance(settings, AzureSettings)
    for name in ("account_key", "sas_token"):
        if getattr(settings, name) is not None:
            return f"the setting '{name}'"
    return _of_environment(_AZURE, environment) or "the managed identity of this machine"


def rival_of(settings: ObstoreSettings, environment: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """Return a setting with credentials, and the variable of this environment that would be used in its place."""
    given = (name for name in _RIVALS if getattr(settings, name, None) is not None)
    return next(((name, each) for name in given for each in _RIVALS[name] if environment.get(each)), None)


def asks_for_tokens(settings: ObstoreSettings, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a server, or another program, may have to give a token before a request can be made."""
    if any(getattr(settings, name, None) is not None for name in _RIVALS):
        return False
    known = _GOOGLE if isinstance(settings, GcsSettings) else _AZURE
    found = next((names for names in known if any(map(environment.get, names))), None)
    return found not in _WITHOUT_SERVER


def _of_environment(known: tuple[tuple[str, ...], ...], environment: Mapping[str, str]) -> str:
    found = next((name for names in known for name in names if environment.get(name)), "")
    return _MEANS.get(found, f"the variable {found}") if found else ""
