"""The base of a tier that keeps blocks as objects in a bucket of any server, shared by all stacks of one namespace.

An author implements the requests of `store`, over a client library or sockets, and subclasses `tier.ObjectTier`,
`administration.ObjectAdministration` and `settings.ObjectSettings`. The scheduler's thread calls the tier, which only
queues jobs and lookups, and notes uses. The toolkit's worker threads (`tiered_kv/toolkit/blocking.py`) make the
requests, each for one block at a time. Background threads sweep and renew blocks, probe a bucket that does not answer,
and save resets.

What must stay true.

- Every request for a block ends by its deadline, with all its attempts.
- A load verifies the whole record. A damaged object is deleted. An object that this process cannot read stays, and is a
  miss.
- A sweep deletes only objects that have the name of a block of this namespace (`Naming.is_block`).
- While the bucket does not answer, no lookup waits for it (`BucketProbe`).

A store (`ObjectTier._store_one`) is one PUT from the block's row. A block that is known to exist is not sent. A load
(`ObjectTier._load_one`) is one GET into the row, and a second one if the record was damaged. A lookup (`Presence.ask`)
finds the end of each prefix with a few HEADs.

How room is made. With `ttl` or `capacity`, one process of the namespace at a time lists all blocks (`Sweeper`;
`SweepRight` decides which process). It deletes blocks that are too old, and then the oldest beyond the capacity. A used
block that is half as old as the deleted ones is renewed: the server copies it onto itself. Without either setting no
sweep runs. A rule of the server that deletes objects only makes misses.

What a restart does. The process reads the epoch's mark (`EpochObject`). Lookups find all blocks of that epoch. A reset
draws another epoch (`ObjectTier.reset_cache`). Nobody uses the older blocks, so sweeps delete them.

store           what a tier asks of its server: the author implements it
verdict         the results of requests
failures        counts and logs failed requests
retries         repeats requests
settings        the settings that object tiers share
metrics         their metrics
naming          the names of the objects
epoch           the object that keeps the epoch's mark
presence        finds out which blocks exist, with few requests
probe           asks a bucket that does not answer, in the background
uses            when blocks were stored and used
deletion_age    the age at which sweeps delete blocks
sweep_right     which process sweeps
sweeper         deletes what is too old or too much, and renews what is used
tier            the tier
administration  survey, verify and purge
simulation      such a tier without bytes, for `tiered-kv simulate`
"""
