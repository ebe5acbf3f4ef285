"""What operators and their tools look at: metrics, status, events and reports. `Stack.counters()` has all numbers."""
