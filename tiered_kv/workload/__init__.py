"""Workloads: requests from traces or invented chats, and their replay, simulation and bench.

The command calls them (`replay`, `simulate`, `bench`), on its main thread, which acts as an engine's scheduler and
worker. What must stay true: every byte that a replay or bench loads is compared, and a trace is read by its documented
meaning or refused with the line.

request                       the requests of a workload, built-in chats, keys
trace, turns, agents          traces: files, and the forms of their lines
logs, reports, prompts        prompts in logs of engines and results of benchmarks; ids of their blocks
summary                       what a trace has, and the trace in our form
forms, fields, known_formats  names of the forms; the types of a trace's fields; formats that are refused
replay, tally                 real bytes through a manager; its counters
simulation, hit_rates         the same without bytes; hit rates of policies
bench, content                throughput of one tier; bytes that are cheap to check
"""
