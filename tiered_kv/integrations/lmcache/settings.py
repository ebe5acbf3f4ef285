"""LMCache's `adapter_params`, checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field, field_validator

from tiered_kv.config.namespace import Label, Seed
from tiered_kv.config.reading import fill_variables
from tiered_kv.config.settings import TierSettings
from tiered_kv.config.units import Count
from tiered_kv.config.validation import validate
from tiered_kv.direct.settings import HostSettings
from tiered_kv.errors import ConfigError
from tiered_kv.integrations.user_namespace import UserNamespace

LOCATION = "adapter_params"

QUEUE_S_MAX = 60.0
JOB_TIMEOUT_S_MAX = 120.0
"""LMCache reuses an object's memory when the object's lock is 300 s old (a store) or 600 s (a load), in use or not. So
an object waits at most `QUEUE_S_MAX` for a tier, and a tier begins no work on it after its `job_timeout`."""


class AdapterNamespace(UserNamespace):
    """The user's part of the namespace: what LMCache does not report."""

    unknown_key_advice: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("model", "dtype", "layout", "layers", "groups", "parallel"), "LMCache sets it"
    )

    revision: Label = Field(
        description="Names the state of the weights and of all else that LMCache does not report: change it with them."
    )
    hash_algorithm: Label | None = Field(default=None, description="The server's --hash-algorithm.")
    hash_seed: Seed | None = Field(default=None, description="The seed of that hash: text, or an integer.")


class AdapterSettings(HostSettings):
    """The tiers below LMCache's L1, and what shapes the bytes."""

    location = LOCATION

    namespace: AdapterNamespace = Field(description="What LMCache does not report of a block's bytes.")
    sets: Count = Field(
        default=1,
        ge=1,
        le=64,
        description="How many models and layouts of blocks may be kept; each gets an equal part of a capacity.",
    )

    @field_validator("tiers")
    @classmethod
    def _jobs_end_in_time(cls, tiers: tuple[TierSettings, ...]) -> tuple[TierSettings, ...]:
        for number, tier in enumerate(tiers):
            if tier.job_timeout > JOB_TIMEOUT_S_MAX:
                raise ConfigError(
                    f"expected at most {JOB_TIMEOUT_S_MAX:g}s, found {tier.job_timeout:g}s: LMCache takes an object's "
                    "memory back when its lock is 300 s old",
                    location=f"{LOCATION}.tiers.{number}.job_timeout",
                )
        return tiers


def read_settings(params: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> AdapterSettings:
    """Return `adapter_params` as settings; `${NAME}` in texts stands for a variable of the environment."""
    return validate(AdapterSettings, fill_variables(params, environ), (LOCATION,))
