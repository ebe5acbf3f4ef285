"""Tools for authors of tiers to test their tiers. Import the modules by name; the extra `test` installs their needs.

conformance     a pytest class to subclass: the contract of a secondary tier
wire_faults     a pytest class to subclass: a tier whose server is behind a bad network
state_machine   a Hypothesis state machine over a whole stack, against the dictionary in `model`
rig             drives one tier, with known bytes in every block
faults, lies    wrappers that make a tier hang, fail, come late or lie
watch           a wrapper that checks which job uses which row of the primary region
prompt          a wrapper that makes tiers with threads repeatable
proxy           a TCP proxy with the faults of networks
damage          damages of a stored block record
leaks           threads, descriptors, memory and files that a test leaves behind
gate, clock     control of threads and time, in place of sleeping; `waiting` waits for a condition
four_methods    the smallest possible tier
key_value       a small server, and a tier for it
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("pytest") is not None:
    import pytest

    # So that a failed `assert` of these modules shows its values.
    pytest.register_assert_rewrite(
        *(f"tiered_kv.testing.{name}" for name in ("conformance", "rig", "model", "wire_faults"))
    )
