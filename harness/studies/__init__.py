"""How do systems compare? Suites of runs, sweeps that run them, comparisons, and the paper's claims."""
