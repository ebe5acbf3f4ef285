"""The forms of traces that are read, by their names for people.

`trace` and the readers of each form name them; the command shows them. What must stay true: each form has one unit of
time. `--time-unit` replaces that of forms which tools use with several.
"""

from __future__ import annotations

from enum import Enum


class Form(Enum):
    """What a trace is: a name for people, and the unit of its times."""

    OWN = "tiered-kv", "ms"
    MOONCAKE = "Mooncake", "ms"
    BAILIAN = "Qwen-Bailian", "s"
    LOOKUPS = "LMCache's log of lookups", "s"
    TURNS = "sessions with turns (aiperf)", "ms"
    TEXTS = "prompts with times (aiperf)", "ms"
    AGENTS = "agents' sessions (kv-cache-tester)", "s"
    AIPERF = "aiperf's raw records", "ns"
    GUIDELLM = "guidellm's report", "s"
    VLLM = "vLLM's log", "s"
    SGLANG = "SGLang's log", "s"

    @property
    def title(self) -> str:
        return self.value[0]

    @property
    def time_unit(self) -> str:
        return self.value[1]

    @property
    def has_open_unit(self) -> bool:
        """Whether `--time-unit` can replace the unit: the times of reports and logs are not open."""
        return self not in (Form.AIPERF, Form.GUIDELLM, Form.VLLM, Form.SGLANG)
