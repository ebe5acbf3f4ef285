"""What this project tests itself with, beyond what `tiered_kv.testing` gives to the author of a tier.

These modules know the insides of the built-in tiers. `tests/conftest.py` makes them importable for tests, and for the
programs that tests start. From a shell, run them in the checkout's root: `python -m tests.support.soak --help`.

    soak            all tiers under load for hours, while faults come and go
    simulation      the manager over tiers in simulated time, from a seed
    races           threads on a stack with hardly any room, or a scheduler (racing_scheduler); race_cases
    crash_cases     programs that are killed at their system calls (crash_scenario, crash_server)
    host_crashes    a host's server, its engines and workers, killed at a system call, or at random
    syscalls        system calls of a program: recorded, failed, killed at
    disks           disks of nvme stores that fail, wait, or check the order of flushes
    mounts          file systems that are small, or lose their power
    engines         programs in the environments of vLLM, LMCache and SGLang; lmcache_programs, sglang_programs
    fuzzing         mutated inputs for everything that reads bytes from outside
    redis_servers   a Redis server on loopback; redis_groups has a cluster, and a master with a sentinel
    redis_masters   masters of a cluster's memory, which fail, come, go and move in cluster_memory under cluster_client
    places          storage for tiers of every type, their tenants, and doors to the stored bytes behind a tier's back
    segment_map     which byte of an nvme segment belongs to what
    secret_hunt     secrets planted in settings, and found in whatever a stack writes
    figures         what the proofs of docs/explanation/guarantees.md tried, and how much of it kept its promise
"""
