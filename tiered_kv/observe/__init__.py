"""Metrics, events and reports: what people and their tools look at."""
