"""Where a run is shown besides its own files. A sink may fail without harm to the run."""
