"""What people and their tools look at: metrics, status, notices. Everything is read when somebody asks.

`Stack.counters()` is where all numbers come from. `vocabulary` says what each is called and means.
"""
