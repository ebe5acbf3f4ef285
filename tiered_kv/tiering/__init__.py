"""The manager that an engine asks, and everything that it does to any secondary tier.

An engine's scheduler calls `manager.TieringOffloadingManager`, on one thread, which owns the objects of this package.
No call does I/O, and none but `drain_jobs` and `shutdown` waits. Only `audit`, `isolation`, `late`, `lookups` and
`outages` also run code on other threads. What must stay true: a lookup answers True only for a block that the primary
tier has whole. Each wait of a request has a limit. A tier that fails or hangs costs only its own hits.

base          the contract of a secondary tier: jobs, results, lookups
interface     the contract of a manager, for engines and programs
engine_calls  the calls of an engine in its steps
manager       the whole manager: also the calls of programs and hosts, resets and the shutdown
requests      the state of each request, and the manager's limits
many_lookups  lookups of many blocks in one call
search        asking the tiers, in order, for a block that the primary tier lacks
search_owner  the receiver of requests' questions and misses
prefetch      promotions that begin before a request looks its blocks up
orders        blocks that a router or a warm start wants in memory
prefetch_budget  how many blocks orders may load
pace          whether a load arrives sooner than the engine computes
cascade       offering blocks to the tiers, and storing those that they select
promotions    loading blocks from the tiers, and holding them for requests
tiers         all guarded tiers of one manager
guarded       one tier with its budgets, breaker, admission and deadlines
budget        blocks in flight in one direction, and their limit
breaker       keeps jobs and lookups from a tier that fails
admission     a tier's choice of the blocks that are worth a write
write_budget  which blocks a tier stores if it may write only so much an hour
answers       checks of what tiers return
account       the counts and events of each tier
gauges        the entry of a guarded tier in the registry of its stack
uses          reports to the tiers which blocks requests use in the primary tier
room          requests of programs that wait for rows or budgets
prefix        the manager for callers that have lists of block hashes
lookups       batched lookups in a remote index, with deadlines
outages       the log's lines when a tier fails and works again
spell         the limit of these lines
factory       tiers made from their settings
wrapper       the base of tiers that wrap another one
isolation     a thread for a tier whose methods may block
late          a tier that cannot be opened yet
"""
