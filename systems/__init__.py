"""The RL systems under test: one pipeline, several policies for who owns which GPU when."""
