"""The primary tier: blocks in CPU memory, the only tier that a GPU copies from and to.

`TieringOffloadingManager` (`tiered_kv/tiering/manager.py`) calls it on the scheduler's thread, which owns the index,
the pins and the policy. Workers and secondary tiers copy from and to its rows. What must stay true: a row that a
transfer uses is neither evicted nor unmapped, and no request loads a block that is still being written.

region    the memory: one mapping, divided into rows
backend   which rows are free, and the state of each block
rows      the row of each key, its pins, and evictions
orphans   blocks from before a reset, until their rows are free
policies  which block is evicted next
"""
