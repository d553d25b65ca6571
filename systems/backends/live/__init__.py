"""Workers that are real: processes of this machine, the wall clock, parameters in shared memory."""
