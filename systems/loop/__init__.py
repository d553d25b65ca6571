"""Time and tasks: the clocks that a run may live on, queues on it, and tasks that end with their owner."""
