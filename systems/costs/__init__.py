"""What do things cost on a cluster? Durations of serving, training and shifts, memory, and lower bounds."""
