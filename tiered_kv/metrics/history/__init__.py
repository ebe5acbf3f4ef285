"""Why blocks were missed, and how many more a larger tier would find.

The manager's accounts and its search note batches on the scheduler's thread, without a lock (`recorder.BlockHistory`).
The history's thread takes them into the ledger, under a lock; `/status`, `/explain` and the metrics read it there. What
must stay true: memory is bounded, the scheduler never waits, and each missed block is counted under one reason.

recorder  the queue, its thread, and the readers
ledger    the fates of blocks, the reasons of misses, the counts
fates     eight bytes for the fate of a block in a tier
ghosts    estimates of the hits with another capacity
"""
