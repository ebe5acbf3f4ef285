"""Request workloads and what is measured with them: traces, a chat generator, replay, and the tier bench."""
