"""Metrics: the names of all that is counted, and the objects that count.

Any thread may count (`counters.Counters`). The exporters, the command and the engines read. What must stay true:
each metric has one name and one meaning, and the number of its labels is bounded.

metric      what a metric is, and what a well-formed one is
vocabulary  the manager's metrics, and those that several tiers have; a tier's own are in its plugin
declared    checks of the metrics that plugins declare for their tiers
counters    counts of events by name and labels, and functions that read them
series      all counts at one moment, each with its metric, its tier and its labels
registry    where the counts of a stack come together
own         a tier's own numbers, which its `stats` returned
histogram   counts of values by size
notices     the last changes in a stack, for an operator
step_timer  how long the manager takes in a scheduler's step
history     why blocks were missed
"""
