"""The wire of simulated ranks: one process, its ranks one at a time."""
