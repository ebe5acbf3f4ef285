"""What is counted: counters, histograms, notices, and the description of each metric."""
