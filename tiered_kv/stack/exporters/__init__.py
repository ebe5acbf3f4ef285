"""What leaves the process for operators and routers: pages over HTTP, metrics of Prometheus, events.

A stack opens what its file asks for. The HTTP server answers on its own threads, and reads counters. The manager's
thread hands over events once a step; the publisher's thread sends them. What must stay true: no reader and no
subscriber delays a step, and no name or label of a metric shows a secret.

server          the HTTP server of a stack, and its pages
status          `/status` as JSON; why a block was a miss
metrics         counters as metrics with labels
events          the publisher
event_queue     what is reported and not sent yet
event_replay    messages that are kept for subscribers that missed some
event_messages  the form of the messages
"""
