"""What is counted: the names of all metrics, and the objects that count.

Any thread may count (`instruments.Counters`). The exporters, the command and the engines read. What must stay true:
each metric has one name and one meaning, in `vocabulary`, and the number of its labels is bounded.

vocabulary   the name and meaning of every metric
instruments  counters, histograms, notices for an operator, the timer of steps
"""
