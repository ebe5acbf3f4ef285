"""A stack in a program: opening one, its calls, and what an open stack exports.

A program, the command, an engine's plugin and the host's server open one, on their own thread. What must stay true: an
opening that fails leaves nothing open, and each call ends by its timeout. Calls of several threads reach the manager
one after another.

open             `open_stack` and `open_engine_stack`: wire everything that the configuration names
facade           put and get, for programs that are no engine
values           values of any length up to a block, framed in blocks
calls            a program's calls of the manager, under one lock
async_stack      put and get for asyncio programs
buffers          the bytes of a caller's buffer, array or tensor
exporters        HTTP server, status, Prometheus, events
"""
