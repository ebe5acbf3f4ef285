"""Tiered KV inside inference engines: one module or package an engine, each imported only by who uses that engine."""
