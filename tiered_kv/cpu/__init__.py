"""The primary tier: blocks in CPU memory, the only tier that a GPU reaches."""
