"""Tools for authors of tiers to test their tiers. This project tests its own tiers with them too.

    conformance     a pytest class to subclass: the contract of a secondary tier, check by check
    wire_faults     a pytest class to subclass: a tier whose server is behind a bad network (its bench: wire_bench)
    state_machine   a Hypothesis state machine over a whole stack, against the dictionary in `model`
    rig             drives a tier, with known bytes in every block
    faults, lies    wrappers that make a good tier hang, fail, answer late or answer wrongly
    watch           checks which job uses which row of the primary region, from the tiers' side
    prompt          a wrapper that makes runs of tiers with threads repeatable
    proxy           a TCP proxy with the faults of networks; `proxied` is one connection of it
    damage          the damages that the bytes of a stored block record may suffer
    leaks           threads, descriptors, shared memory and files that a test leaves behind
    gate, clock     let a test control the wrappers without sleeping; `waiting` waits for a condition
    redis_servers, redis_clusters, redis_sentinels, s3_servers
                    fixtures with servers on loopback, and with fakeredis and moto
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
        *(f"tiered_kv.testing.{name}" for name in ("conformance", "rig", "model", "wire_bench", "wire_faults"))
    )
