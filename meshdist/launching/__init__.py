"""Start, monitor and stop the processes of a job, without importing torch."""
