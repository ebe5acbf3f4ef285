"""The manager that an engine asks, and everything that it does to any secondary tier.

An engine's scheduler calls `manager.TieringOffloadingManager`, on one thread, which owns the objects of this package.
No call does I/O, and none but `drain_jobs` and `shutdown` waits. Only `isolation`, `late`, `lookups` and `outages` have
a side on other threads. What must stay true: a lookup answers True only for a block that the primary tier has whole,
every waiting of a request has a limit, and a tier that fails or hangs costs its own hits only.

base          the contract of a secondary tier: jobs, results, lookups
interface     the contract of a manager, for engines and programs
engine_calls  the calls of an engine in its steps
manager       the whole manager: with a program's and a host's calls, resets and the end
requests      the state of each request, and the manager's limits
many_lookups  lookups of many blocks in one call
search        asking the tiers, in order, for a block that the primary tier lacks
search_owner  who is told what requests ask for
prefetch      promotions that begin before a request looks its blocks up
pace          whether a load arrives sooner than the engine computes
cascade       offering blocks to the tiers, and storing those that they select
promotions    loading blocks from the tiers, and holding them for requests
tiers         the tiers together
guarded       one tier with its budgets, breaker, admission and deadlines
budget        blocks in flight in one direction, and their limit
breaker       keeps jobs and lookups from a tier that fails
admission     a tier's choice of the blocks that are worth a write
write_budget  which blocks a tier stores if it may write only so much an hour
answers       checks of what tiers return
account       what is counted and noted of each tier
uses          telling the tiers which blocks are used in memory
room          requests of programs that wait for rows or budgets
prefix        the manager for callers that have lists of block hashes
lookups       batched lookups in a remote index, with deadlines
outages       the log's lines when a tier fails and works again
factory       tiers made from their settings
wrapper       the base of tiers that wrap another one
isolation     a thread for a tier whose methods may block
late          a tier that cannot be opened yet
"""
