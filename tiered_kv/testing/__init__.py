"""Tools for authors of tiers to test their tiers. Import the modules by name; the extra `test` installs their needs.

A tier's tests call them, on pytest's thread, which plays the scheduler. What must stay true: a check fails only for a
broken promise, not for a slow machine, and waits a bounded time.

conformance     a pytest class to subclass: the contract of a secondary tier
administration  a pytest class to subclass: the contract of its administration
wire_faults     a pytest class to subclass: a tier whose server is behind a bad network
state_machine   a Hypothesis state machine over a whole stack
model           what the stack may answer, and a wrapper that checks which job uses which row of the primary region
rig             drives one tier, with known bytes in every block
faults          a wrapper that makes jobs fail, and one that makes threads repeatable
proxy           a TCP proxy with the faults of networks
control         a clock and bounded waits, in place of sleeping
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("pytest") is not None:
    import pytest

    # A failed `assert` of these modules then shows the asserted values.
    pytest.register_assert_rewrite(
        *(f"tiered_kv.testing.{name}" for name in ("administration", "conformance", "rig", "model", "wire_faults"))
    )
