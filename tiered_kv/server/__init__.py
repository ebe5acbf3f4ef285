"""One cache for all engines of a machine: a server process that owns the stacks, and its clients in the engines.

`tiered-kv serve` runs the server's half: one thread (`server.CacheServer.serve`) owns all sessions and makes all calls
of the managers. An engine's scheduler calls the client's half (`client.AttachedManager`), which answers from the
server's messages and never waits. What must stay true: a row that an engine may read or write belongs to its session
until all of the engine's processes have ended or given it back, and the death of either side costs misses only.

server, namespaces, served_stack, session, session_request, questions, ended: the server, its
stacks, and each engine's use of them.
listener, acceptor, users, process, processes, descriptors: its socket, who may connect, and who is connected.
memory, generations, allocation, reset_file: its memory.
protocol, channel, welcome: the messages, and how they travel.
attach, connection, client, attached_request, attached_requests, attached_stores, attached_counts, idle, engine_manager,
connect, worker: the client, for engines, their workers, and programs.
"""
