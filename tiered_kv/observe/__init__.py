"""What people and their tools look at: why a block was a miss."""
