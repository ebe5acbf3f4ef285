"""A soak: a replay over four tiers for minutes or hours, with faults that come and go, and limits that must hold.

A real redis-server and moto's server stand behind fault proxies; nvme and fs have directories. The request workload is
larger than what any tier but the last holds, so every tier is full, evicts and is asked all the time. A second process
replays the same requests, so that each finds what the other has stored. One fault after the other is switched on and
off. Every block that comes back is compared, and twice a second processes and directories are looked at.

`python -m tests.support.soak --minutes 60` runs one from a shell.
"""
