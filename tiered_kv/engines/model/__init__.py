"""A model's KV cache in bytes, and the cache that a load needs; `tiered-kv size` shows both.

`settings` reads a `config.json`, `architectures` makes `layers` of it, with the `states` of recurrent ones, and
`sizing` compares their bytes with users, memory and disks. No function keeps state, and only `settings` reads a file.
"""
