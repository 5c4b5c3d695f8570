"""The backend of simulated ranks: one process, of whose ranks exactly one runs."""
