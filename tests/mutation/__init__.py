"""Mutation testing: do the tests notice when the code that decides results is wrong? `make mutants`."""
