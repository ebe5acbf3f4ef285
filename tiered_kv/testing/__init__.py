"""Tools for authors of tiers to test their tiers. This project tests its own tiers with them too.

    conformance     a pytest class to subclass: the contract of a secondary tier, check by check
    wire_faults     a pytest class to subclass: a tier whose server is behind a bad network
    state_machine   a Hypothesis state machine over a whole stack, against the dictionary in `model`
    rig             a tier on a test bench, with known bytes in every block
    faults, lies    tiers that hang, fail, come late or lie, made by wrapping one that does not
    watch           who may touch which row of the primary region, seen from the tiers
    prompt          a wrapper that makes tiers with threads repeatable
    proxy           a TCP proxy that does to connections what networks do
    damage          what can happen to the bytes of a stored block record
    leaks           what a test leaves behind
    gate, clock     what tests steer the above with, in place of sleeping; waiting waits for a condition
    server_process  a server on loopback, in a process of its own; fake_redis and s3_servers are fixtures with
                    fakeredis and moto
    four_methods    the smallest possible tier
    key_value       a small server, and a good tier over the network to it

The extra `test` installs pytest and Hypothesis. Import the modules by name.
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("pytest") is not None:
    import pytest

    # So that a failed `assert` of these modules shows its values in an author's test run too.
    pytest.register_assert_rewrite(
        *(f"tiered_kv.testing.{name}" for name in ("conformance", "rig", "model", "wire_faults"))
    )
