"""Where the pipeline runs: simulated, co-simulated or live, behind one contract (`base.py`)."""
