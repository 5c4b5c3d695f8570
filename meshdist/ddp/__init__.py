"""Data parallelism over a mesh axis."""
