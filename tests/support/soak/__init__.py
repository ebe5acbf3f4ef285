"""A soak: a replay over four tiers for minutes or hours, with faults that come and go, and limits that must hold.

A redis-server and moto's server are behind fault proxies; nvme and fs have directories. The workload is larger than any
tier but s3, so every tier is full, evicts, and is asked all the time. A second process replays the same requests and
shares the storage. Every loaded block is compared; processes and directories are checked twice a second.

`python -m tests.support.soak --minutes 60` runs one from a shell.
"""
