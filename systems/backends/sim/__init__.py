"""A simulated cluster: durations from a cost model, in virtual time, on the real runtime."""
