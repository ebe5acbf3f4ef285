"""Request workloads: traces and generated chats, and their replay, simulation and bench."""
