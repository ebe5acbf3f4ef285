"""Copies of stored blocks from one storage to another, as records: without decoding, while the source may be in use.

`tiered-kv copy`, `export` and `import` call it, on one thread for a copy. A record moves as it is stored: with its
checksum, its namespace and its encryption.

source  what is copied: the blocks of a tier's storage, and which of them
target  where it goes: a tier that gets records in place of blocks
copier  the loop between the two, and its counts

What must stay true: the source is only read. A record reaches the target only after its checksum was verified, and only
if a load there can read it. Memory is bounded by the target's rows, whatever is copied. A copy that ends early can be
made again, and passes over the blocks that the target has by then.
"""
