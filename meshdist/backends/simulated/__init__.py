"""Run simulated ranks: threads of one process, of which exactly one runs at a time."""
