"""Start, monitor and stop a job's processes, without importing torch."""
