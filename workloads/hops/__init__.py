"""Hops: pointer chasing that a 0.2 M-parameter policy learns from a generative judge in minutes."""
