"""What a tier's author tests a tier with, and what this project tests its own with.

    conformance     a pytest class to subclass: the contract of a secondary tier, check by check
    state_machine   a Hypothesis state machine over a whole stack, against the dictionary in `model`
    faults, lies    tiers that hang, fail, come late or lie, made by wrapping one that does not
    four_methods    the smallest tier there can be
    watch           who may touch which row of the primary region, seen from the tiers
    guard           a backend that notices who writes into a block that was given back
    races           threads on a stack with hardly any room (race_stacks), or a scheduler (racing_scheduler); race_cases
    hindrance       workers of good tiers, held up
    soak            all tiers under load for hours, while faults come and go
    prompt          a wrapper that makes tiers with threads repeatable
    rig             a tier on a test bench, with known bytes in every block
    gate, clock     what tests steer the above with, in place of sleeping
    leaks           what a test leaves behind
    wire_faults     a pytest class to subclass: a tier whose server is behind a bad network (its bench: wire_bench)
    damage, doors   what happens to stored bytes, and the way to them behind a tier's back
    segment_map     which byte of an nvme segment belongs to what; segment_bench damages them
    code_scan       what in Python source turns data into code
    fuzzing         inputs that are almost right, for everything that reads bytes from outside
    key_value       a small server, and a good tier over the network to it
    proxy           a TCP proxy that does to connections what networks do

The extra `test` brings pytest and Hypothesis. Import the modules by name.
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("pytest") is not None:
    import pytest

    # So that a failed `assert` of these modules shows its values in an author's test run too.
    pytest.register_assert_rewrite(
        *(f"tiered_kv.testing.{name}" for name in ("conformance", "rig", "model", "wire_bench", "wire_faults"))
    )
